"""`PgVectorIndex`: the engine. Everything that talks to the database runs on the background loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from langchain_rcr.background import background
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.filters import Filter
from langchain_rcr.index.base import PoolVectors, Row

try:
    from langchain_rcr.index.pgvector.database import READING, WRITING, Database, Settings, Transaction
except ImportError as error:
    if error.name and error.name.startswith("langchain_rcr"):
        raise
    raise MissingExtraError("psycopg", "pgvector") from None

from langchain_rcr.index.pgvector.jsonb import shown, storable
from langchain_rcr.index.pgvector.reader import PgVectorReader
from langchain_rcr.index.pgvector.tables import (
    Packed,
    Pool,
    add_rows,
    check_pool,
    claim_pool,
    delete_rows,
    find_pool,
    has_hnsw,
    known_rows,
    make_hnsw,
    pack,
    prepare,
    scan_hnsw,
)

T = TypeVar("T")

_LONGEST_VECTOR = 16_000
_LONGEST_INDEXED = 2_000

_parents: list[Database] = []
"""After a fork: the connections of the process before, which are still its own."""


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
            raise InputError(f"pool must be a name of 1 to 200 characters that PostgreSQL can keep, not {shown(pool)}")
        if schema is not None and not (storable(schema) and 0 < len(schema.encode()) < 64 and "%" not in schema):
            raise InputError(f"schema must be a name of 1 to 63 bytes without %, not {shown(schema)}")
        if kind not in ("exact", "hnsw"):
            raise InputError(f"kind must be 'exact' or 'hnsw', not {kind!r}")
        for name, value, low, high in (
            ("m", m, 2, 100),
            ("ef_construction", ef_construction, max(4, 2 * m), 1000),
            ("ef_search", ef_search, 1, 1000),
        ):
            if not isinstance(value, int) or not low <= value <= high:
                raise InputError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
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
            raise InputError(
                f"kind='hnsw' takes vectors of up to {_LONGEST_INDEXED:,} numbers, which is as far as pgvector goes; "
                f"these have {dim:,}: use kind='exact'"
            )
        if not 0 < dim <= _LONGEST_VECTOR:
            raise InputError(f"pgvector holds vectors of 1 to {_LONGEST_VECTOR:,} numbers, these have {dim:,}")
        self.run(self._bind(fingerprint, dim))
        self._bound = (fingerprint, dim)

    def count(self) -> int:
        """How many examples there are."""
        return self.run(self._count())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop."""
        return background().run(work)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop, for a caller on another one."""
        return await background().arun(work)

    @asynccontextmanager
    async def read(self, where: Filter | None = None) -> AsyncIterator[PgVectorReader]:
        """The pool as it is now; see `CandidateIndex.read`. Takes a connection until it ends."""
        async with self._transaction(READING, self._settings.read_timeout_s) as transaction:
            if self._kind == "hnsw":
                await scan_hnsw(transaction, self._ef_search)
            pool = await find_pool(transaction, self.pool)
            if pool is not None and pool.examples and self._bound is not None:
                check_pool(pool, self.pool, *self._bound)
            reader = PgVectorReader(transaction, pool, approximate=self._kind == "hnsw")
            if where is not None:
                await reader.filter(where)
            yield reader

    def add(self, rows: Sequence[Row], vectors: PoolVectors, *, replace: bool = False) -> None:
        """Add examples, all or none; see `CandidateIndex.add`.

        Raises:
            PoolError: an id is taken and `replace` is off, comes twice, or a field can't be kept.
            InputError: vectors of another number or length, or with numbers that are not finite.
            CheckpointError: the pool holds vectors of other encoders by now.
        """
        packed = pack(rows, vectors, self._binding()[1])
        if packed:
            self.run(self._add(packed, vectors, replace))

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples, all at once; unknown ids are ignored. Returns how many there were."""
        return self.run(self._delete(list(ids)))

    def known(self, ids: Sequence[str]) -> set[str]:
        """Which of these ids are there."""
        return self.run(self._known(list(ids)))

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        _let_go(self._held, wait=True)

    # ------------------------------------------------------------------ on the background loop

    @asynccontextmanager
    async def _transaction(self, mode: str = WRITING, seconds: float | None = None) -> AsyncIterator[Transaction]:
        """A transaction on tables that are there; `seconds` as the write timeout if left out."""
        if self._held and self._held[0].pid != os.getpid():
            _parents.append(self._held.pop())
        if not self._held:
            self._held.append(Database(self._settings))
        database, limit = self._held[0], self._settings.write_timeout_s
        names = database.names
        if names is None:
            async with database.transaction(WRITING, limit, {}) as transaction:
                names = await prepare(transaction, self._settings.schema)
            database.names = names
        async with database.transaction(mode, seconds or limit, names) as transaction:
            yield transaction

    async def _bind(self, fingerprint: str, dim: int) -> None:
        async with self._transaction() as transaction:  # looks first: a role that only reads may bind, too
            pool = await find_pool(transaction, self.pool)
            if pool is not None and pool.examples:
                check_pool(pool, self.pool, fingerprint, dim)
            same = pool is not None and (pool.fingerprint, pool.dim) == (fingerprint, dim)
            if same and (self._kind == "exact" or await has_hnsw(transaction)):
                return
        async with self._transaction(seconds=self._settings.build_timeout_s) as transaction:
            await self._claim(transaction, fingerprint, dim)

    async def _claim(self, transaction: Transaction, fingerprint: str, dim: int) -> Pool:
        pool = await claim_pool(transaction, self.pool, fingerprint, dim)
        if self._kind == "hnsw" and not await has_hnsw(transaction):
            await make_hnsw(transaction, m=self._m, ef_construction=self._ef_construction)
        return pool

    async def _count(self) -> int:
        async with self._transaction(seconds=self._settings.read_timeout_s) as transaction:
            pool = await find_pool(transaction, self.pool)
        return 0 if pool is None else pool.examples

    async def _add(self, packed: list[Packed], vectors: PoolVectors, replace: bool) -> None:
        async with self._transaction() as transaction:
            pool = await self._claim(transaction, *self._binding())
            await add_rows(transaction, pool, packed, vectors, replace=replace)

    async def _delete(self, ids: list[str]) -> int:
        async with self._transaction() as transaction:
            pool = await find_pool(transaction, self.pool, lock=True)
            return 0 if pool is None else await delete_rows(transaction, pool, ids)

    async def _known(self, ids: list[str]) -> set[str]:
        async with self._transaction(seconds=self._settings.read_timeout_s) as transaction:
            pool = await find_pool(transaction, self.pool)
            return set() if pool is None else await known_rows(transaction, ids)

    def _binding(self) -> tuple[str, int]:
        if self._bound is None:
            raise RuntimeError("bind(fingerprint, dim) comes before add")
        return self._bound

    def _hold(self) -> None:
        self._held: list[Database] = []
        weakref.finalize(self, _let_go, self._held).atexit = False  # the loop's own end does it


def _let_go(held: list[Database], *, wait: bool = False) -> None:
    """Close what is open in this process; the garbage collector calls it too, from any thread."""
    for database in held:
        if database.pid == os.getpid() and wait:
            database.home.run(_close(held))
        elif database.pid == os.getpid():
            database.home.later(_close(held))


async def _close(held: list[Database]) -> None:
    while held:
        await held.pop().close()
