"""Connections to PostgreSQL for any number of callers, all on one event loop; outages become one clear error.

`psycopg_pool` is not used: while a server is away it lets every caller wait for the whole time limit, hides the reason,
and after a long outage comes back only when its own growing pauses between attempts allow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from pgvector.psycopg.vector import register_vector_info
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.types import TypeInfo

from langchain_rcr.errors import EngineError, InputError
from langchain_rcr.index.pgvector.schema import Names, prepare

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


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the database; the arguments of `PgVectorIndex`."""

    url: str
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
                msg = f"{name}_timeout_s must be a positive number of seconds, not {seconds!r}"
                raise InputError(msg)
        if self.max_connections < 1:
            msg = f"max_connections must be at least 1, not {self.max_connections}"
            raise InputError(msg)
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


READING = "REPEATABLE READ READ ONLY"
"""A consistent view of the database for as long as the transaction lasts."""

WRITING = "READ COMMITTED"
"""Each statement sees what the transactions did that it had to wait for."""


def _begin(mode: str, seconds: float) -> str:
    limit = max(1, round(1000 * seconds))
    idle = max(60_000, limit)
    return (
        f"BEGIN ISOLATION LEVEL {mode}; SET LOCAL statement_timeout = {limit}; "
        f"SET LOCAL idle_in_transaction_session_timeout = {idle}; SET LOCAL jit = off"  # compiling takes longer
    )


async def _adapt(connection: Connection, names: Names) -> None:
    """Teach a connection to send and receive NumPy vectors, wherever the extension is."""
    register_vector_info(connection, await TypeInfo.fetch(connection, names.type))


class Database:
    """The connections of one index in one process. Everything here runs on the background loop, so needs no locks.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self._names: Names | None = None
        self._idle: list[tuple[float, Connection]] = []
        self._busy: set[Connection] = set()
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def names(self) -> Names:
        """Where the tables are; they are made, or brought to this version's format, at the first call.

        Raises:
            CheckpointError: they have a newer version's format.
        """
        if self._names is None:
            async with self.transaction() as connection:
                self._names = await prepare(connection, self.settings.schema)
                await _adapt(connection, self._names)
        return self._names

    @asynccontextmanager
    async def transaction(self, seconds: float | None = None) -> AsyncIterator[Connection]:
        """A transaction that is committed at the end, or rolled back by an exception.

        Args:
            seconds: how long a statement may take; the write timeout if left out.
        """
        seconds = seconds or self.settings.write_timeout_s
        connection = await self.begin(WRITING, seconds)
        try:
            async with self.answering(connection, 2 * seconds):  # one of them waiting for another writer
                yield connection
                await connection.execute("COMMIT")
        finally:
            await self.end(connection)

    async def begin(self, mode: str, seconds: float) -> Connection:
        """A connection with a transaction begun, `READING` or `WRITING`; `end` gives it back.

        One that died while it was idle is noticed here, where nothing has been asked yet, and another one takes its
        place.
        """
        try:
            async with asyncio.timeout(self.settings.wait_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise self._error(f"all {self.settings.max_connections} connections (max_connections) are in use") from None
        try:
            while True:
                fresh = not self._idle
                connection = await self._connect() if fresh else self._idle.pop()[1]
                self._busy.add(connection)
                try:
                    async with self.answering(connection, self.settings.connect_timeout_s):
                        if fresh and self._names is not None:
                            await _adapt(connection, self._names)
                        await connection.execute(_begin(mode, seconds))
                except BaseException as error:
                    lost = isinstance(error, EngineError) and connection.closed
                    self._drop(connection)
                    if fresh or not lost:
                        raise
                else:
                    return connection
        except BaseException:
            self._slots.release()
            raise

    async def end(self, connection: Connection) -> None:
        """Roll back what is not committed, and keep the connection for the next caller if it is still good."""
        good = False
        try:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                async with asyncio.timeout(_GRACE_S):
                    await connection.execute("ROLLBACK")
            good = not (connection.closed or self._closed)
        except (psycopg.Error, TimeoutError):
            pass  # it is closed below; nothing was promised
        finally:
            self._slots.release()
            if good:
                self._busy.discard(connection)
                self._idle.append((time.monotonic(), connection))
                self._watch()
            else:
                self._drop(connection)

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
            if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
                self._names = None  # another database has taken its place: it is made ready at the next call
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, psycopg.errors.QueryCanceled):
                text += " (set by read_timeout_s, write_timeout_s and build_timeout_s)"
            raise self._error(text) from None

    async def close(self) -> None:
        """Close what is idle now and the rest as it is given back."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, connection in self._idle:
            connection.pgconn.finish()
        self._idle.clear()

    async def abort(self) -> None:
        """Close everything: the process ends."""
        await self.close()
        for connection in tuple(self._busy):
            self._drop(connection)

    async def _connect(self) -> Connection:
        settings = self.settings
        given = conninfo_to_dict(settings.url)
        options: dict[str, Any] = {key: value for key, value in _DEFAULTS.items() if key not in given}
        async with self.answering(None, settings.connect_timeout_s):
            connection = await AsyncConnection.connect(
                settings.url,
                autocommit=True,
                prepare_threshold=None,  # works behind PgBouncer, and each plan knows its values
                connect_timeout=max(2, round(settings.connect_timeout_s)),
                client_encoding="utf8",
                **options,
            )
        return connection

    def _error(self, text: str) -> EngineError:
        password = str(conninfo_to_dict(self.settings.url).get("password") or "")
        text = text.replace(password, "***") if password else text
        return EngineError(f"pgvector ({self.settings.place}): {text}")

    def _drop(self, connection: Connection) -> None:
        self._busy.discard(connection)
        connection.pgconn.finish()  # `close` does no more, but has to be awaited

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.settings.max_idle_s, self._trim)

    def _trim(self) -> None:
        """Give back to the server the connections that nobody wanted for a while."""
        self._timer = None
        oldest = time.monotonic() - self.settings.max_idle_s
        stale = [connection for since, connection in self._idle if since <= oldest]
        self._idle = [(since, connection) for since, connection in self._idle if since > oldest]
        for connection in stale:
            connection.pgconn.finish()
        if self._idle:
            self._watch()
