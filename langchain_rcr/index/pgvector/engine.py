"""`PgVectorIndex`: the engine. Everything that talks to the database runs on the background loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from langchain_rcr.background import BackgroundLoop, background
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.filters import Filter
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.ranking import longest

try:
    from psycopg import sql
except ImportError:
    raise MissingExtraError("psycopg", "pgvector") from None

from langchain_rcr.index.pgvector.database import READING, Connection, Database, Settings
from langchain_rcr.index.pgvector.reader import PgVectorReader
from langchain_rcr.index.pgvector.schema import (
    Names,
    Pool,
    check_pool,
    claim_pool,
    find_pool,
    has_hnsw,
    make_hnsw,
)
from langchain_rcr.index.pgvector.statements import shown, storable
from langchain_rcr.index.pgvector.writing import Packed, copy_rows, delete_rows, digest_of, pack, refuse_taken

T = TypeVar("T")

_LONGEST_VECTOR = 16_000
_LONGEST_INDEXED = 2_000

_parents: list[Database] = []
"""After a fork: the connections of the process before, which are still its own."""


class _Held:
    """What an index has open, and in which process."""

    def __init__(self) -> None:
        self.database: Database | None = None
        self.loop: BackgroundLoop | None = None
        self.pid = 0


class PgVectorIndex:
    """A pool in a PostgreSQL database with pgvector: a `CandidateIndex`.

    The first call makes the tables (`rcr_format`, `rcr_pools`, and `rcr_examples_…` for each pool) and, where the role
    may, the extension. A selection reads in one transaction, so it sees the pool as it was at its beginning. Writers
    of one pool take turns. Examples are kept as JSONB: equal dicts come back, but without the order of their fields,
    with lists for tuples, and with whole numbers for floats of 2⁵³ and above.

    Threads, event loops and forked processes may share one object; its connections live on a thread of their own.
    Pickles and copies hold the settings with the address as it was given, so a password in it too (leave it to
    PGPASSWORD, a password file or a service file to keep it out), and open connections of their own. After `close`
    the next call opens new ones.

    Args:
        url: the database, `postgresql://user@host:5432/name` or as libpq takes it (or SQLAlchemy, for psycopg).
        pool: the pool's name; up to 200 characters.
        schema: where the tables are; made if missing. None: the first schema of the role's search path.
        kind: `exact` looks at all vectors of the pool; `hnsw` searches by an index, which finds most but not all of the
            best (D up to 2,000). The index is built when a pool is first bound with `hnsw`; filling it first is faster.
        m: links of a vector in a new HNSW index.
        ef_construction: candidates looked at for the links of each vector in a new HNSW index.
        ef_search: candidates kept while searching the HNSW index: more find more of the best; up to 1,000.
        max_connections: how many there may be at once; further callers wait.
        connect_timeout_s: seconds that connecting may take, 2 at least.
        wait_timeout_s: seconds that a caller waits for a free connection.
        read_timeout_s: seconds that a search may take.
        write_timeout_s: seconds that adding or deleting may take, and waiting for other writers.
        build_timeout_s: seconds that building an HNSW index may take.
        max_idle_s: seconds after which an unused connection is closed.

    Raises:
        InputError: an argument is out of range.
        MissingExtraError: psycopg is not installed (when this module is imported).

    Every method raises EngineError where the database can't be reached, fails, or takes longer than these limits, and
    CheckpointError where its tables have a newer version's format.
    """

    def __init__(
        self,
        url: str,
        pool: str = "default",
        *,
        schema: str | None = None,
        kind: Literal["exact", "hnsw"] = "exact",
        m: int = 16,
        ef_construction: int = 64,
        ef_search: int = 100,
        max_connections: int = 10,
        connect_timeout_s: float = 10.0,
        wait_timeout_s: float = 30.0,
        read_timeout_s: float = 30.0,
        write_timeout_s: float = 300.0,
        build_timeout_s: float = 3600.0,
        max_idle_s: float = 300.0,
    ) -> None:
        if not isinstance(pool, str) or not 0 < len(pool) <= 200 or not storable(pool):
            msg = f"pool must be a name of 1 to 200 characters that PostgreSQL can keep, not {shown(pool)}"
            raise InputError(msg)
        if schema is not None and not (storable(schema) and 0 < len(schema.encode()) < 64 and "%" not in schema):
            msg = f"schema must be a name of 1 to 63 bytes without %, not {shown(schema)}"
            raise InputError(msg)
        if kind not in ("exact", "hnsw"):
            msg = f"kind must be 'exact' or 'hnsw', not {kind!r}"
            raise InputError(msg)
        for name, value, low, high in (
            ("m", m, 2, 100),
            ("ef_construction", ef_construction, max(4, 2 * m), 1000),
            ("ef_search", ef_search, 1, 1000),
        ):
            if not isinstance(value, int) or not low <= value <= high:
                msg = f"{name} must be a whole number from {low} to {high}, not {value!r}"
                raise InputError(msg)
        self.pool = pool
        self._kind, self._m, self._ef_construction, self._ef_search = kind, m, ef_construction, ef_search
        self._settings = Settings(
            url=url.replace("postgresql+psycopg://", "postgresql://", 1) if isinstance(url, str) else url,
            schema=schema,
            max_connections=max_connections,
            connect_timeout_s=connect_timeout_s,
            wait_timeout_s=wait_timeout_s,
            read_timeout_s=read_timeout_s,
            write_timeout_s=write_timeout_s,
            build_timeout_s=build_timeout_s,
            max_idle_s=max_idle_s,
        )
        self._bound: tuple[str, int] | None = None
        self._hold()

    def __repr__(self) -> str:
        return f"PgVectorIndex(pool {shown(self.pool)} at {self._settings.place}, {self._kind})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_held"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold()

    def bind(self, fingerprint: str, dim: int) -> None:
        """See `CandidateIndex.bind`. Makes the pool if there is none, and the HNSW index if it should have one.

        Raises:
            CheckpointError: the pool holds vectors of other encoders, or of another length.
            InputError: `dim` is more than pgvector can hold, or index.
        """
        if self._kind == "hnsw" and dim > _LONGEST_INDEXED:
            msg = (
                f"kind='hnsw' takes vectors of up to {_LONGEST_INDEXED:,} numbers, which is as far as pgvector goes; "
                f"these have {dim:,}: use kind='exact'"
            )
            raise InputError(msg)
        if not 0 < dim <= _LONGEST_VECTOR:
            msg = f"pgvector holds vectors of 1 to {_LONGEST_VECTOR:,} numbers, these have {dim:,}"
            raise InputError(msg)
        background().run(self._bind(fingerprint, dim))
        self._bound = (fingerprint, dim)

    def count(self) -> int:
        """How many examples there are."""
        return background().run(self._count())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop."""
        return background().run(work)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop, for a caller on another one."""
        return await background().arun(work)

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[PgVectorReader]:
        """The pool as it is now; see `CandidateIndex.read`. Takes a connection until it ends."""
        database = self._database()
        names = await database.names()
        seconds = self._settings.read_timeout_s
        connection = await database.begin(READING, seconds)
        try:
            async with database.answering(connection, seconds):
                if self._kind == "hnsw":
                    # Strict order, and goes on where a filter leaves too few.
                    await connection.execute(
                        f"SET LOCAL hnsw.ef_search = {self._ef_search}; SET LOCAL hnsw.iterative_scan = strict_order"
                    )
                pool = await find_pool(connection, names, self.pool)
            if pool is not None and pool.examples and self._bound is not None:
                check_pool(pool, self.pool, *self._bound)
            reader = PgVectorReader(database, names, connection, pool, approximate=self._kind == "hnsw")
            if where is not None:
                await reader.filter(where)
            yield reader
        finally:
            background().later(database.end(connection))  # the caller need not wait for it

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """Add examples, all or none; see `CandidateIndex.add`.

        Raises:
            PoolError: an id is taken and `replace` is off, comes twice, or a field can't be kept.
            InputError: vectors of another number or length, or with numbers that are not finite.
            CheckpointError: the pool holds vectors of other encoders by now.
        """
        packed = pack(rows, vectors, self._binding()[1])
        if packed:
            background().run(self._add(packed, vectors, replace))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        return background().run(self._delete(list(ids)))

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        return background().run(self._known(list(ids)))

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        _let_go(self._held, wait=True)

    # ------------------------------------------------------------------ on the background loop

    def _database(self) -> Database:
        held = self._held
        if held.database is not None and held.pid != os.getpid():
            _parents.append(held.database)
            held.database = None
        if held.database is None:
            held.database, held.loop, held.pid = Database(self._settings), background(), os.getpid()
            held.loop.at_end.add(held.database.abort)
        return held.database

    async def _bind(self, fingerprint: str, dim: int) -> None:
        database = self._database()
        names = await database.names()
        async with database.transaction() as connection:  # looks first: a role that only reads may bind, too
            pool = await find_pool(connection, names, self.pool)
            if pool is not None and pool.examples:
                check_pool(pool, self.pool, fingerprint, dim)
            same = pool is not None and (pool.fingerprint, pool.dim) == (fingerprint, dim)
            if pool is not None and same and (self._kind == "exact" or await has_hnsw(connection, names, pool)):
                return
        async with database.transaction(self._settings.build_timeout_s) as connection:
            await self._claim(connection, names, fingerprint, dim)

    async def _claim(self, connection: Connection, names: Names, fingerprint: str, dim: int) -> Pool:
        pool = await claim_pool(connection, names, self.pool, fingerprint, dim)
        if self._kind == "hnsw" and not await has_hnsw(connection, names, pool):
            await make_hnsw(connection, names, pool, m=self._m, ef_construction=self._ef_construction)
        return pool

    async def _count(self) -> int:
        database = self._database()
        names = await database.names()
        async with database.transaction(self._settings.read_timeout_s) as connection:
            pool = await find_pool(connection, names, self.pool)
        return 0 if pool is None else pool.examples

    async def _add(self, packed: list[Packed], vectors: PoolVectors, replace: bool) -> None:
        fingerprint, dim = self._binding()
        database = self._database()
        names = await database.names()
        digests = [row.digest for row in packed]
        async with database.transaction() as connection:
            pool = await self._claim(connection, names, fingerprint, dim)
            table, gone = names.table(pool.id), 0
            if replace:
                gone = await delete_rows(connection, table, digests)
            else:
                await refuse_taken(connection, table, digests)
            await copy_rows(connection, table, packed, vectors)
            change = "UPDATE {} SET examples = examples + %s, longest = greatest(longest, %s) WHERE id = %s"
            parameters = [len(packed) - gone, longest(vectors.candidate), pool.id]
            await connection.execute(sql.SQL(change).format(names.pools), parameters)

    async def _delete(self, ids: list[str]) -> int:
        database = self._database()
        names = await database.names()
        async with database.transaction() as connection:
            pool = await find_pool(connection, names, self.pool, lock=True)
            if pool is None:
                return 0
            digests = [digest_of(one) for one in ids if storable(one)]
            gone = await delete_rows(connection, names.table(pool.id), digests)
            change = sql.SQL("UPDATE {} SET examples = examples - %s WHERE id = %s").format(names.pools)
            await connection.execute(change, [gone, pool.id])
        return gone

    async def _known(self, ids: list[str]) -> set[str]:
        digests = {digest_of(one): one for one in ids if storable(one)}
        database = self._database()
        names = await database.names()
        async with database.transaction(self._settings.read_timeout_s) as connection:
            pool = await find_pool(connection, names, self.pool)
            if pool is None:
                return set()
            query = sql.SQL("SELECT digest FROM {} WHERE digest = ANY (%s)").format(names.table(pool.id))
            cursor = await connection.execute(query, [list(digests)])
            return {digests[bytes(digest)] for (digest,) in await cursor.fetchall()}

    def _binding(self) -> tuple[str, int]:
        if self._bound is None:
            msg = "bind(fingerprint, dim) comes before add"
            raise RuntimeError(msg)
        return self._bound

    def _hold(self) -> None:
        self._held = _Held()
        weakref.finalize(self, _let_go, self._held).atexit = False  # the loop's own end does it


def _let_go(held: _Held, *, wait: bool = False) -> None:
    """Close what is open in this process; the garbage collector calls it too, from any thread."""
    if held.database is None or held.loop is None or held.pid != os.getpid():
        return
    if wait:
        held.loop.run(_close(held))
    else:
        held.loop.later(_close(held))


async def _close(held: _Held) -> None:
    database, held.database = held.database, None
    if database is not None and held.loop is not None:
        held.loop.at_end.discard(database.abort)
        await database.close()
