"""Connections to PostgreSQL for any number of callers, all on one event loop; outages become one clear error.

`psycopg_pool` is not used: it connects in tasks of its own, so while a server is away every caller waits for the whole
time limit and learns no reason, and each connection that a failover broke costs the next caller a growing pause.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from pgvector.psycopg.vector import VectorBinaryDumper
from psycopg import AsyncConnection, sql
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from langchain_rcr.background import background
from langchain_rcr.errors import EngineError, InputError

Connection = AsyncConnection[tuple[Any, ...]]

_GRACE_S = 5.0
"""How much longer than the server's own time limit an answer may take before the connection is given up."""

_DEFAULTS = {
    "fallback_application_name": "langchain-rcr",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""For libpq, where the address doesn't say otherwise: a peer that is gone without a word is noticed in a minute."""

_ADAPTERS = AdaptersMap(psycopg.adapters)
"""Sends arrays in pgvector's binary format as parameters of unknown type, so statements cast them.

A registered type would have a number, which changes when the extension is dropped and made again.
"""
_ADAPTERS.register_dumper("numpy.ndarray", VectorBinaryDumper)

READING = "REPEATABLE READ READ ONLY"
"""A consistent view of the database for as long as the transaction lasts."""

WRITING = "READ COMMITTED"
"""Each statement sees what the transactions did that it had to wait for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the database; the arguments of `PgVectorIndex`."""

    url: str = field(repr=False)  # with its password
    schema: str | None
    max_connections: int
    connect_timeout_s: float
    wait_timeout_s: float
    read_timeout_s: float
    write_timeout_s: float
    build_timeout_s: float
    max_idle_s: float

    def __post_init__(self) -> None:
        for name in ("connect", "wait", "read", "write", "build"):
            seconds = getattr(self, f"{name}_timeout_s")
            if not 0 < seconds <= 1_000_000:
                raise InputError(f"{name}_timeout_s must be a positive number of seconds, not {seconds!r}")
        if self.max_connections < 1:
            raise InputError(f"max_connections must be at least 1, not {self.max_connections}")
        try:
            conninfo_to_dict(self.url)
        except (psycopg.Error, AttributeError, ValueError):  # whose text may quote the password
            msg = "url is not an address as PostgreSQL takes it: postgresql://user@host:5432/database"
            raise InputError(msg) from None

    @property
    def place(self) -> str:
        """Host and database, for messages; never the password."""
        parts = conninfo_to_dict(self.url)
        return f"{parts.get('host') or 'localhost'}/{parts.get('dbname') or parts.get('user') or ''}"


Names = dict[str, sql.Composable]
"""What the names in braces of statements stand for."""


def names_in(schema: str, extension: str) -> Names:
    """Where the tables and what pgvector brings are, whatever the search path.

    Args:
        schema: the schema of the tables.
        extension: the schema of the extension.
    """
    of_extension = sql.Identifier(extension)
    return {
        "schema": sql.Identifier(schema),
        "pools": sql.Identifier(schema, "rcr_pools"),
        "vector": sql.SQL("{}.vector").format(of_extension),
        "product": sql.SQL("OPERATOR({}.<#>)").format(of_extension),  # the negative inner product
        "products": sql.SQL("{}.vector_ip_ops").format(of_extension),
        "send": sql.SQL("{}.vector_send").format(of_extension),
    }


class Transaction:
    """Runs statements on a connection, each within a time limit.

    Args:
        database: whose connection it is.
        connection: one with a transaction begun.
        seconds: how long a statement may take.
        names: what is filled in for the names in braces of statements; more may be added.
    """

    def __init__(self, database: Database, connection: Connection, seconds: float, names: Names) -> None:
        self.database, self.connection, self.seconds, self.names = database, connection, seconds, dict(names)

    async def fetch(self, text: str, parameters: Sequence[Any] = (), **parts: sql.Composable) -> list[tuple[Any, ...]]:
        """The rows that a statement returns; none for one that returns nothing."""
        async with self.answering(), self.connection.cursor(binary=True) as cursor:
            await cursor.execute(self.statement(text, **parts), parameters or None)
            return await cursor.fetchall() if cursor.description else []

    def statement(self, text: str, **parts: sql.Composable) -> sql.Composed:
        """A statement with its names filled in."""
        return sql.SQL(text).format(**self.names | parts)

    def answering(self) -> AbstractAsyncContextManager[None]:
        """See `Database.answering`."""
        return self.database.answering(self.connection, self.seconds)


class Database:
    """The connections of one index in one process. Everything here runs on the background loop, so needs no locks.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.names: Names | None = None
        """Where the tables are, once that is known; forgotten when a statement says that something isn't there."""
        self.pid, self.home = os.getpid(), background()
        self.home.at_end.add(self._abort)
        self._open: set[Connection] = set()
        self._idle: dict[Connection, asyncio.TimerHandle] = {}
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._closed = False

    @asynccontextmanager
    async def transaction(self, mode: str, seconds: float, names: Names) -> AsyncIterator[Transaction]:
        """A transaction: committed at the end when `WRITING`, rolled back when `READING` or by an exception.

        Args:
            mode: `READING` or `WRITING`.
            seconds: how long a statement may take.
            names: see `Transaction`.
        """
        connection = await self._begin(mode, seconds)
        transaction = Transaction(self, connection, seconds, names)
        try:
            yield transaction
            if mode == WRITING:
                await transaction.fetch("COMMIT")
        finally:
            await self._end(connection)

    @asynccontextmanager
    async def answering(self, connection: Connection | None, seconds: float) -> AsyncIterator[None]:
        """Turns the driver's errors into an `EngineError` of one line.

        Args:
            connection: it is closed when no answer comes at all, not even the server's own message that time is up.
            seconds: how long the server may take.
        """
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                yield
        except TimeoutError:
            if connection is not None:
                connection.pgconn.finish()
            raise self._error(f"no answer within {seconds + _GRACE_S:g} seconds") from None
        except psycopg.Error as error:
            if isinstance(error, psycopg.ProgrammingError):
                self.names = None  # another database or extension has taken its place: the next call looks again
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, psycopg.errors.QueryCanceled):
                text += " (set by read_timeout_s, write_timeout_s and build_timeout_s)"
            raise self._error(text) from None

    async def close(self) -> None:
        """Close what is idle now and the rest as it is given back."""
        self._closed = True
        self.home.at_end.discard(self._abort)
        for connection in tuple(self._idle):
            self._drop(connection)

    async def _abort(self) -> None:
        """Close everything: the process ends."""
        for connection in tuple(self._open):
            self._drop(connection)

    async def _begin(self, mode: str, seconds: float) -> Connection:
        """A connection with a transaction begun; `_end` gives it back."""
        try:
            async with asyncio.timeout(self.settings.wait_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise self._error(f"all {self.settings.max_connections} connections (max_connections) are in use") from None
        try:
            while self._idle:
                connection, timer = self._idle.popitem()
                timer.cancel()
                with suppress(EngineError):  # it died while it was idle, and nothing has been asked yet
                    return await self._started(connection, mode, seconds)
            return await self._started(await self._connect(), mode, seconds)
        except BaseException:
            self._slots.release()
            raise

    async def _started(self, connection: Connection, mode: str, seconds: float) -> Connection:
        self._open.add(connection)
        limit = max(1, round(1000 * seconds))
        try:
            async with self.answering(connection, self.settings.connect_timeout_s):
                await connection.execute(
                    f"BEGIN ISOLATION LEVEL {mode}; SET LOCAL statement_timeout = {limit}; "
                    f"SET LOCAL idle_in_transaction_session_timeout = {max(60_000, limit)}; "
                    "SET LOCAL jit = off"  # compiling takes longer than these statements
                )
        except BaseException:
            self._drop(connection)
            raise
        return connection

    async def _connect(self) -> Connection:
        settings = self.settings
        given = conninfo_to_dict(settings.url)
        options: dict[str, Any] = {key: value for key, value in _DEFAULTS.items() if key not in given}
        async with self.answering(None, settings.connect_timeout_s):
            return await AsyncConnection.connect(
                settings.url,
                autocommit=True,
                prepare_threshold=None,  # works behind PgBouncer, and each plan knows its values
                connect_timeout=max(2, round(settings.connect_timeout_s)),
                client_encoding="utf8",
                context=_ADAPTERS,
                **options,
            )

    async def _end(self, connection: Connection) -> None:
        """Roll back what is not committed, and keep the connection for the next caller if it is still good."""
        try:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                async with self.answering(connection, 0):
                    await connection.execute("ROLLBACK")
        except EngineError:
            connection.pgconn.finish()
        finally:
            self._slots.release()
            if connection.closed or self._closed or connection.info.transaction_status != TransactionStatus.IDLE:
                self._drop(connection)
            else:
                self._idle[connection] = self.home.loop.call_later(self.settings.max_idle_s, self._drop, connection)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        if timer := self._idle.pop(connection, None):
            timer.cancel()
        connection.pgconn.finish()  # `close` does no more, but has to be awaited

    def _error(self, text: str) -> EngineError:
        password = str(conninfo_to_dict(self.settings.url).get("password") or "")
        text = text.replace(password, "***") if password else text
        return EngineError(f"pgvector ({self.settings.place}): {text}")
