"""Running SQL that a language model wrote: one reading statement at a time, with limits on time and rows."""

from __future__ import annotations

import sqlite3
import time
import weakref
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from langchain_rcr.errors import InputError, MissingExtraError, ProgramError

_LONGEST = 1 << 20
"""Bytes of a value or a statement in SQLite: no progress is reported while one function builds one value."""

_MAY = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

_OWN_FAULT = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_PROTOCOL")
"""Errors that say something about the database, not about the program."""


class SQLite:
    """Runs queries on a SQLite file, which is opened for reading only.

    Args:
        path: the file.
        timeout_s: seconds a query may take.
        max_rows: rows it may give.

    Attributes:
        close: closes the database; so does the end of this object.

    Raises:
        InputError: there is no such database.
    """

    def __init__(self, path: str | Path, *, timeout_s: float = 5.0, max_rows: int = 10_000) -> None:
        self._timeout, self._max_rows = timeout_s, max_rows
        self._deadline = 0.0
        file = Path(path)
        try:
            if not file.is_file():
                raise FileNotFoundError("no such file")
            address = f"file:{quote(str(file.resolve()))}?mode=ro"
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"the database {path} can't be read: {error}") from None
        self.close = weakref.finalize(self, self._connection.close)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
            self._connection.setlimit(limit, _LONGEST)
        allow, deny = sqlite3.SQLITE_OK, sqlite3.SQLITE_DENY
        self._connection.set_authorizer(lambda action, *_: allow if action in _MAY else deny)
        self._connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 1000)

    def __call__(self, program: str) -> list[tuple[Any, ...]]:
        """The rows of a query.

        Raises:
            ProgramError: it is no query, fails, takes too long or gives too many rows.
        """
        self._deadline = time.monotonic() + self._timeout
        try:
            cursor = self._connection.execute(program)
            rows: list[tuple[Any, ...]] = cursor.fetchmany(self._max_rows + 1)
            if cursor.description is None:
                raise ProgramError("not a query")
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(_OWN_FAULT):
                raise
            raise ProgramError(str(error)) from None
        return _checked(rows, self._max_rows)


class PostgreSQL:
    """Runs queries on a PostgreSQL database, each on a connection of its own and in a read-only transaction.

    Use a role that may only SELECT all the same: a query can call any function that the role may.

    Args:
        url: `postgresql://…`.
        timeout_s: seconds a query may take.
        max_rows: rows it may give.

    Raises:
        MissingExtraError: psycopg is not installed.
        InputError: no connection.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, max_rows: int = 10_000) -> None:
        try:
            self._psycopg: Any = import_module("psycopg")
        except ImportError:
            raise MissingExtraError("psycopg", "pgvector") from None
        self._url, self._max_rows = url, max_rows
        self._limits = f"-c default_transaction_read_only=on -c statement_timeout={max(1, round(1000 * timeout_s))}"
        self._connect().close()

    def __call__(self, program: str) -> list[tuple[Any, ...]]:
        """The rows of a query.

        Raises:
            ProgramError: it is no query, fails, takes too long or gives too many rows.
            InputError: no connection.
        """
        if "\0" in program:  # where the client library would cut it off
            raise ProgramError("a null character")
        with closing(self._connect()) as connection:
            try:
                # On the server a cursor can be declared for one query and nothing else, and only max_rows come over.
                with connection.cursor(name="rcr") as cursor:
                    cursor.execute(program.strip().rstrip(";"))
                    rows: list[tuple[Any, ...]] = cursor.fetchmany(self._max_rows + 1)
            except (self._psycopg.Error, ValueError) as error:
                raise ProgramError(str(error)) from None
        return _checked(rows, self._max_rows)

    def _connect(self) -> Any:
        try:
            given = self._psycopg.conninfo.conninfo_to_dict(self._url).get("options", "")
            options = f"{given} {self._limits}".strip()  # of equal ones the last counts
            return self._psycopg.connect(self._url, options=options, connect_timeout=10)
        except self._psycopg.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(f"no connection to the PostgreSQL database: {reason}") from None


def _checked(rows: list[tuple[Any, ...]], max_rows: int) -> list[tuple[Any, ...]]:
    if len(rows) > max_rows:
        raise ProgramError(f"more than {max_rows} rows")
    return rows


def open_database(database: str, *, timeout_s: float = 5.0, max_rows: int = 10_000) -> SQLite | PostgreSQL:
    """An executor for a database.

    Args:
        database: `postgresql://…`, or the path of a SQLite file.
        timeout_s: seconds a query may take.
        max_rows: rows it may give.

    Raises:
        InputError: it can't be opened.
        MissingExtraError: PostgreSQL without psycopg.
    """
    kind = PostgreSQL if is_postgresql(database) else SQLite
    return kind(database, timeout_s=timeout_s, max_rows=max_rows)


def is_postgresql(database: str) -> bool:
    """Whether a database is a PostgreSQL server's."""
    return database.startswith(("postgresql://", "postgres://"))
