"""One pool of a PostgreSQL database at one moment: a transaction that searches it, and what came back so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import sql

from langchain_rcr.errors import InputError
from langchain_rcr.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.base import BEST, FloatArray, Hits, IntArray, Row, Search
from langchain_rcr.index.pgvector.database import Connection, Database
from langchain_rcr.index.pgvector.schema import Names, Pool
from langchain_rcr.index.pgvector.statements import compile_filter
from langchain_rcr.index.ranking import in_order, log_sums, slack

_STATES, _LOGITS = 64, 8_000_000
"""At most so many states are searched by one statement, and with so many logits: it has a time limit."""

_MORE = 8
"""Candidates fetched beyond those that are needed: equal ones, and what the next step will want."""

_MOST = 1024
"""Candidates fetched to settle which of many equal ones comes first; further ones are not looked at."""

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
SELECT NULL, e.key, NULL, e.context, e.id, e.example::text, e.program
FROM {table} e WHERE e.key IN (SELECT key FROM hit) AND e.key <> ALL (%s::bigint[])
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


class PgVectorReader:
    """A `Reader` of a pool, or of the part that a filter lets through, as one transaction sees it.

    Args:
        database: the connections.
        names: where the tables are.
        connection: one with a `READING` transaction.
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
        self._texts: dict[int, tuple[str, str, int]] = {}
        self._rows: dict[int, Row] = {}
        self.size = 0 if pool is None else pool.examples

    async def search(self, search: Search) -> Hits:
        """See `Reader.search`; the log partition is exact without an index, with HNSW over the best candidates."""
        states, exclude = search.states, search.exclude
        keys, logits = await self._search(states, search.t, exclude, ship=True)
        contexts = np.zeros((*keys.shape, states.shape[1]), dtype=np.float32)
        for place, key in np.ndenumerate(keys):
            if key >= 0:
                contexts[place] = self._contexts[int(key)]
        rows = [[self._row(key) for key in line if key >= 0] for line in keys.tolist()]
        totals = None if search.tau is None else await self._log_partition(states, search.tau, exclude)
        return Hits(keys, logits, contexts, rows, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        if not len(keys):
            return np.empty((0, 0 if self._pool is None else self._pool.dim), dtype=np.float32)
        query = self._format("SELECT key, candidate FROM {table} WHERE key = ANY (%s::bigint[])")
        found = dict(await self._fetch(query, [keys.tolist()]))
        return np.stack([found[key] for key in keys.tolist()])

    async def filter(self, where: Filter) -> None:
        """Let `where` decide what can be found, and count it.

        Raises:
            InputError: the filter asks about a field that no example has.
        """
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
            exact = not self._approximate
            while open_:
                width = min(width, self.size)
                still = []
                near = await self._nearest(states[open_], width, exact=exact, ship=ship)
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
                open_, exact = still, True
        return keys, logits

    async def _log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        totals = np.full(len(states), -np.inf)
        if not self.size or not len(states):
            return totals
        if self._approximate:
            _, logits = await self._search(states, min(BEST, self.size), exclude, ship=False)
            return log_sums(logits, tau, [np.empty(0, dtype=np.int64)] * len(states))
        for part in self._parts(len(states)):
            block = states[part]
            allowed, condition, before, after = self._conditions(len(block))
            text = _LOG_PARTITION.replace("<states>", _values(len(block), "%s, %s::bigint[]"))
            query = self._format(text, allowed=allowed, condition=condition)
            pairs = zip(block, exclude[part], strict=True)
            parameters = [value for state, barred in pairs for value in (state, barred.tolist())]
            for n, value in await self._fetch(query, [*before, *parameters, tau, *after]):
                totals[part.start + n] = value
        return totals

    async def _nearest(
        self, states: FloatArray, width: int, *, exact: bool, ship: bool
    ) -> list[tuple[IntArray, FloatArray]]:
        """For each state `width` of the nearest candidates: keys (W,) and logits (W,), in no order.

        Args:
            states: (B, D).
            width: how many.
            exact: look at all.
            ship: keep the candidates' vectors and rows for later.
        """
        allowed, condition, before, after = self._conditions(len(states))
        # No index is made for this sum, so it keeps PostgreSQL from using one.
        distance = "(e.candidate {product} state.v)" + (" + 0" if exact else "")
        text = _SEARCH + (_WITH_ROWS if ship else "")
        text = text.replace("<states>", _values(len(states), "%s")).replace("<distance>", distance)
        text = text.replace("<order>", "distance, e.key" if exact else distance)
        query = self._format(text, allowed=allowed, condition=condition)
        parameters = [*before, *states, *after, width, *([list(self._contexts)] if ship else [])]
        near: list[list[tuple[int, float]]] = [[] for _ in states]
        for n, key, distance_, context, example_id, text, program in await self._fetch(query, parameters):
            if n is None:
                self._contexts[key], self._texts[key] = context, (example_id, text, program)
            else:
                near[n].append((key, -distance_))
        return [
            (np.array([key for key, _ in row], dtype=np.int64), np.array([value for _, value in row], dtype=np.float32))
            for row in near
        ]

    def _row(self, key: int) -> Row:
        if key not in self._rows:
            example_id, text, program = self._texts[key]
            self._rows[key] = Row(example_id, json.loads(text), program)
        return self._rows[key]

    def _parts(self, states: int) -> list[slice]:
        """The states of each statement."""
        examples = 0 if self._pool is None else self._pool.examples
        step = _STATES if self._approximate else max(1, min(_STATES, _LOGITS // max(1, examples)))
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


def _values(count: int, columns: str) -> str:
    """The rows of a VALUES list: number of the state, and its columns."""
    return ", ".join(f"({n}, {columns})" for n in range(count))
