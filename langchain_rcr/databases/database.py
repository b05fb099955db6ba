"""Runs SQL that a language model wrote: one read-only statement at a time, in a separate process, within limits."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from functools import partial
from io import FileIO
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import unquote

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.section import check_limits
from langchain_rcr.errors import InputError, ProgramError

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 60.0
"""Seconds that a process may take to start and connect, on a busy machine."""
_GRACE = 1.25
"""A process that hasn't stopped its query by itself is ended at this many times the limit."""
_POLL_S = 0.2
"""Seconds between checks whether the server has ended an overrun query, while no other query may start."""
_LONGEST_ERROR = 1 << 24
"""The most bytes in a message without rows, which may quote a statement."""
_KEPT = re.compile("SYSTEMROOT|LD_LIBRARY_PATH|TZ")
_KEPT_FOR_POSTGRESQL = re.compile(f"{_KEPT.pattern}|HOME|APPDATA|(PG|KRB5|SSL_CERT_).*")
"""Environment variables passed to a process: what Python needs to start, and libpq's own."""
_CONNINFO = re.compile(r"\s*(?:host|hostaddr|port|dbname|user|password|passfile|service|sslmode)\s*=")
_PASSWORD = re.compile(r"(?i)((?:password|passwd|pwd)\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s;&]+)|(:)[^@\s]+(?=@)")

OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""What begins anew in a forked process, in which nobody ends the queries of the parent's threads."""

# A backend that reuses the number of an ended one is younger.
_STILL_RUNNING = """
SELECT pid FROM pg_catalog.pg_stat_activity JOIN (VALUES {}) AS overrun (pid, age) USING (pid)
WHERE clock_timestamp() - backend_start > make_interval(secs => age - 1)
"""


