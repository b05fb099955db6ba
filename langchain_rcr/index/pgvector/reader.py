"""One pool of a PostgreSQL database at one moment: a transaction that searches it, and what came back so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import sql

from langchain_rcr.background import BackgroundLoop
from langchain_rcr.errors import InputError
from langchain_rcr.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.base import FloatArray, IntArray, Row
from langchain_rcr.index.memory import in_order, slack
from langchain_rcr.index.pgvector.database import READING, Connection, Database
from langchain_rcr.index.pgvector.schema import Names, Pool, check_pool, find_pool
from langchain_rcr.index.pgvector.statements import compile_filter, from_vector, to_vectors

_STATES, _LOGITS = 64, 8_000_000
"""At most so many states are searched by one statement, and with so many logits: it has a time limit."""

_MORE = 8
"""Candidates fetched beyond those that are needed: equal ones, and what the next step will want."""

_MOST = 1024
"""Candidates fetched to settle which of many equal ones comes first; further ones are not looked at."""

_BEST = 1024
"""Candidates whose logits a log partition is made of with an HNSW index."""

_SMALL = 2048
"""Bytes of an example, as stored, up to which it comes along with the search that finds it."""

# Texts in <> are filled in by plain pieces of SQL, those in {} by names and parts with parameters.
_SEARCH = """
WITH {allowed} state (n, v) AS (VALUES <states>), hit AS MATERIALIZED (
    SELECT state.n, near.key, near.distance FROM state CROSS JOIN LATERAL (
        SELECT e.key, <distance> AS distance FROM {table} e WHERE {condition} ORDER BY <order> LIMIT %s
    ) near
)
SELECT n, key, distance, NULL::{vector}, NULL::text, NULL::text, NULL::bigint FROM hit
"""
_WITH_ROWS = """
UNION ALL
SELECT NULL, e.key, NULL, e.context, CASE WHEN small THEN e.id END, CASE WHEN small THEN e.example::text END, e.program
FROM {table} e CROSS JOIN LATERAL (SELECT pg_column_size(e.example) + pg_column_size(e.id) <= %s) size (small)
WHERE e.key IN (SELECT key FROM hit) AND e.key <> ALL (%s::bigint[])
"""
# exp() of PostgreSQL raises an error where the result is too small for a number, below -708.
_LOG_PARTITION = """
WITH {allowed} state (n, v, barred) AS (VALUES <states>)
SELECT state.n, total.value FROM state CROSS JOIN LATERAL (
    WITH logit AS MATERIALIZED (
        SELECT -(e.candidate {product} state.v) / %s::float8 AS x FROM {table} e
        WHERE e.key <> ALL (state.barred) AND {condition}
    )
    SELECT top.x + ln(sum(exp(greatest(logit.x - top.x, -700)))) AS value
    FROM logit, (SELECT max(x) AS x FROM logit) top GROUP BY top.x
) total
"""
_ALLOWED = "allowed AS MATERIALIZED (SELECT key FROM {table} WHERE {condition}),"


class Snapshot:
    """A pool, or the part that a filter lets through, as one transaction sees it. Runs on the background loop.

    Args:
        database: the connections.
        names: where the tables are.
        connection: one with a `READING` transaction; given back by `close`.
        pool: the pool; None: there is none, so it is empty.
        approximate: whether to search by the HNSW index.
    """

    def __init__(
        self, database: Database, names: Names, connection: Connection, pool: Pool | None, *, approximate: bool
    ) -> None:
        self._database, self._names, self._connection = database, names, connection
        self._pool, self._approximate = pool, approximate
        self._where: tuple[sql.Composable, list[Any]] = (sql.SQL("true"), [])
        self._filtered = False
        self._contexts: dict[int, FloatArray] = {}
        self._rows: dict[int, tuple[str, str, int]] = {}
        self.size = 0 if pool is None else pool.examples

    @classmethod
    async def open(
        cls, database: Database, name: str, where: Filter | None, bound: tuple[str, int] | None, ef_search: int | None
    ) -> Snapshot:
        """The pool as it is now.

        Args:
            database: the connections.
            name: the pool's.
            where: which examples can be found.
            bound: fingerprint and D of the encoders in use, if known.
            ef_search: how far to look in the HNSW index; None: exact.

        Raises:
            CheckpointError: the pool holds vectors of other encoders.
            InputError: the filter asks about a field that no example has.
        """
        names = await database.names()
        seconds = database.settings.read_timeout_s
        connection = await database.begin(READING, seconds)
        try:
            async with database.answering(connection, seconds):
                if ef_search is not None:
                    # Strict order, and goes on where a filter leaves too few.
                    await connection.execute(
                        f"SET LOCAL hnsw.ef_search = {ef_search}; SET LOCAL hnsw.iterative_scan = strict_order"
                    )
                pool = await find_pool(connection, names, name)
                if pool is not None and pool.examples and bound is not None:
                    check_pool(pool, name, *bound)
                snapshot = cls(database, names, connection, pool, approximate=ef_search is not None)
                if where is not None:
                    await snapshot._filter(where)
        except BaseException:
            await database.end(connection)
            raise
        return snapshot

    async def close(self) -> None:
        """End the transaction."""
        await self._database.end(self._connection)

    async def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`."""
        return await self._search(states, t, exclude, ship=True)

    async def _search(
        self, states: FloatArray, t: int, exclude: Sequence[IntArray], *, ship: bool
    ) -> tuple[IntArray, FloatArray]:
        keys = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        margins = self._margins(states)
        if not self.size:
            return keys, logits
        barred = [np.unique(row) for row in exclude]
        for part in self._parts(len(states)):
            open_ = list(range(len(states)))[part]
            width = t + max(len(barred[at]) for at in open_) + _MORE
            exact, first = not self._approximate, True
            while open_:
                width = min(width, self.size)
                still = []
                near = await self._nearest(states[open_], width, exact=exact, ship=ship and first)
                for at, (found, values) in zip(open_, near, strict=True):
                    left = ~np.isin(found, barred[at])
                    chosen, best = in_order(found[left], values[left], float(margins[at]), t)
                    keys[at, : len(chosen)], logits[at, : len(chosen)] = chosen, best
                    if not exact and len(found) < width:
                        still.append(at)  # the index gave up before it had found enough
                    elif exact and len(found) == width < self.size and values.min() >= best[-1] - margins[at]:
                        still.append(at)  # what wasn't fetched may be equal to the last one, and older
                if exact and width >= _MOST:
                    break
                width = min(8 * width, max(width, _MOST)) if exact else width
                open_, exact, first = still, True, False
        return keys, logits

    async def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of `keys` (B,)."""
        lacking = sorted(set(keys.tolist()) - self._contexts.keys())
        for key, raw in await self._by_key("key, context", lacking):
            self._contexts[key] = from_vector(raw)
        return self._stacked([self._contexts[key] for key in keys.tolist()])

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of `keys` (B,)."""
        found = await self._by_key("key, candidate", sorted(set(keys.tolist())))
        by_key = {key: from_vector(raw) for key, raw in found}
        return self._stacked([by_key[key] for key in keys.tolist()])

    async def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,), copies."""
        lacking = sorted(set(keys.tolist()) - self._rows.keys())
        found = await self._by_key("key, id, example::text, program", lacking)
        rows = self._rows | {key: (example_id, text, program) for key, example_id, text, program in found}
        ordered = (rows[key] for key in keys.tolist())
        return [Row(example_id, json.loads(text), program) for example_id, text, program in ordered]

    async def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Searcher.log_partition`: exact without an index; with HNSW over the best 1,024 candidates."""
        totals = np.full(len(states), -np.inf)
        if not self.size or not len(states):
            return totals
        if self._approximate:
            _, logits = await self._search(states, min(_BEST, self.size), exclude, ship=False)
            scaled = logits.astype(np.float64) / tau
            top = scaled.max(axis=1)
            some = np.isfinite(top)
            totals[some] = top[some] + np.log(np.exp(scaled[some] - top[some, None]).sum(axis=1))
            return totals
        self._margins(states)
        for part in self._parts(len(states)):
            block = states[part]
            allowed, condition, before, after = self._conditions(len(block))
            text = _LOG_PARTITION.replace("<states>", _values(len(block), "%s::{vector}, %s::bigint[]"))
            query = self._format(text, allowed=allowed, condition=condition)
            pairs = zip(to_vectors(block), exclude[part], strict=True)
            parameters = [value for vector, barred in pairs for value in (vector, barred.tolist())]
            for n, value in await self._fetch(query, [*before, *parameters, tau, *after]):
                totals[part.start + n] = value
        return totals

    async def _filter(self, where: Filter) -> None:
        """Let `where` decide what can be found, and count it."""
        asked = sorted(fields_of(where))
        if self._pool is None:
            if asked:
                raise unknown_field(where, [])
            return
        self._where, self._filtered = compile_filter(where), True
        known = []
        if asked:
            # One by one: each ends at the first example that has the field.
            some = self._format("SELECT k, EXISTS (SELECT FROM {table} WHERE example ? k) FROM unnest(%s::text[]) k")
            known = [key for key, there in await self._fetch(some, [asked]) if there]
        if len(known) < len(asked):
            every = self._format("SELECT DISTINCT jsonb_object_keys(example) FROM {table}")
            raise unknown_field(where, [key for (key,) in await self._fetch(every, [])])
        count = self._format("SELECT count(*) FROM {table} WHERE {condition}", condition=self._where[0])
        ((self.size,),) = await self._fetch(count, self._where[1])

    async def _nearest(
        self, states: FloatArray, width: int, *, exact: bool, ship: bool
    ) -> list[tuple[IntArray, FloatArray]]:
        """For each state `width` of the nearest candidates: keys (W,) and logits (W,), in no order.

        Args:
            states: (B, D).
            width: how many.
            exact: look at all.
            ship: keep the candidates' vectors and small rows for later.
        """
        allowed, condition, before, after = self._conditions(len(states))
        # No index is made for this sum, so it keeps PostgreSQL from using one.
        distance = "(e.candidate {product} state.v)" + (" + 0" if exact else "")
        text = _SEARCH + (_WITH_ROWS if ship else "")
        text = text.replace("<states>", _values(len(states), "%s::{vector}")).replace("<distance>", distance)
        text = text.replace("<order>", "distance, e.key" if exact else distance)
        query = self._format(text, allowed=allowed, condition=condition)
        parameters = [*before, *to_vectors(states), *after, width]
        if ship:
            parameters += [_SMALL, f"{{{','.join(map(str, self._contexts))}}}"]
        near: list[list[tuple[int, float]]] = [[] for _ in states]
        for n, key, distance_, context, example_id, text, program in await self._fetch(query, parameters):
            if n is not None:
                near[n].append((key, -distance_))
                continue
            self._contexts[key] = from_vector(context)
            if text is not None:
                self._rows[key] = (example_id, text, program)
        return [
            (np.array([key for key, _ in row], dtype=np.int64), np.array([value for _, value in row], dtype=np.float32))
            for row in near
        ]

    def _parts(self, states: int) -> list[slice]:
        """The states of each statement."""
        step = (
            _STATES
            if self._approximate
            else max(1, min(_STATES, _LOGITS // max(1, 0 if self._pool is None else self._pool.examples)))
        )
        return [slice(start, start + step) for start in range(0, states, step)]

    def _conditions(self, states: int) -> tuple[sql.Composable, sql.Composable, list[Any], list[Any]]:
        """The filter for several states: looked at once for all, in a table in front, if there are any others.

        Returns:
            The table in front, the condition, and the parameters of each.
        """
        condition, parameters = self._where
        if not self._filtered or states == 1:
            return sql.SQL(""), condition, [], parameters
        table = self._format(
            "allowed AS MATERIALIZED (SELECT key FROM {table} WHERE {condition}),", condition=condition
        )
        # As a value and not as a plain condition, which might become a join and lose the order of an index.
        return table, sql.SQL("(e.key IN (SELECT key FROM allowed)) IS TRUE"), parameters, []

    async def _by_key(self, columns: str, keys: list[int]) -> list[tuple[Any, ...]]:
        if not keys or self._pool is None:
            return []
        query = self._format(f"SELECT {columns} FROM {{table}} WHERE key = ANY (%s::bigint[])")  # noqa: S608
        return await self._fetch(query, [keys])

    async def _fetch(self, query: sql.Composed, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        async with (
            self._database.answering(self._connection, self._database.settings.read_timeout_s),
            self._connection.cursor(binary=True) as cursor,
        ):
            await cursor.execute(query, parameters)
            return await cursor.fetchall()

    def _format(self, text: str, **parts: sql.Composable) -> sql.Composed:
        table = sql.SQL("") if self._pool is None else self._names.table(self._pool.id)
        return sql.SQL(text).format(table=table, vector=self._names.type, product=self._names.product, **parts)

    def _margins(self, states: FloatArray) -> FloatArray:
        if self._pool is not None and self._pool.examples and states.shape[1] != self._pool.dim:
            msg = f"states have {states.shape[1]} numbers each, the vectors in the pool {self._pool.dim}"
            raise InputError(msg)
        return slack(states, 0.0 if self._pool is None else self._pool.longest)

    def _stacked(self, vectors: list[FloatArray]) -> FloatArray:
        return np.stack(vectors) if vectors else np.empty((0, 0 if self._pool is None else self._pool.dim), np.float32)


class PgVectorReader:
    """A `Snapshot` for callers on threads of their own: a `Reader`."""

    def __init__(self, loop: BackgroundLoop, snapshot: Snapshot) -> None:
        self._loop, self._snapshot = loop, snapshot

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return self._snapshot.size

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`."""
        return self._loop.run(self._snapshot.search(states, t, exclude))

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of `keys` (B,)."""
        return self._loop.run(self._snapshot.vectors(keys))

    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of `keys` (B,)."""
        return self._loop.run(self._snapshot.candidates(keys))

    def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Snapshot.log_partition`."""
        return self._loop.run(self._snapshot.log_partition(states, tau, exclude))

    def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,)."""
        return self._loop.run(self._snapshot.rows(keys))


class AsyncPgVectorReader:
    """A `Snapshot` for callers on any event loop: an `AsyncReader`."""

    def __init__(self, loop: BackgroundLoop, snapshot: Snapshot) -> None:
        self._loop, self._snapshot = loop, snapshot

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return self._snapshot.size

    async def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """See `Searcher.search`."""
        return await self._loop.arun(self._snapshot.search(states, t, exclude))

    async def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of `keys` (B,)."""
        return await self._loop.arun(self._snapshot.vectors(keys))

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of `keys` (B,)."""
        return await self._loop.arun(self._snapshot.candidates(keys))

    async def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """See `Snapshot.log_partition`."""
        return await self._loop.arun(self._snapshot.log_partition(states, tau, exclude))

    async def rows(self, keys: IntArray) -> list[Row]:
        """The examples of `keys` (n,)."""
        return await self._loop.arun(self._snapshot.rows(keys))


def _values(count: int, columns: str) -> str:
    """The rows of a VALUES list: number of the state, and its columns."""
    return ", ".join(f"({n}, {columns})" for n in range(count))
