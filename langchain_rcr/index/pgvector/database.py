"""Connections to PostgreSQL for any number of callers, all on one event loop; outages become one clear error.

`psycopg_pool` is not used: it connects in its own tasks. So while a server is down, every caller waits for the whole
time limit without learning why, and each connection broken by a failover costs the next caller a growing pause.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from pgvector.psycopg.vector import VectorBinaryDumper
from psycopg import AsyncConnection
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus

from langchain_rcr.basics.background import background
from langchain_rcr.errors import EngineError

Connection = AsyncConnection[tuple[Any, ...]]

_GRACE_S = 5.0
"""Grace beyond the server's own time limit before the connection is given up."""

_FULL = re.compile("too many (clients|connections)|connection slots are reserved|no more connections|max clients")
"""How PostgreSQL, PgBouncer and Supavisor say that all their connections are in use; libpq passes on no code."""
_PAUSE_S = 0.1
"""The time until a full server is asked again."""

_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 10,
    "fallback_application_name": "langchain-rcr",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""For libpq, unless the address says otherwise: a peer that vanishes silently is noticed within a minute."""

_ADAPTERS = AdaptersMap(psycopg.adapters)
"""Sends arrays in pgvector's binary format as parameters of unknown type, so statements cast them.

A registered type would have a number that changes when the extension is dropped and created again.
"""
_ADAPTERS.register_dumper("numpy.ndarray", VectorBinaryDumper)

READING = "REPEATABLE READ READ ONLY"
"""A consistent view of the database for as long as the transaction lasts."""

WRITING = "READ COMMITTED"
"""Each statement sees the changes of the transactions that it waited for."""

_BEGIN = """
BEGIN ISOLATION LEVEL {mode};
SET LOCAL statement_timeout = {limit};
SET LOCAL idle_in_transaction_session_timeout = {idle};
SET LOCAL jit = off;
"""
# JIT compilation takes longer than these statements.


class Transaction:
    """Runs statements on a connection with an open transaction, each within a limit of seconds."""

    def __init__(self, database: Database, connection: Connection, seconds: float) -> None:
        self.database, self._connection, self._seconds = database, connection, seconds
        self.names: dict[str, str] = {}  # what names in braces in statements stand for

    async def fetch(self, text: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement returns; none for one that returns nothing."""
        async with self.database.answering(self._connection, self._seconds):
            text = text.format_map(self.names)
            cursor = await self._connection.execute(text, parameters or None, binary=bool(parameters))
            return await cursor.fetchall() if cursor.description else []

    async def copy(self, text: str, rows: Iterable[Sequence[Any]]) -> None:
        """Send rows to a COPY statement."""
        copying = self._connection.cursor().copy(text.format_map(self.names))
        async with self.database.answering(self._connection, self._seconds), copying as copy:
            for row in rows:
                await copy.write_row(row)


class Database:
    """The connections of one index in one process: at most `most`, for a free one of which a caller waits `wait_s`.

    The address is libpq's parameters by name. Everything here runs on the background loop, so needs no locks.
    """

    def __init__(self, address: dict[str, Any], most: int, wait_s: float) -> None:
        self._address, self._most, self._wait_s = _DEFAULTS | address, most, wait_s
        self.ready = False  # whether the tables are known to exist; reset when a call fails
        self.home = background()
        self.home.at_end.add(self._abort)
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(most)
        self._closed = False

    @asynccontextmanager
    async def transaction(self, mode: str, seconds: float) -> AsyncIterator[Transaction]:
        """A transaction: committed at the end when `WRITING`, rolled back when `READING` or on an exception."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise self._error(f"all {self._most} connections (max_connections) are in use") from None
        try:
            connection = await self._begun(mode, seconds)
            transaction = Transaction(self, connection, seconds)
            try:
                yield transaction
                if mode == WRITING:
                    await transaction.fetch("COMMIT")
            except BaseException:
                self.ready = False  # another database may have replaced it, so the next call looks again
                raise
            finally:
                await self._end(connection)
        finally:
            self._slots.release()

    @asynccontextmanager
    async def answering(self, connection: Connection | None, seconds: float) -> AsyncIterator[None]:
        """Turns the driver's errors into a one-line `EngineError`.

        The connection is closed when there is no answer at all, not even the server's own timeout message.
        """
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                yield
        except TimeoutError:
            if connection is not None:
                connection.pgconn.finish()
            raise self._error(f"no answer within {seconds + _GRACE_S:g} seconds") from None
        except psycopg.Error as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, psycopg.errors.QueryCanceled):
                text += " (set by read_timeout_s and write_timeout_s)"
            raise self._error(text) from None

    async def close(self) -> None:
        """Close what is idle now, and the rest as it is returned."""
        self._closed = True
        self.home.at_end.discard(self._abort)
        while self._idle:
            self._drop(self._idle.pop())

    async def _abort(self) -> None:
        """Close everything: the process ends."""
        while self._open:
            self._drop(next(iter(self._open)))

    async def _begun(self, mode: str, seconds: float) -> Connection:
        """A connection with an open transaction; waits for one while the server is full."""
        limit, until = max(1, round(1000 * seconds)), time.monotonic() + self._wait_s
        begin = _BEGIN.format(mode=mode, limit=limit, idle=max(60_000, limit))
        while True:
            used = bool(self._idle)
            try:
                connection = self._idle.pop() if used else await self._connected(seconds)
            except EngineError as error:
                if not _FULL.search(str(error)):
                    raise
                if time.monotonic() > until:
                    raise EngineError(f"{error}; waited {self._wait_s:g} seconds (wait_timeout_s)") from None
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                async with self.answering(connection, seconds):
                    await connection.execute(begin)
                return connection
            except BaseException as error:
                self._drop(connection)
                if not used or not isinstance(error, EngineError):
                    raise  # otherwise it died while idle, and nothing has been sent yet

    async def _connected(self, seconds: float) -> Connection:
        async with self.answering(None, seconds):
            # Without prepared statements it works behind PgBouncer, and each plan knows its values.
            fixed: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "context": _ADAPTERS}
            connection = await AsyncConnection.connect(client_encoding="utf8", **fixed, **self._address)
        self._open.add(connection)
        return connection

    async def _end(self, connection: Connection) -> None:
        """Roll back what isn't committed, and keep the connection for the next caller if it still works."""
        try:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                async with self.answering(connection, 0):
                    await connection.execute("ROLLBACK")
        except EngineError:
            connection.pgconn.finish()
        finally:
            if connection.closed or self._closed or connection.info.transaction_status != TransactionStatus.IDLE:
                self._drop(connection)
            else:
                self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.pgconn.finish()  # `close` does no more, but must be awaited

    def _error(self, text: str) -> EngineError:
        password = str(self._address.get("password") or "")
        text = text.replace(password, "***") if password else text
        return EngineError(f"pgvector ({place(self._address)}): {text}")


def place(address: dict[str, Any]) -> str:
    """Host and database of an address, for messages."""
    return f"{address.get('host') or 'localhost'}/{address.get('dbname') or address.get('user') or ''}"
