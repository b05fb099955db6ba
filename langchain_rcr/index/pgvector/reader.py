"""One pool of a PostgreSQL database at one moment: a transaction that searches it, and what came back so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.families.state import State
from langchain_rcr.index.base import BEST, TIE, Hits, Row, Seen
from langchain_rcr.index.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.pgvector.database import Transaction
from langchain_rcr.index.pgvector.jsonb import to_path
from langchain_rcr.index.ranking import MORE, best_fetched, blocks, log_sums, nothing, slack

_STATES, _LOGITS = 64, 8_000_000
"""At most so many states are searched by one statement, and with so many logits: it has a time limit."""

_ALLOWED = ", allowed AS MATERIALIZED (SELECT key FROM {table} e WHERE {condition})"
_SEARCH = """
, hit AS MATERIALIZED (
    SELECT state.n, near.key, near.distance FROM state CROSS JOIN LATERAL (
        SELECT e.key, {distance} AS distance FROM {table} e WHERE {condition} ORDER BY {order} LIMIT %(width)s
    ) near
)
SELECT n, key, distance, NULL::bytea, NULL::text, NULL::text, NULL::bigint FROM hit
"""
_WITH_ROWS = """
UNION ALL
SELECT NULL, e.key, NULL, vector_send(e.context), e.id, e.example::text, e.program
FROM {table} e WHERE e.key IN (SELECT key FROM hit) AND e.key <> ALL (%(seen)s::bigint[])
"""
# All steps of a selection. The best is the one with the lowest key of those equal to it, as far as they were fetched.
_STEPS = """
, plus (n, needs) AS (VALUES {needs})
, step (n, t, query, needs, v, barred, key, distance, settled, context, id, example, program) AS (
    SELECT n, 0, v, needs, v, barred, NULL::bigint, NULL::float8, NULL::bool, NULL::vector, NULL, NULL::jsonb,
        NULL::bigint FROM state JOIN plus USING (n)
    UNION ALL
    SELECT step.n, step.t + 1, step.query, step.needs, {composed}, step.barred || pick.key, pick.*
    FROM step CROSS JOIN LATERAL (
        SELECT key, distance, farthest > same OR found < %(width)s, context, id, example, program FROM (
            SELECT *, min(distance) OVER () + %(tie)s::float8 * vector_norm(step.v) AS same FROM (
                SELECT *, max(distance) OVER () AS farthest, count(*) OVER () AS found FROM (
                    SELECT e.key, {distance} AS distance, e.context, e.id, e.example, e.program
                    FROM {table} e WHERE {condition} ORDER BY {order} LIMIT %(width)s
                ) near
            ) fetched WHERE key <> ALL (step.barred)
        ) best
        WHERE distance <= same ORDER BY key LIMIT 1
    ) pick
    WHERE step.t < %(k)s
)
SELECT n, t - 1, key, distance, settled, vector_send(context), id, example::text, program FROM step WHERE t > 0
"""
# exp() of PostgreSQL raises an error where the result is too small for a number, below -708.
_LOG_PARTITION = """
SELECT state.n, total.value FROM state CROSS JOIN LATERAL (
    WITH logit AS MATERIALIZED (
        SELECT -(e.candidate <#> state.v) / %(tau)s::float8 AS x FROM {table} e
        WHERE e.key <> ALL (state.barred) AND {condition}
    )
    SELECT top.x + ln(sum(exp(greatest(logit.x - top.x, -700)))) AS value
    FROM logit, (SELECT max(x) AS x FROM logit) top GROUP BY top.x
) total
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """A row of the table of pools.

    Args:
        id: the number of its table.
        format: of its table.
        fingerprint: of the encoders whose vectors it holds.
        dim: D.
        examples: how many there are.
        longest: no candidate vector was ever longer.
        indexed: whether it has an HNSW index.
    """

    id: int
    format: int
    fingerprint: str
    dim: int
    examples: int = 0
    longest: float = 0.0
    indexed: bool = False


@dataclass(slots=True)
class _Plan:
    """The steps of a greedy selection.

    Args:
        state: before the first pick.
        k: how many picks.
        barred: (B, E) what may not be picked; None: nothing is known yet.
        keys: (B, k) the picks; −1 from where they aren't known.
        logits: (B, k) theirs.
        totals: (k, B) log partitions, where they were asked for and all picks are known.
    """

    state: State[Any]
    k: int
    barred: IntArray | None = None
    keys: IntArray = field(default_factory=lambda: nothing(0, 0)[0])
    logits: FloatArray = field(default_factory=lambda: nothing(0, 0)[1])
    totals: NDArray[np.float64] | None = None

    def at(self, exclude: IntArray, scored: bool) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None] | None:
        """What the next search finds, where it is the one that was planned: keys and logits (B, 1), log partitions."""
        if self.barred is None:
            return None
        step = exclude.shape[1] - self.barred.shape[1]
        planned = 0 <= step < self.k and np.array_equal(
            exclude, np.concatenate((self.barred, self.keys[:, :step]), axis=1)
        )
        if not planned or (self.keys[:, step] < 0).any() or (scored and self.totals is None):
            return None
        totals = self.totals[step] if scored and self.totals is not None else None
        return self.keys[:, step, None], self.logits[:, step, None], totals


