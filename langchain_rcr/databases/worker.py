"""The process in which `Database` runs queries, with limits on its memory and CPU time.

It reads a line of JSON that says what to open, then one per program, and answers each with a line of JSON. It imports
only the standard library and psycopg, so it starts in about 50 ms and leaves its memory to the query.
"""

from __future__ import annotations

import json
import os
import re
import select
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any
from urllib.parse import quote

_LONGEST = {sqlite3.SQLITE_LIMIT_LENGTH: 1 << 26, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 20}
"""The most bytes in a value and in a statement in SQLite; one larger value fails a query that only counts it."""
_MAY = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_INNOCUOUS, _DIRECTONLY = 0x200000, 0x80000
"""SQLite's flags for harmless functions, and for those that it refuses outside top-level SQL."""
_SEARCH = frozenset("match snippet highlight bm25 offsets matchinfo".split())  # noqa: SIM905 — one of them is a baseline
"""Read-only functions of full-text search: SQLite flags neither these nor those that write or take pointers."""
_NEVER = {"load_extension", "fts3_tokenizer", "sqlite_log"}
_OWN_FAULT = (
    *("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY", "SQLITE_PROTOCOL"),
    *("SQLITE_PERM", "SQLITE_READONLY_"),  # plain SQLITE_READONLY is a program that writes
)
"""Prefixes of errors that are the database's fault, not the program's."""
_SERVERS_FAULT = ("55P03", "58030", "XX001", "XX002")
"""PostgreSQL's errors of that kind: a table is locked, the disk fails, data or an index are damaged."""
_ENDED_BY_OTHERS = ("57P01", "57P02", "40001")
"""Those of a query ended by an administrator, by a crash of another one, and on a replica by what the server writes."""
_REST_S = 0.1
"""Seconds without a query after which a connection is closed if others are writing."""
_UTF_8 = ("utf-8", "surrogatepass")
_AT_ONCE = 100
"""Rows that are read at a time."""
_LARGE = 1 << 12
"""Texts above this many characters follow the JSON rather than being in it, which takes ten times as long."""
_TOGETHER = 20_000
"""How many small values are encoded at a time, which is faster; too many rows are refused before all are."""


class DatabaseError(Exception):
    """The database can't be used."""


class RefusedError(Exception):
    """The program can't be run."""


class AgainError(Exception):
    """Something changed meanwhile: run the program again. The argument is what to raise if that fails too."""


