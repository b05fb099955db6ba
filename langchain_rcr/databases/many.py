"""Queries on many SQLite files: the question says which one, and only a few are open at a time."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from langchain_rcr.basics.items import MARKS, escaped, names_in
from langchain_rcr.basics.section import check_limits
from langchain_rcr.databases.database import OPEN, Database, address_of
from langchain_rcr.databases.schema import schema_text
from langchain_rcr.errors import InputError, refusing

LAYOUT = "{db_id}/{db_id}.sqlite"
"""Path of a database's file in a folder, as in Spider."""
_SCHEMAS = 1000
"""Databases whose schemas are kept in memory."""
_WAITING = 256
"""Threads for queries that are awaited. Those on one database wait for each other, but others shouldn't."""
_NAME = re.compile(rf"\w[\w{MARKS}.\- ]{{0,199}}")
"""What a field may hold: a name that can't lead to another folder."""


class Databases(AbstractContextManager["Databases"]):
    """Runs queries on the SQLite file that a question's fields name, in one process per file, as `Database` does.

    May be called from any thread. Queries on one database run one after the other. To open another database, the least
    recently used idle one is closed; if all are in use, the query waits.

    Args:
        where: a folder, laid out as Spider's (`{db_id}/{db_id}.sqlite`), or a template, `data/{db_id}.sqlite`.
        max_databases: how many have a process at the same time.
        **limits: for each, as `Database` takes them.

    Raises:
        InputError: the template is invalid, it is PostgreSQL, or a limit is invalid.
    """

    def __init__(self, where: str | Path, *, max_databases: int = 8, **limits: Any) -> None:
        place, postgres = address_of(where)
        if postgres:
            raise InputError("a template or a folder names SQLite files; of PostgreSQL give one database")
        check_limits(max_databases=max_databases, **limits)
        if Path(place).is_dir():
            place = f"{escaped(place)}/{LAYOUT}"
        with refusing(f"the database {place} is not a template"):
            self.names = tuple(dict.fromkeys(names_in(place)))
            if not self.names:
                raise InputError(f"it takes plain names, as in {LAYOUT}")
        self._template = str(Path(escaped(str(Path.cwd())), place))
        self._copy = partial(Databases, self._template, max_databases=max_databases, **limits)
        self._limits = {**limits, "max_processes": 1}
        self._most = max_databases
        self._schema_text = lru_cache(_SCHEMAS)(schema_text)
        self._begin()

    def _begin(self) -> None:
        """Forget all processes and queries."""
        self._busy: set[str] = set()
        self._idle: OrderedDict[str, Database] = OrderedDict()  # the least recently used first
        self._changed = threading.Condition()
        self.threads = ThreadPoolExecutor(_WAITING, "langchain-rcr-sql")  # as `Database` has them
        OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()  # with its own processes

    def path(self, fields: Mapping[str, Any]) -> str:
        """The file that a question's fields name; an `InputError` if one isn't a plain name, or no file is there."""
        for name in self.names:
            if name not in fields:
                has = ", ".join(map(repr, fields)) or "none"
                raise InputError(f"the database {self._template} needs the field {name!r}; a question's are {has}")
            if not isinstance(fields[name], str) or not _NAME.fullmatch(fields[name]):
                allowed = "text of letters, digits, _, - and ."
                raise InputError(f"{name} = {fields[name]!r:.100} can't name a database: {allowed}")
        path = self._template.format(**{name: fields[name] for name in self.names})
        if not os.path.isfile(path):  # noqa: PTH113 — unlike pathlib, it takes names of any length
            raise InputError(f"the database {path} can't be read: no such file")
        return path

    def schema(self, fields: Mapping[str, Any], *, samples: int = 0) -> str:
        """What a prompt says about the file that a question's fields name; read once, see `schema_text`."""
        return f"-- SQLite\n{self._schema_text(self.path(fields), samples=samples)}"

    def __call__(self, program: str, fields: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of a query on the database that these fields name; errors as for `path` and `Database`."""
        return self.run(program, self.path(fields))

    def run(self, program: str, path: str) -> list[tuple[Any, ...]]:
        """The rows of a query on a file; errors as for `__call__`."""
        with self._changed:
            self._changed.wait_for(lambda: path not in self._busy and len(self._busy) < self._most)
            database = self._idle.pop(path, None)
            self._busy.add(path)
            if len(self._busy) + len(self._idle) > self._most:
                self._idle.popitem(last=False)[1].close()
        try:
            database = database or Database(path, **self._limits)
            return database(program)
        finally:
            with self._changed:
                self._busy.remove(path)
                if database is not None:
                    self._idle[path] = database
                self._changed.notify_all()

    def close(self) -> None:
        """End the idle processes, as does garbage collection of this object. The next query starts one again."""
        with self._changed:
            while self._idle:
                self._idle.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()


def are_many(database: str | Path) -> bool:
    """Whether this is a folder of databases or a template, rather than the address of one database."""
    place, postgres = address_of(database)
    return Path(place).is_dir() or (not postgres and "{" in place and not Path(place).is_file())