class Database(AbstractContextManager["Database"]):
    """Runs queries read-only, each within limits.

    Each query runs in a separate process, which is kept for the next query, or killed if the query overruns: SQLite
    can't interrupt a function that computes a single value. May be called from any thread, and used as a context
    manager. On Windows only the databases' own time limits hold, and no limit on memory.

    PostgreSQL's server can't interrupt every function either. A query that it still computes counts towards
    `max_processes` until it ends; if these use up all places, further queries are refused. Give PostgreSQL a role that
    may only SELECT: a query can call any function that the role may. A pickle holds the address, password included.

    Args:
        database: `postgresql://…`, or the path of a SQLite file; see `address_of`.
        timeout_s: seconds a query may take; its process ends at 1.25 times that at the latest.
        max_rows: rows it may return.
        max_bytes: bytes of its rows, as JSON except for large values.
        max_memory: bytes of address space for its process, about 50 MB of which are in use before the query starts.
        max_processes: queries that may run at the same time; others wait.
        patience_s: seconds that a query waits before it is refused because of queries that the server still computes.

    Raises:
        InputError: it can't be opened, or a limit is invalid.
        MissingExtraError: PostgreSQL without psycopg.
    """

    def __init__(
        self,
        database: str | Path,
        *,
        timeout_s: float = 5.0,
        max_rows: int = 10_000,
        max_bytes: int = 8 << 20,
        max_memory: int = 1 << 29,
        max_processes: int = 8,
        patience_s: float = 0.0,
    ) -> None:
        place, postgres = address_of(database)
        limits: dict[str, Any] = {"timeout_s": timeout_s, "max_rows": max_rows}
        limits |= {"max_bytes": max_bytes, "max_memory": max_memory}
        check_limits(max_processes=max_processes, **limits)
        if postgres:
            require("psycopg", "pgvector")
            self._complaint = ""  # the process's own message says what failed
        else:
            shown = _PASSWORD.sub(r"\1\2***", place)
            self._complaint = f"the database {shown} can't be read: "
            if not Path(place).is_file():
                raise InputError(f"{self._complaint}no such file")
            place = str(Path(place).absolute())
        self._settings: dict[str, Any] = {
            "database": place,
            "postgres": postgres,
            "packages": [entry for entry in sys.path if entry] if postgres else [],
            **limits,
        }
        self._copy = partial(Database, place, max_processes=max_processes, patience_s=patience_s, **limits)
        self._max_processes, self._patience_s = max_processes, patience_s
        self._begin()
        self._idle.append(self._process())

    def _begin(self) -> None:
        """Forget all processes and queries."""
        self._places, self._looking = threading.Semaphore(self._max_processes), threading.Lock()
        self._overruns: list[tuple[int, float]] = []
        self._idle: deque[_Process] = deque()
        # For queries that are awaited: asyncio's own threads are few, and the service needs them.
        self.threads = ThreadPoolExecutor(self._max_processes, "langchain-rcr-sql")
        OPEN.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()  # with its own processes

    def __call__(self, program: str) -> list[tuple[Any, ...]]:
        """The rows of a query.

        Raises:
            ProgramError: it is not a query, fails, takes too long, or returns or needs too much.
            InputError: the database can't be read any more, or the server still computes too many earlier queries.
        """
        until = time.monotonic() + self._patience_s
        while not self._places.acquire(timeout=_POLL_S):
            self._forget_ended()
            if len(self._overruns) >= self._max_processes and time.monotonic() > until:
                what = f"computes {self._max_processes} queries that took longer than {self._settings['timeout_s']:g} s"
                raise InputError(f"the PostgreSQL server still {what}: try again later, or raise max_processes")
        process: _Process | None = None
        try:
            process = self._process()
            reply = process.ask(program)
        finally:
            if process is not None:
                self._idle.append(process)
            if process is None or process.overrun is None:
                self._places.release()
            else:
                self._overruns.append(process.overrun)
        if "fault" in reply:
            raise self._fault(reply["fault"])
        if "refused" in reply:
            raise ProgramError(reply["refused"])
        return rows_of(reply)

    def _fault(self, said: str) -> InputError:
        return InputError(f"{self._complaint}{' '.join(said.split())}")

    def _forget_ended(self) -> None:
        """Release the places of queries that the server has stopped computing."""
        with self._looking:
            if not self._overruns:
                return
            now, overruns = time.monotonic(), list(self._overruns)
            process = self._process()
            reply = process.ask(_STILL_RUNNING.format(", ".join(f"({pid}, {now - since})" for pid, since in overruns)))
            self._idle.append(process)
            for overrun in overruns if "rows" in reply else ():  # if that isn't known, they still count
                if (overrun[0],) not in rows_of(reply):
                    self._overruns.remove(overrun)
                    self._places.release()

    def close(self) -> None:
        """End the processes, as does garbage collection of this object. The next query starts one again."""
        while self._idle:
            self._idle.pop().close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process(self) -> _Process:
        """An idle process."""
        while self._idle:
            with suppress(IndexError):  # another thread took it
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.close()
        process = _Process(self._settings)
        reply = process.receive(_START_S)
        if "ready" not in reply:
            process.close()
            python = f"{os.fsdecode(get_executable())} (multiprocessing.set_executable names another)"
            raise self._fault(reply.get("fault", f"the process that runs queries does not start with {python}"))
        return process