class SQLite:
    """Yields a program's rows in batches, from a SQLite file opened read-only.

    A file in WAL mode without a write-ahead log is complete and is opened as immutable, since SQLite would otherwise
    leave -wal and -shm files beside it. It is reopened after a change, and a result is discarded if the file changed
    meanwhile. While others write, an idle connection is closed, so that the last writer can remove the log.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._given, self._timeout, self._deadline = path, timeout, 0.0
        self._connection: sqlite3.Connection | None = None
        self._functions: frozenset[str] = frozenset()
        self._seen, self._immutable = (False, 0, 0, 0), False
        self._has_other_text = False
        self._connected()

    def __call__(self, program: str) -> Iterator[list[Any]]:
        """The rows of a program."""
        connection = self._connected()
        self._deadline = time.monotonic() + self._timeout
        try:
            cursor = connection.execute(program)
            while rows := cursor.fetchmany(_AT_ONCE):
                yield rows
            if cursor.description is None:
                raise RefusedError("not a query")
            if self._immutable and self._changed():
                raise AgainError(DatabaseError("it is being written to"))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            name, message = getattr(error, "sqlite_errorname", ""), str(error)
            if name == "SQLITE_INTERRUPT":
                raise RefusedError(f"longer than {self._timeout:g} s") from None
            if name == "SQLITE_AUTH" and message == "not authorized":
                message = "not authorized: a program may only read tables"
            fault = DatabaseError(message) if name.startswith(_OWN_FAULT) else RefusedError(message)
            is_other_text = message.startswith("Could not decode to UTF-8") and not self._has_other_text
            self._has_other_text |= is_other_text  # only then, as sqlite3 itself decodes faster
            is_new_table = message.startswith("vtable constructor failed")  # perhaps
            if is_other_text or is_new_table or self._changed():
                self._close()
                raise AgainError(fault) from None
            raise fault from None

    def rest(self) -> None:
        """Close the connection if others write and no query comes for a moment."""
        if self._connection is None or not self._seen[0]:
            return
        # Windows can't wait for pipes.
        if sys.platform == "win32" or not select.select([sys.stdin], [], [], _REST_S)[0]:
            self._close()

    def _state(self) -> tuple[bool, int, int, int]:
        """Whether there is a write-ahead log; the file's inode, size and time."""
        self._path = os.path.realpath(self._given)  # a link may lead elsewhere by now, and the log is beside the file
        try:
            found = os.stat(self._path)  # noqa: PTH116 — pathlib takes longer, and long to import
        except OSError as error:
            raise DatabaseError(str(error.strerror)) from None
        log = False
        with suppress(OSError):
            log = os.stat(f"{self._path}-wal").st_size > 0  # noqa: PTH116
        return log, found.st_ino, found.st_size, found.st_mtime_ns

    def _changed(self) -> bool:
        """Whether to reopen the file: SQLite itself notices what is written, unless it is immutable."""
        state = self._state()
        return state != self._seen if self._immutable else state[:2] != self._seen[:2]

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connected(self) -> sqlite3.Connection:
        """A connection to the file as it is now."""
        if self._connection is not None and not self._changed():
            return self._connection
        self._close()
        self._seen = self._state()
        try:
            # Closing the file drops SQLite's locks on it, which is harmless without a connection.
            with open(self._path, "rb") as file:  # noqa: PTH123
                self._immutable = file.read(20)[18:] == b"\2\2" and not self._seen[0]
            place = f"file:{quote(os.fsencode(self._path))}?mode=ro{'&immutable=1' if self._immutable else ''}"
            # Half the limit is for waiting until others have written, half for the query.
            connection = sqlite3.connect(place, uri=True, timeout=self._timeout / 2)
            connection.execute("PRAGMA temp_store = MEMORY")  # so that sorts count as memory and don't fill the disk
            connection.execute("PRAGMA query_only = ON")
            open_virtual_tables(connection)
            functions = self._functions = self._functions or harmless_functions(connection)
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(str(error)) from None
        if self._has_other_text:
            connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        for limit in _LONGEST.items():
            connection.setlimit(*limit)

        def allowed(action: int, first: str | None, second: str | None, *_: Any) -> int:
            if action == sqlite3.SQLITE_FUNCTION:
                fine = str(second).lower() in functions
            else:  # full-text search checks for changes
                fine = action in _MAY or (action, first, second) == (sqlite3.SQLITE_PRAGMA, "data_version", None)
            return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY

        connection.set_authorizer(allowed)
        # Not called while a function computes a single value; then the other process ends this one.
        connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 1000)
        self._connection = connection
        return connection


def harmless_functions(connection: sqlite3.Connection) -> frozenset[str]:
    """The functions that a program may call, according to SQLite's own flags."""
    listed = [(row[0].lower(), row[1], row[-1]) for row in connection.execute("PRAGMA function_list")]
    never = _NEVER.union(name for name, _, flags in listed if flags & _DIRECTONLY)
    fine = (name for name, builtin, flags in listed if builtin or flags & _INNOCUOUS or name in _SEARCH)
    return frozenset(fine) - never


