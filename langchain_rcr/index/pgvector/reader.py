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
from langchain_rcr.index.base import BEST, Hits, Row, Search
from langchain_rcr.index.pgvector.database import Transaction
from langchain_rcr.index.pgvector.jsonb import compile_filter
from langchain_rcr.index.pgvector.tables import Pool
from langchain_rcr.index.ranking import in_order, log_sums, nothing, slack
from langchain_rcr.rows import FloatArray, IntArray

_STATES, _LOGITS = 64, 8_000_000
"""At most so many states are searched by one statement, and with so many logits: it has a time limit."""

_MORE = 8
"""Candidates fetched beyond those that are needed: equal ones, and what the next step will want."""

_MOST = 1024
"""Candidates fetched to settle which of many equal ones comes first; further ones are not looked at."""

_SEARCH = """
WITH {allowed} state (n, v) AS (VALUES {states}), hit AS MATERIALIZED (
    SELECT state.n, near.key, near.distance FROM state CROSS JOIN LATERAL (
        SELECT e.key, {distance} AS distance FROM {table} e WHERE {condition} ORDER BY {order} LIMIT %s
    ) near
)
SELECT n, key, distance, NULL::bytea, NULL::text, NULL::text, NULL::bigint FROM hit
"""
_WITH_ROWS = """
UNION ALL
SELECT NULL, e.key, NULL, {send}(e.context), e.id, e.example::text, e.program
FROM {table} e WHERE e.key IN (SELECT key FROM hit) AND e.key <> ALL (%s::bigint[])
"""
# exp() of PostgreSQL raises an error where the result is too small for a number, below -708.
_LOG_PARTITION = """
WITH {allowed} state (n, v, barred) AS (VALUES {states})
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
        transaction: one that is `READING`.
        pool: the pool; None: there is none, so it is empty.
        approximate: whether to search by the HNSW index.
    """

    def __init__(self, transaction: Transaction, pool: Pool | None, *, approximate: bool) -> None:
        self._transaction, self._approximate = transaction, approximate
        self._pool = pool or Pool(0, "", 0, 0, 0.0)
        self._where: tuple[sql.Composable, list[Any]] | None = None
        self._seen: dict[int, tuple[FloatArray, Row]] = {}
        self.size = self._pool.examples

    async def search(self, search: Search) -> Hits:
        """See `Reader.search`; the log partition is exact without an index, with HNSW over the best candidates."""
        states, exclude = search.states, search.exclude
        keys, logits = await self._best(states, search.t, exclude, ship=True)
        contexts = np.zeros((*keys.shape, states.shape[1]), dtype=np.float32)
        for place, key in np.ndenumerate(keys):
            if key >= 0:
                contexts[place] = self._seen[int(key)][0]
        rows = [[self._seen[key][1] for key in line if key >= 0] for line in keys.tolist()]
        totals = None if search.tau is None else await self._log_partition(states, search.tau, exclude)
        return Hits(keys, logits, contexts, rows, totals)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        if not len(keys):
            return np.empty((0, self._pool.dim), dtype=np.float32)
        query = "SELECT key, {send}(candidate) FROM {table} WHERE key = ANY (%s::bigint[])"
        found = dict(await self._transaction.fetch(query, [keys.tolist()]))
        return np.stack([_vector(found[key]) for key in keys.tolist()])

    async def filter(self, where: Filter) -> None:
        """Let `where` decide what can be found, and count it.

        Raises:
            InputError: the filter asks about a field that no example has.
        """
        asked, known = sorted(fields_of(where)), []
        if self._pool.id and asked:
            # One by one: each ends at the first example that has the field.
            some = "SELECT k, EXISTS (SELECT FROM {table} WHERE example ? k) FROM unnest(%s::text[]) k"
            known = [key for key, there in await self._transaction.fetch(some, [asked]) if there]
            if len(known) < len(asked):
                every = await self._transaction.fetch("SELECT DISTINCT jsonb_object_keys(example) FROM {table}")
                known = [key for (key,) in every]
        if {*asked} - {*known}:
            raise unknown_field(where, known)
        if self._pool.id:
            self._where = condition, parameters = compile_filter(where)
            count = "SELECT count(*) FROM {table} WHERE {condition}"
            ((self.size,),) = await self._transaction.fetch(count, parameters, condition=condition)

    async def _best(
        self, states: FloatArray, t: int, exclude: Sequence[IntArray], *, ship: bool
    ) -> tuple[IntArray, FloatArray]:
        """Keys and logits (B, t) of the best; `ship`: and see to it that their vectors and rows are in `_seen`."""
        keys, logits = nothing(len(states), t)
        if not self.size:
            return keys, logits
        if states.shape[1] != self._pool.dim:
            raise InputError(f"states have {states.shape[1]} numbers each, the vectors in the pool {self._pool.dim}")
        margins, barred = slack(states, self._pool.longest), [np.unique(row) for row in exclude]
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
            _, logits = await self._best(states, min(BEST, self.size), exclude, ship=False)
            return log_sums(logits, tau, [np.empty(0, dtype=np.int64)] * len(states))
        for part in self._parts(len(states)):
            block = states[part]
            pairs = zip(block, exclude[part], strict=True)
            parameters = [value for state, barred in pairs for value in (state, barred.tolist())]
            rows = await self._ask(_LOG_PARTITION, "%s::{vector}, %s::bigint[]", len(block), [*parameters, tau])
            for n, value in rows:
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
        # No index is made for this sum, so it keeps PostgreSQL from using one.
        distance = "(e.candidate {product} state.v)" + (" + 0" if exact else "")
        text = (_SEARCH + (_WITH_ROWS if ship else "")).replace("{distance}", distance)
        text = text.replace("{order}", "distance, e.key" if exact else distance)
        last = [width, [*self._seen]] if ship else [width]
        near: list[list[tuple[int, float]]] = [[] for _ in states]
        rows = await self._ask(text, "%s::{vector}", len(states), [*states], last)
        for n, key, distance_, context, example_id, example, program in rows:
            if n is None:
                self._seen[key] = _vector(context), Row(example_id, json.loads(example), program)
            else:
                near[n].append((key, -distance_))
        return [
            (np.array([key for key, _ in row], dtype=np.int64), np.array([value for _, value in row], dtype=np.float32))
            for row in near
        ]

    def _parts(self, states: int) -> list[slice]:
        """The states of each statement."""
        step = _STATES if self._approximate else max(1, min(_STATES, _LOGITS // self._pool.examples))
        return [slice(start, start + step) for start in range(0, states, step)]

    async def _ask(
        self, text: str, columns: str, states: int, parameters: list[Any], last: Sequence[Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Run a statement over states.

        Args:
            text: with `{allowed}` for a table in front, `{states}` for rows of VALUES, `{condition}` for the filter.
            columns: of the VALUES, behind the number of the state.
            states: how many.
            parameters: what comes before the condition.
            last: what comes behind it.
        """
        text = text.replace("{states}", ", ".join(f"({n}, {columns})" for n in range(states)))
        allowed: sql.Composable = sql.SQL("")
        condition: sql.Composable = sql.SQL("true")
        if self._where is not None and states == 1:
            condition, values = self._where
            parameters = [*parameters, *values]
        elif self._where is not None:
            # Looked at once for all states. As a value and not as a plain condition, which might become a join and lose
            # the order of an index.
            front = "allowed AS MATERIALIZED (SELECT key FROM {table} WHERE {condition}),"
            allowed = self._transaction.statement(front, condition=self._where[0])
            condition = sql.SQL("(e.key IN (SELECT key FROM allowed)) IS TRUE")
            parameters = [*self._where[1], *parameters]
        return await self._transaction.fetch(text, [*parameters, *last], allowed=allowed, condition=condition)


def _vector(sent: bytes) -> FloatArray:
    """A vector (D,) in pgvector's binary format: two numbers of 16 bits, then float32 in network order."""
    return np.frombuffer(sent, dtype=">f4", offset=4).astype(np.float32)
