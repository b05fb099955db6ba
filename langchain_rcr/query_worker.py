"""The process in which `databases` runs queries, with limits on its memory and CPU time.

It reads a line of JSON with what to open, then one for each program, and answers each with a line of JSON. Nothing is
imported but the standard library and psycopg: it starts in some 50 ms, and its limits leave the memory to the query.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import quote

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_LONGEST = 1 << 20
"""Bytes of a value or a statement in SQLite."""

_MAY = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

_OWN_FAULT = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_PROTOCOL")
"""Errors that say something about the database, not about the program."""

_AT_ONCE = 100
"""Rows that are read at a time."""


class DatabaseError(Exception):
    """The database can't be used."""


class RefusedError(Exception):
    """The program can't be run."""


def sqlite(path: str, timeout: float) -> Callable[[str], Iterator[list[Any]]]:
    """What gives a program's rows, some at a time, in a SQLite file, which is opened for reading only."""
    deadline = 0.0
    try:
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
        connection.execute("PRAGMA temp_store = MEMORY")  # sorts count as memory, and fill no disk
    except sqlite3.Error as error:
        raise DatabaseError(str(error)) from None
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
    for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
        connection.setlimit(limit, _LONGEST)
    allow, deny = sqlite3.SQLITE_OK, sqlite3.SQLITE_DENY
    connection.set_authorizer(lambda action, *_: allow if action in _MAY else deny)
    # Not called while one function computes one value: then the other process ends this one.
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)

    def run(program: str) -> Iterator[list[Any]]:
        nonlocal deadline
        deadline = time.monotonic() + timeout
        try:
            cursor = connection.execute(program)
            while rows := cursor.fetchmany(_AT_ONCE):
                yield rows
            if cursor.description is None:
                raise RefusedError("not a query")
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(_OWN_FAULT):
                raise DatabaseError(str(error)) from None
            raise RefusedError(f"longer than {timeout:g} s" if name == "SQLITE_INTERRUPT" else str(error)) from None

    return run


def postgresql(url: str, timeout: float) -> Callable[[str], Iterator[list[Any]]]:
    """What gives a program's rows, some at a time, in a PostgreSQL database.

    Each program has a connection of its own, which no setting and no advisory lock outlives, and its transaction may
    only read.
    """
    import psycopg

    def connect() -> Any:
        try:
            given = psycopg.conninfo.conninfo_to_dict(url).get("options") or ""
            limits = f"-c default_transaction_read_only=on -c statement_timeout={max(1, round(1000 * timeout))}"
            # Of equal options the last counts.
            return psycopg.connect(url, options=f"{given} {limits}".strip(), connect_timeout=10)
        except psycopg.Error as error:
            raise DatabaseError(str(error)) from None

    connect().close()

    def run(program: str) -> Iterator[list[Any]]:
        if "\0" in program:  # where the client library would cut it off
            raise RefusedError("a null character")
        with connect() as connection:
            say({"started": True})
            deadline = time.monotonic() + timeout
            try:
                # On the server a cursor can be declared for one query and nothing else, and only some rows come over.
                with connection.cursor(name="rcr") as cursor:
                    cursor.execute(program.strip().rstrip(";"))
                    while rows := cursor.fetchmany(_AT_ONCE):
                        yield rows
                        # Each FETCH has a time limit of its own, which the program may have lifted.
                        left = round(1000 * (deadline - time.monotonic()))
                        if left <= 0:
                            raise RefusedError(f"longer than {timeout:g} s")
                        connection.execute(f"SET LOCAL statement_timeout = {left}")
            except (psycopg.Error, ValueError) as error:
                raise RefusedError(str(error)) from None
            finally:
                connection.close()

    return run


def table(rows: Iterable[list[Any]], encode: Callable[[Any], str], max_rows: int, max_bytes: int) -> str:
    """Rows as JSON.

    Raises:
        RefusedError: there are too many.
    """
    written: list[str] = []
    count = size = 0
    for some in rows:
        count += len(some)
        if count > max_rows:
            raise RefusedError(f"more than {max_rows} rows")
        written.append(encode(some)[1:-1])
        size += len(written[-1])
        if size > max_bytes:
            raise RefusedError(f"rows of more than {max_bytes} bytes")
    return ",".join(written)


def plain(value: Any) -> list[Any]:
    """A value that JSON doesn't have, as a type and what to make it from."""
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, Decimal):
        return ["Decimal", str(value)]
    kind = type(value).__name__
    if kind in ("date", "datetime", "time"):
        return [kind, value.isoformat()]
    if kind == "timedelta":
        return [kind, [value.days, value.seconds, value.microseconds]]
    return ["str", str(value)]


def say(message: dict[str, Any] | str) -> None:
    """Write a line."""
    sys.stdout.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    sys.stdout.flush()


def limit(name: str, value: int) -> None:
    """Limit a resource of this process, where the system can."""
    if resource is None:
        return
    _, hard = resource.getrlimit(getattr(resource, name))
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(getattr(resource, name), (bounded, hard))


def serve(
    database: str, *, postgres: bool, tag: str, timeout_s: float, max_rows: int, max_bytes: int, max_memory: int
) -> None:
    """Answer until there is no more input, or memory is short."""
    try:
        run = (postgresql if postgres else sqlite)(database, timeout_s)
    except DatabaseError as fault:
        return say({"fault": str(fault)})
    limit("RLIMIT_AS", max_memory)
    encode = json.JSONEncoder(default=lambda value: {tag: plain(value)}).encode
    say({"ready": True})
    for line in sys.stdin:
        # Should the other process be gone, nobody else would stop this one.
        limit("RLIMIT_CPU", int(time.process_time() + 2 * timeout_s) + 1)
        try:
            rows = table(run(json.loads(line)), encode, max_rows, max_bytes)
            say(f'{{"rows":[{rows}]}}')
        except DatabaseError as fault:
            say({"fault": str(fault)})
        except (RefusedError, RecursionError) as refused:
            say({"refused": str(refused)})
        except MemoryError:
            return say({"refused": f"more than {max_memory >> 20} MiB of memory", "ended": True})


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    serve(settings.pop("database"), **settings)