def open_virtual_tables(connection: sqlite3.Connection) -> None:
    """Open the database's virtual tables, json_each and json_tree: their first use does more than a query may."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'create virtual table%'").fetchall()
    for name in ("json_each", "json_tree", *(name.replace('"', '""') for (name,) in found)):
        with suppress(sqlite3.Error):  # such as a missing module
            connection.execute(f'SELECT 1 FROM "{name}" LIMIT 0')  # noqa: S608 — quoted


class PostgreSQL:
    """Yields a program's rows in batches, from a PostgreSQL database.

    Each program gets a read-only transaction on its own connection, so no setting or advisory lock outlives it.
    """

    def __init__(self, url: str, timeout: float) -> None:
        import psycopg
        from psycopg.types import datetime as times

        self._psycopg: Any = psycopg
        for name in ("Date", "Time", "Timetz", "Timestamp", "Timestamptz", "Interval"):
            psycopg.adapters.register_loader(name.lower(), or_text(getattr(times, f"{name}Loader")))
        self._url, self._timeout, self._overrun = url, timeout, f"longer than {timeout:g} s"
        try:
            self._given: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:  # it quotes the address, with its password
            like = "postgresql://user@host:5432/database"
            raise DatabaseError(f"the database's address isn't one that PostgreSQL takes: {like}") from None
        with self._connected():
            pass

    def __call__(self, program: str) -> Iterator[list[Any]]:
        """The rows of a program."""
        if "\0" in program:  # the client library would cut it off there
            raise RefusedError("a null character")
        with self._connected() as connection:
            say({"started": connection.info.backend_pid})
            deadline = time.monotonic() + self._timeout
            # The server's own limit is for each statement: planning and each FETCH.
            cancel = threading.Timer(1.1 * self._timeout, connection.cancel)
            cancel.daemon = True
            cancel.start()
            try:
                # Not as options of the connection, which a pooler on the way may refuse or lose. Half the limit is for
                # waiting until others have written, as in SQLite.
                most, wait = max(1, round(1000 * self._timeout)), max(1, round(500 * self._timeout))
                connection.execute(f"SET LOCAL statement_timeout = {most}; SET LOCAL lock_timeout = {wait}")
                # The server only accepts a single query for a cursor, and sends only some rows at a time.
                with connection.cursor(name="rcr") as cursor:
                    # On a line of its own, so that no message quotes DECLARE … CURSOR.
                    cursor.execute(f"\n{program.strip().rstrip(';')}")
                    while rows := cursor.fetchmany(_AT_ONCE):
                        yield rows
                        # Each FETCH has its own time limit, which the program may have lifted.
                        left = round(1000 * (deadline - time.monotonic()))
                        if left <= 0:
                            raise RefusedError(self._overrun)
                        connection.execute(f"SET LOCAL statement_timeout = {left}")
            except self._psycopg.Error as error:
                raise self._diagnosed(error, program, connection) from None
            finally:
                cancel.cancel()

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A connection; waits for its end at the server, which counts it towards the role's limit until then."""
        import socket  # slow, and SQLite doesn't need it

        try:
            patience = self._given.get("connect_timeout", 10)
            connection = self._psycopg.connect(self._url, connect_timeout=patience)
        except self._psycopg.Error as error:
            message = str(error)
            for secret in filter(None, (self._given.get("password"), self._given.get("sslpassword"))):
                message = message.replace(str(secret), "***")
            raise DatabaseError(f"no connection to the PostgreSQL database: {message}") from None
        connection.read_only = True
        try:
            yield connection
        finally:
            if not connection.closed:
                with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same, suppress(OSError):
                    connection.close()
                    same.shutdown(socket.SHUT_WR)  # as closing does where there is no other handle
                    same.settimeout(0.1 * self._timeout)
                    while same.recv(1 << 12):
                        pass

    def _diagnosed(self, error: Any, program: str, connection: Any) -> Exception:
        """What to raise for an error of the driver, depending on whose fault it is."""
        if error.sqlstate in _ENDED_BY_OTHERS:
            return AgainError(RefusedError(str(error)))
        message = re.sub(r"(?m)^LINE (\d+)", lambda line: f"LINE {int(line[1]) - 1}", str(error))
        if error.sqlstate in _SERVERS_FAULT and "advisory" not in program.lower():
            return DatabaseError(f"the PostgreSQL database can't be read: {message}")
        if error.sqlstate is None and connection.broken:
            with self._connected():  # the database's fault if this fails, else the program's
                pass
        return RefusedError(self._overrun if error.sqlstate == "57014" else message)


def or_text(loader: Any) -> Any:
    """A loader of psycopg's that gives values that Python can't hold, such as the date "infinity", as text."""

    class OrText(loader):  # type: ignore[misc]
        def load(self, data: Any) -> Any:
            try:
                return super().load(data)
            except Exception:
                return str(bytes(data), "utf-8")

    return OrText


class Text(bytes):
    """A long text, encoded."""