class _Process:
    """A process that runs queries."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.overrun: tuple[int, float] | None = None
        self._settings = settings
        self._tag = secrets.token_hex(8)
        kept = _KEPT_FOR_POSTGRESQL if settings["postgres"] else _KEPT
        self._process = subprocess.Popen(  # noqa: S603 — our own file
            [get_executable(), "-I", "-S", str(_WORKER)],
            env={name: value for name, value in os.environ.items() if kept.fullmatch(name)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # only this process handles Ctrl-C
        )
        self.close = weakref.finalize(self, _end, self._process)
        # The address may hold a password, so it isn't passed as an argument, which everybody can see.
        self._send({**settings, "tag": self._tag})

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, program: str) -> dict[str, Any]:
        """Run a program; if that fails, this ends, and `overrun` is the server's process for it and its start time."""
        limit = _GRACE * self._settings["timeout_s"]
        reply: dict[str, Any] = {"ended": True}
        try:
            self._send(program)
            reply = self.receive(_START_S if self._settings["postgres"] else limit)
            while "started" in reply:
                self.overrun = reply["started"], time.monotonic()
                reply = self.receive(limit)
            return reply
        finally:  # also on Ctrl-C: the next query must not get this one's rows
            if "ended" in reply or "started" in reply:
                self.close()
            else:
                self.overrun = None

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # there will be no reply
            cast("IO[bytes]", self._process.stdin).write(f"{json.dumps(message)}\n".encode())

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message, or a note that the process ended or sent none in time."""
        deadline = time.monotonic() + seconds
        try:
            sizes = self._bytes(16, deadline)
            length, behind = (int.from_bytes(part, "little") for part in (sizes[:8], sizes[8:]))
            if length + behind > 2 * self._settings["max_bytes"] + _LONGEST_ERROR:
                raise EOFError  # none of our processes sends this much
            body, attached = self._bytes(length, deadline), self._bytes(behind, deadline)
        except TimeoutError:
            return {"ended": True, "refused": f"longer than {self._settings['timeout_s']:g} s"}
        except EOFError:
            return {"ended": True, "refused": "its process failed"}
        return received(str(body, "utf-8"), attached, self._tag)

    def _bytes(self, count: int, deadline: float) -> memoryview:
        """The next `count` bytes that the process writes; raises TimeoutError or EOFError."""
        output, found = cast("FileIO", self._process.stdout), memoryview(bytearray(count))
        at = 0
        while at < count:
            left = max(0.0, deadline - time.monotonic())
            if sys.platform != "win32":  # which can't wait for pipes
                waiting = select.poll()  # unlike `select.select`, also for files numbered 1024 and above
                waiting.register(output, select.POLLIN)
                if not waiting.poll(1000 * left):
                    raise TimeoutError
            read = output.readinto(found[at:])
            if not read:
                raise EOFError
            at += read
        return found


def rows_of(reply: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of a reply, which has them as lists of columns, each for some of the rows."""
    return [row for columns in reply["rows"] for row in zip(*columns, strict=True)]


_MADE: dict[str, Any] = {
    "Decimal": Decimal,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time_of_day.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "str": str,
}
"""Makes values that JSON lacks."""


def received(message: str, attached: memoryview, tag: str) -> dict[str, Any]:
    """A message of the other process, with its attachments.

    `tag` marks objects that stand for values that JSON lacks, or for attachments, given by length, in order.
    """
    at = 0

    def value(found: dict[str, Any]) -> Any:
        nonlocal at
        if tag not in found:
            return found
        kind, given = found[tag]
        if kind in ("blob", "text"):
            at += given
            large = attached[at - given : at]
            return str(large, "utf-8", "surrogatepass") if kind == "text" else bytes(large)
        return _MADE[kind](given)

    try:
        return cast("dict[str, Any]", json.loads(message, object_hook=value))
    except (RecursionError, ValueError, ArithmeticError) as error:  # deeply nested JSON, a long number
        return {"refused": f"a value that can't be read: {error}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes and waits
        pass


def address_of(database: str | Path) -> tuple[str, bool]:
    """What to open, and whether it is PostgreSQL.

    Args:
        database: the path of a SQLite file, `postgresql://…`, or libpq's `host=… dbname=…`; or such a URL as SQLAlchemy
            takes it: `postgresql+psycopg://…`, `sqlite:///relative/path`, `sqlite:////path`.

    Raises:
        InputError: it is of another kind, or in memory, which another process can't read.
    """
    text = str(database)
    if not text.strip():
        raise InputError("the database is blank: give postgresql://… or a SQLite file")
    scheme = re.match(r"(?i)\s*([a-z][\w.:-]*)(\+\w+)?://", text)
    if isinstance(database, Path) or not scheme:
        return text, not isinstance(database, Path) and _CONNINFO.match(text) is not None
    dialect, rest = scheme[1].lower(), text[scheme.end() :]
    if dialect in ("postgresql", "postgres"):
        return f"postgresql://{rest}", True
    if dialect != "sqlite":
        raise InputError(f"databases of the kind '{dialect}' can't be read: give postgresql://… or a SQLite file")
    file = unquote(rest.partition("?")[0])
    if file[:1] != "/" or file in ("/", "/:memory:"):
        raise InputError("a SQLite database in memory can't be read from another process: give sqlite:///FILE")
    return file[1:], False


def open_database(database: str | Path, **limits: Any) -> Database:
    """A `Database`; takes the same arguments."""
    return Database(database, **limits)


def _forked() -> None:
    for database in tuple(OPEN):
        database._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