class PgVectorReader:
    """A `Reader` of a pool, or of the part that a filter lets through, as one transaction sees it.

    Args:
        transaction: one that is `READING`.
        pool: the pool; None: there is none, so it is empty.
        approximate: whether to search by the HNSW index.
    """

    def __init__(self, transaction: Transaction, pool: Pool | None, *, approximate: bool) -> None:
        self._transaction, self._approximate = transaction, approximate
        self._pool = pool or Pool(0, 0, "", 0)
        self._path: str | None = None
        self._seen = Seen()
        self._plan: _Plan | None = None
        self.size = self._pool.examples

    def ahead(self, state: State[Any], k: int) -> None:
        """See `Reader`: the first search then takes all steps."""
        self._plan = _Plan(state, k) if self.size and state.sql() else None

    async def filter(self, where: Filter) -> None:
        """Let `where` decide what can be found, and count it.

        Raises:
            InputError: the filter asks about a field that no example has.
        """
        asked, known = sorted(fields_of(where)), []
        if self.size and asked:
            # One by one: each ends at the first example that has the field.
            some = "SELECT k, EXISTS (SELECT FROM {table} WHERE example ? k) FROM unnest(%s::text[]) k"
            known = [key for key, there in await self._transaction.fetch(some, [asked]) if there]
            if len(known) < len(asked):
                every = "SELECT DISTINCT jsonb_object_keys(example) FROM {table}"
                known = [key for (key,) in await self._transaction.fetch(every)]
        if self.size and {*asked} - {*known}:
            raise unknown_field(where, known)
        if self._pool.id:
            self._path = to_path(where)
            count = "SELECT count(*) FROM {table} WHERE example @@ %s::jsonpath"
            ((self.size,),) = await self._transaction.fetch(count, [self._path])

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """See `Reader.search`; the log partition is exact without an index, with HNSW over the best candidates."""
        if self.size and states.shape[1] != self._pool.dim:
            msg = f"states have {states.shape[1]} numbers each, the vectors in the pool {self._pool.dim}"
            raise InputError(msg)
        fetch, margins = partial(self._nearest, ship=True), slack(states, self._pool.longest)
        plan, self._plan = self._plan, None
        if plan is not None and t == 1:
            if plan.barred is None:
                await self._steps(plan, exclude, tau)
            found = plan.at(exclude, tau is not None)
            if found is not None:
                self._plan = plan
                return Hits(*found[:2], self._seen.rows, self._seen.contexts, found[2])
        keys, logits = await best_fetched(fetch, states, t, exclude, margins, self.size)
        totals = None if tau is None else await self._log_partition(states, exclude, tau)
        return Hits(keys, logits, self._seen.rows, self._seen.contexts, totals)

    async def _steps(self, plan: _Plan, exclude: IntArray, tau: float | None) -> None:
        """Find out all picks of a plan in one statement, and the log partitions in another."""
        states = plan.state.vector()
        plan.barred, (plan.keys, plan.logits) = exclude, nothing(len(states), plan.k)
        if next(self._parts(np.repeat(states, plan.k, axis=0))).stop < plan.k * len(states):
            return
        names = {"query": "step.query", "needs": "step.needs", "vector": "step.v", "context": "pick.context"}
        text = _STEPS.replace("{composed}", plan.state.sql().format(dim=states.shape[1], **names))
        text = text.replace("{needs}", ", ".join(f"({n}, %(p{n})s::vector)" for n in range(len(states))))
        parameters = {f"p{n}": needs for n, needs in enumerate(np.maximum(states, 0))}
        parameters |= {"k": plan.k, "width": 1 + MORE + plan.k + exclude.shape[1], "tie": TIE * self._pool.longest}
        text = _ordered(text, "step", exact=not self._approximate)
        for n, at, key, apart, settled, *row in await self._ask(text, states, exclude, **parameters):
            if settled:
                plan.keys[n, at], plan.logits[n, at] = key, -apart
                self._keep(key, *row)
        plan.keys[:, (plan.keys < 0).any(axis=0).cumsum() > 0] = -1
        if tau is not None and (plan.keys >= 0).all():
            steps, state, out = [states], plan.state, np.full((plan.k, *plan.keys.shape), -1, dtype=np.int64)
            for at in range(1, plan.k):
                state = state.update(self._seen.contexts(plan.keys[:, at - 1]))
                steps.append(state.vector())
                out[at, :, :at] = plan.keys[:, :at]
            barred = np.concatenate((np.tile(exclude, (plan.k, 1)), np.concatenate(out)), axis=1)
            totals = await self._log_partition(np.concatenate(steps), barred, tau)
            plan.totals = totals.reshape(plan.k, -1)

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        if not len(keys):
            return np.empty((0, self._pool.dim), dtype=np.float32)
        query = "SELECT key, vector_send(candidate) FROM {table} WHERE key = ANY (%s::bigint[])"
        found = dict(await self._transaction.fetch(query, [keys.tolist()]))
        return np.stack([_vector(found[key]) for key in keys.tolist()])

    async def _log_partition(self, states: FloatArray, exclude: IntArray, tau: float) -> NDArray[np.float64]:
        if self._approximate:
            fetch, most = partial(self._nearest, ship=False), max(1, min(BEST, self.size))
            _, logits = await best_fetched(
                fetch, states, most, exclude, np.zeros(len(states), dtype=np.float32), self.size
            )
            return log_sums(logits, tau)
        totals = np.full(len(states), -np.inf)
        for part in self._parts(states) if self.size else ():
            for n, value in await self._ask(_LOG_PARTITION, states[part], exclude[part], tau=tau):
                totals[part.start + n] = value
        return totals

    async def _nearest(self, states: FloatArray, width: int, *, ship: bool) -> list[tuple[IntArray, FloatArray]]:
        """See `best_fetched`; `ship`: and keep their vectors and rows for later."""
        near = await self._hits(states, width, exact=not self._approximate, ship=ship)
        short = [at for at, hits in enumerate(near) if len(hits) < width and self._approximate]
        if short:  # an index may miss some for ever
            for at, hits in zip(short, await self._hits(states[short], width, exact=True, ship=ship), strict=True):
                near[at] = hits
        return [(np.array([*hits], dtype=np.int64), -np.array([*hits.values()], dtype=np.float32)) for hits in near]

    async def _hits(self, states: FloatArray, width: int, *, exact: bool, ship: bool) -> list[dict[int, float]]:
        """For each state key → distance of `width` of the nearest candidates; by the index unless `exact`."""
        text = _ordered(_SEARCH + (_WITH_ROWS if ship else ""), "state", exact=exact)
        near: list[dict[int, float]] = [{} for _ in states]
        for part in self._parts(states):
            rows = await self._ask(text, states[part], width=width, seen=[*self._seen.rows])
            for n, key, apart, context, example_id, example, program in rows:
                if n is None:
                    self._keep(key, context, example_id, example, program)
                else:
                    near[part.start + n][key] = apart
        return near

    def _keep(self, key: int, context: bytes, example_id: str, example: str, program: int) -> None:
        self._seen.rows[key] = Row(example_id, json.loads(example), program)
        self._seen.vectors[key] = _vector(context)

    def _parts(self, states: FloatArray) -> Iterator[slice]:
        """The states of each statement."""
        looked_at = 0 if self._approximate else self.size
        return blocks(len(states), max(looked_at, _LOGITS // _STATES), _LOGITS)

    async def _ask(
        self, text: str, states: FloatArray, barred: IntArray | None = None, **parameters: Any
    ) -> list[tuple[Any, ...]]:
        """Run a statement over a table `state` (number, vector, keys left out) and a filter's `{condition}`."""
        values = ", ".join(f"({n}, %(v{n})s::vector, %(b{n})s::bigint[])" for n in range(len(states)))
        for n, state in enumerate(states):
            parameters |= {f"v{n}": state, f"b{n}": [] if barred is None else barred[n].tolist()}
        front, condition = f"WITH RECURSIVE state (n, v, barred) AS (VALUES {values})", "true"
        if self._path is not None:
            condition, parameters["path"] = "e.example @@ %(path)s::jsonpath", self._path
            if len(states) > 1:
                # Looked at once for all states. As a value and not as a plain condition, which might become a join and
                # lose the order of an index.
                front += _ALLOWED.replace("{condition}", condition)
                condition = "(e.key IN (SELECT key FROM allowed)) IS TRUE"
        return await self._transaction.fetch(front + text.replace("{condition}", condition), parameters)


def _ordered(text: str, states: str, *, exact: bool) -> str:
    """A statement with the distance of an example `e` to those of a table of states, and the order by it."""
    # No index is made for this sum, so it keeps PostgreSQL from using one.
    distance = f"(e.candidate <#> {states}.v)" + (" + 0" if exact else "")
    return text.replace("{distance}", distance).replace("{order}", "distance, e.key" if exact else distance)


def _vector(sent: bytes) -> FloatArray:
    """A vector (D,) in pgvector's binary format: two numbers of 16 bits, then float32 in network order."""
    return np.frombuffer(sent, dtype=">f4", offset=4).astype(np.float32)