def table(rows: Iterable[list[Any]], tag: str, max_rows: int, max_bytes: int) -> tuple[str, list[bytes]]:
    """Rows as JSON, and their blobs and long texts, to which the JSON refers by length; too many rows are refused.

    The JSON has lists of columns, each for some of the rows: reading and writing take a third less than row by row.
    """
    written: list[str] = []
    attached: list[bytes] = []
    columns: list[list[Any]] = []
    # Values that JSON lacks become objects whose only key is the tag.
    encode = json.JSONEncoder(default=lambda value: {tag: plain(value, attached)}).encode
    count = size = seen = 0
    for some in chain(rows, [None]):
        has_large = False
        if some is not None:
            count += len(some)
            if count > max_rows:
                raise RefusedError(f"more than {max_rows} rows")
            columns = columns or [[] for _ in some[0]]
            for column, values in zip(columns, zip(*some, strict=True), strict=True):
                large = str in {*map(type, values)} and max(map(_length, values)) > _LARGE
                column.extend([Text(v, *_UTF_8) if _length(v) > _LARGE else v for v in values] if large else values)
                has_large |= large
        if columns and columns[0] and (some is None or has_large or len(columns) * len(columns[0]) > _TOGETHER):
            written.append(encode(columns))
            size += len(written[-1]) + sum(map(len, attached[seen:]))
            columns, seen = [], len(attached)
            if size > max_bytes:
                raise RefusedError(f"rows of more than {max_bytes} bytes")
    return ",".join(written), attached


def _length(value: Any) -> int:
    return len(value) if type(value) is str else 0


def again(rows: Callable[[], Any]) -> Any:
    """The result of a call; repeats it once if something changed meanwhile."""
    try:
        return rows()
    except AgainError:
        try:
            return rows()
        except AgainError as error:
            raise error.args[0] from None


def plain(value: Any, attached: list[bytes]) -> list[Any]:
    """A value that JSON lacks, as its type and what to make it from, or its length if it is attached."""
    if isinstance(value, bytes | bytearray | memoryview):
        attached.append(bytes(value))
        return ["text" if isinstance(value, Text) else "blob", len(attached[-1])]
    kind = type(value).__name__
    if kind in ("date", "datetime", "time"):
        return [kind, value.isoformat()]
    if kind == "timedelta":
        return [kind, [value.days, value.seconds, value.microseconds]]
    return [kind if kind == "Decimal" else "str", str(value)]


def say(message: dict[str, Any] | str, attached: Iterable[bytes] = ()) -> None:
    """Write to the other process: the lengths of a message and its attachments, then these themselves."""
    body, behind = (message if isinstance(message, str) else json.dumps(message)).encode(), [*attached]
    sizes = (len(body), sum(map(len, behind)))
    sys.stdout.buffer.writelines([*(size.to_bytes(8, "little") for size in sizes), body, *behind])
    sys.stdout.buffer.flush()


def limit(name: str, value: int) -> None:
    """Limit a resource of this process, if the system can."""
    with suppress(ImportError, OSError, ValueError):  # Windows lacks the module
        import resource

        _, hard = resource.getrlimit(getattr(resource, name))
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (bounded, hard))


def serve(
    database: str,
    *,
    postgres: bool,
    packages: list[str],
    tag: str,
    timeout_s: float,
    max_rows: int,
    max_bytes: int,
    max_memory: int,
) -> None:
    """Answer until there is no more input, or memory runs out."""
    sys.path.extend(packages)
    limit("RLIMIT_CORE", 0)
    try:
        run = (PostgreSQL if postgres else SQLite)(database, timeout_s)
    except DatabaseError as fault:
        return say({"fault": str(fault)})
    limit("RLIMIT_AS", max_memory)
    say({"ready": True})
    while True:
        if isinstance(run, SQLite):
            run.rest()
        line = sys.stdin.readline()
        if not line:
            return None
        # Nothing else stops this process if the other one is gone.
        limit("RLIMIT_CPU", int(time.process_time() + 2 * timeout_s) + 1)
        program = json.loads(line)

        def rows(program: str = program) -> tuple[str, list[bytes]]:
            return table(run(program), tag, max_rows, max_bytes)

        try:
            written, attached = again(rows)
            say(f'{{"rows":[{written}]}}', attached)
        except DatabaseError as fault:
            say({"fault": str(fault)})
        except MemoryError:
            return say({"refused": f"more than {max_memory >> 20} MiB of memory", "ended": True})
        except Exception as refused:  # including whatever psycopg's conversions raise for odd values
            say({"refused": str(refused)})


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())
    serve(settings.pop("database"), **settings)
