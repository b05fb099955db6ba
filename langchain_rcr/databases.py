"""Running SQL that a language model wrote: one reading statement at a time, in a process of its own, within limits."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from langchain_rcr.errors import InputError, MissingExtraError, ProgramError

_WORKER = Path(__file__).with_name("query_worker.py")
_START_S = 60.0
"""Seconds that a process may take to start and connect, on a busy machine."""

_GRACE = 1.25
"""Times the limit after which a process is ended that hasn't stopped its query by itself."""


class Database:
    """Runs queries, each within limits, and reads only.

    Queries run in processes of their own, one for each call at a time, that are kept for the next query. A process is
    ended and replaced if it overruns: SQLite can't interrupt a function that computes one value. Other limits are those
    of the process (memory) and of what it passes on (rows, bytes). May be called from any thread, and used as a context
    manager. On Windows only the time limits that the databases keep by themselves hold, and none of memory.

    Give PostgreSQL a role that may only SELECT: a query can call any function that the role may.

    Args:
        database: `postgresql://…`, or the path of a SQLite file.
        timeout_s: seconds a query may take; its process ends at 1.25 times that at the latest.
        max_rows: rows it may give.
        max_bytes: bytes of its rows, as JSON.
        max_memory: bytes of address space that its process may have, some 50 MB of them before it begins.

    Raises:
        InputError: it can't be opened.
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
    ) -> None:
        postgres = is_postgresql(database)
        if postgres and find_spec("psycopg") is None:
            raise MissingExtraError("psycopg", "pgvector")
        if not postgres and not Path(database).is_file():
            raise InputError(f"the database {database} can't be read: no such file")
        place = str(database) if postgres else str(Path(database).resolve())
        unread = f"the database {database} can't be read"
        self._complaint = "no connection to the PostgreSQL database" if postgres else unread
        self._settings = {
            "database": place,
            "postgres": postgres,
            "timeout_s": timeout_s,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "max_memory": max_memory,
        }
        self._idle: deque[_Process] = deque()
        self._idle.append(self._process())

    def __call__(self, program: str) -> list[tuple[Any, ...]]:
        """The rows of a query.

        Raises:
            ProgramError: it is not a query, fails, takes too long, or gives or needs too much.
            InputError: the database can't be read any more.
        """
        process = self._process()
        try:
            reply = process.ask(program)
        except BaseException:  # such as Ctrl-C: the next query must not get this one's rows
            process.close()
            raise
        if "ended" in reply:
            process.close()
        else:
            self._idle.append(process)
        if "fault" in reply:
            raise InputError(f"{self._complaint}: {' '.join(reply['fault'].split())}")
        if "refused" in reply:
            raise ProgramError(reply["refused"])
        return [tuple(row) for row in reply["rows"]]

    def close(self) -> None:
        """End the processes; so does the end of this object. The next query starts one again."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process(self) -> _Process:
        """One that waits for a query, or a new one."""
        with suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.close()
        process = _Process(self._settings)
        reply = process.receive(_START_S)
        if "ready" in reply:
            return process
        process.close()
        raise InputError(f"{self._complaint}: {' '.join(reply.get('fault', 'its process does not start').split())}")


class _Process:
    """A process that runs queries."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._tag = settings, secrets.token_hex(8)
        self._rest = b""
        self._decode = json.JSONDecoder(object_hook=self._value).decode
        self._process = subprocess.Popen(  # noqa: S603 — our own file
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is this process's business
        )
        self.close = weakref.finalize(self, _end, self._process)
        # The address may hold a password: it isn't passed as an argument, which everybody can see.
        self._send({**settings, "tag": self._tag})

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, program: str) -> dict[str, Any]:
        """Run a program."""
        limit = _GRACE * self._settings["timeout_s"]
        self._send(program)
        reply = self.receive(_START_S if self._settings["postgres"] else limit)
        return self.receive(limit) if "started" in reply else reply

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # there will be no reply
            cast("IO[bytes]", self._process.stdin).write(f"{json.dumps(message)}\n".encode())

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message, or that it ended: by itself, or for having none in time."""
        output = cast("IO[bytes]", self._process.stdout).fileno()
        deadline = time.monotonic() + seconds
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            left = max(0.0, deadline - time.monotonic())
            if sys.platform != "win32" and not select.select([output], [], [], left)[0]:
                return {"ended": True, "refused": f"longer than {self._settings['timeout_s']:g} s"}
            piece = os.read(output, 1 << 16)
            if not piece:
                return {"ended": True, "refused": "its process failed"}
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        message: dict[str, Any] = self._decode(line.decode())
        return message

    def _value(self, found: dict[str, Any]) -> Any:
        """What a JSON object stands for."""
        if self._tag not in found:
            return found
        kind, given = found[self._tag]
        return _MADE[kind](given)


_MADE: dict[str, Any] = {
    "bytes": bytes.fromhex,
    "Decimal": Decimal,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time_of_day.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "str": str,
}
"""How values are made that JSON doesn't have."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes and waits
        pass


def is_postgresql(database: str | Path) -> bool:
    """Whether this is the address of a PostgreSQL database; else it is the path of a SQLite file."""
    return str(database).startswith(("postgresql://", "postgres://"))


def open_database(database: str | Path, **limits: Any) -> Database:
    """A `Database`; takes the same arguments."""
    return Database(database, **limits)
