"""One pool of a PostgreSQL database at one moment: a transaction that searches it, and what was found so far."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.families.state import State
from langchain_rcr.index.base import BEST, TIE, Hits, Row
from langchain_rcr.index.filters import Filter, fields_of, unknown_field
from langchain_rcr.index.pgvector.database import Transaction
from langchain_rcr.index.pgvector.jsonb import to_sql
from langchain_rcr.index.ranking import MORE, Near, best_fetched, blocks, log_sums, nothing, slack

_STATES, _LOGITS = 64, 8_000_000
"""The most states and logits per statement, which has a time limit."""

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
# All steps of a selection. Of the fetched candidates that tie for the best, the one with the lowest key wins.
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
# PostgreSQL's exp() raises an error if the result underflows, below -708.
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
    """A row of the table of pools."""

    id: int  # the number of its table
    format: int  # of its table
    fingerprint: str  # of the encoders whose vectors it holds
    dim: int  # D
    examples: int = 0  # how many there are
    longest: float = 0.0  # no candidate vector was ever longer
    indexed: bool = False  # whether it has an HNSW index


class PgVectorReader:
    """A `Reader` of a pool, or of the part that passes a filter, as a transaction that is `READING` sees it.

    Without a pool, it is empty; if `approximate`, it searches with the HNSW index.
    """

    def __init__(self, transaction: Transaction, pool: Pool | None, *, approximate: bool) -> None:
        self._transaction, self._approximate = transaction, approximate
        self._pool = pool or Pool(0, 0, "", 0)
        self._condition, self._values = "true", dict[str, Any]()
        """Which examples can be found, and the parameters of this."""
        self._rows, self._vectors = dict[int, Row](), dict[int, FloatArray]()  # found so far: rows and E_z (D,), by key
        self.size = self._pool.examples

    async def aside(self, work: Callable[..., None], *arguments: Any) -> None:
        """See `Reader`."""
        await asyncio.to_thread(work, *arguments)

    async def filter(self, where: Filter) -> None:
        """Restrict what can be found to `where`, and count it; see `CandidateIndex.read`."""
        self._condition, asked = to_sql(where, self._values), sorted(fields_of(where))
        if self.size and asked:
            # One field at a time: each scan ends at the first example that has the field.
            some = "SELECT k, EXISTS (SELECT FROM {table} WHERE example ? k) FROM unnest(%s::text[]) k"
            known = [key for key, there in await self._transaction.fetch(some, [asked]) if there]
            if len(known) < len(asked):
                every = "SELECT DISTINCT jsonb_object_keys(example) FROM {table}"
                raise unknown_field(where, [key for (key,) in await self._transaction.fetch(every)])
        if self.size:
            count = "SELECT count(*) FROM {table} e WHERE {condition}".replace("{condition}", self._condition)
            ((self.size,),) = await self._transaction.fetch(count, self._values)

    async def search(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Hits:
        """See `Reader.search`; the log partition is exact without an index; with HNSW it covers the best candidates."""
        if self.size and states.shape[1] != self._pool.dim:
            msg = f"states have {states.shape[1]} numbers each, the vectors in the pool {self._pool.dim}"
            raise InputError(msg)
        margins = slack(states, self._pool.longest)
        keys, logits = await best_fetched(partial(self._nearest, ship=True), states, t, exclude, margins, self.size)
        totals = None if tau is None else await self._log_partition(states, exclude, tau)
        return Hits(keys, logits, self._rows, self._contexts, totals)

    async def ahead(self, state: State[Any], k: int, exclude: IntArray, tau: float | None) -> list[Hits]:
        """See `Reader`: all steps in one statement, their log partitions in another.

        The result ends before a step that needs more candidates than were fetched.
        """
        states = state.vector()
        slack(states, self._pool.longest)  # checks them
        if not (self.size and state.sql()) or next(self._parts(k * len(states))).stop < k * len(states):
            return []
        names = {"query": "step.query", "needs": "step.needs", "vector": "step.v", "context": "pick.context"}
        text = _STEPS.replace("{composed}", state.sql().format(dim=states.shape[1], **names))
        text = text.replace("{needs}", ", ".join(f"({n}, %(p{n})s::vector)" for n in range(len(states))))
        parameters = {f"p{n}": needs for n, needs in enumerate(np.maximum(states, 0))}
        parameters |= {"k": k, "width": 1 + MORE + k + exclude.shape[1], "tie": TIE * self._pool.longest}
        text = _ordered(text, "step", exact=not self._approximate)
        keys, logits = nothing(len(states), k)
        for n, at, key, apart, settled, *row in await self._ask(text, states, exclude, **parameters):
            if settled:
                keys[n, at], logits[n, at] = key, -apart
                self._keep(key, *row)
        known = int((keys >= 0).all(axis=0).cumprod().sum())
        totals: list[Any] = [None] * known
        if tau is not None and known:
            steps = [states]
            for at in range(known - 1):
                state = state.update(self._contexts(keys[:, at]))
                steps.append(state.vector())
            picked = [np.where(np.arange(known) < at, keys[:, :known], -1) for at in range(known)]
            every = np.concatenate([np.concatenate((exclude, some), axis=1) for some in picked])
            totals = np.split(await self._log_partition(np.concatenate(steps), every, tau), known)
        found = self._rows, self._contexts
        return [Hits(keys[:, at, None], logits[:, at, None], *found, totals[at]) for at in range(known)]

    async def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (n, D) of `keys` (n,)."""
        query = "SELECT key, vector_send(candidate) FROM {table} WHERE key = ANY (%s::bigint[])"
        found = dict(await self._transaction.fetch(query, [keys.tolist()]))
        return np.array([_vector(found[key]) for key in keys.tolist()], dtype="<f4").reshape(-1, self._pool.dim)

    async def _log_partition(self, states: FloatArray, exclude: IntArray, tau: float) -> DoubleArray:
        if self._approximate:
            fetch, most = partial(self._nearest, ship=False), max(1, min(BEST, self.size))
            _, logits = await best_fetched(fetch, states, most, exclude, np.zeros(len(states), "<f4"), self.size)
            return log_sums(logits, tau)
        totals = np.full(len(states), -np.inf)
        for part in self._parts(len(states)) if self.size else ():
            for n, value in await self._ask(_LOG_PARTITION, states[part], exclude[part], tau=tau):
                totals[part.start + n] = value
        return totals

    async def _nearest(self, states: FloatArray, width: int, *, ship: bool, exact: bool = False) -> list[Near]:
        """See `best_fetched`; uses the index, if there is one, unless `exact`.

        With `ship`, vectors and rows are kept for later.
        """
        exact |= not self._approximate
        text = _ordered(_SEARCH + (_WITH_ROWS if ship else ""), "state", exact=exact)
        found: list[dict[int, float]] = [{} for _ in states]
        for part in self._parts(len(states)):
            rows = await self._ask(text, states[part], width=width, seen=[*self._rows])
            for n, key, apart, *row in rows:
                if n is None:
                    self._keep(key, *row)
                else:
                    found[part.start + n][key] = -apart
        near = [(np.array([*hits], dtype=np.int64), np.array([*hits.values()], dtype=np.float32)) for hits in found]
        short = [] if exact else [at for at, (keys, _) in enumerate(near) if len(keys) < width]
        if short:  # an index may never find some
            for at, hits in zip(short, await self._nearest(states[short], width, ship=ship, exact=True), strict=True):
                near[at] = hits
        return near

    def _contexts(self, keys: IntArray) -> FloatArray:
        return np.stack([self._vectors[key] for key in keys.tolist()])

    def _keep(self, key: int, context: bytes, example_id: str, example: str, program: int) -> None:
        self._rows[key] = Row(example_id, json.loads(example), program)
        self._vectors[key] = _vector(context)

    def _parts(self, count: int) -> Iterator[slice]:
        """Slices of `count` states, one per statement."""
        looked_at = 0 if self._approximate else self.size
        return blocks(count, max(looked_at, _LOGITS // _STATES), _LOGITS)

    async def _ask(
        self, text: str, states: FloatArray, barred: IntArray | None = None, **parameters: Any
    ) -> list[tuple[Any, ...]]:
        """Run a statement over a table `state` (number, vector, keys left out) and a filter's `{condition}`."""
        values = ", ".join(f"({n}, %(v{n})s::vector, %(b{n})s::bigint[])" for n in range(len(states)))
        for n, state in enumerate(states):
            parameters |= {f"v{n}": state, f"b{n}": [] if barred is None else barred[n].tolist()}
        front, condition = f"WITH RECURSIVE state (n, v, barred) AS (VALUES {values})", self._condition
        if self._values and len(states) > 1:
            # Evaluate the filter once for all states. It is a value, not a plain condition, which might become a
            # join and lose the order of an index.
            front += _ALLOWED.replace("{condition}", condition)
            condition = "(e.key IN (SELECT key FROM allowed)) IS TRUE"
        return await self._transaction.fetch(front + text.replace("{condition}", condition), parameters | self._values)


def _ordered(text: str, states: str, *, exact: bool) -> str:
    """A statement with the distance of an example `e` from a table of states filled in, and the order by it."""
    # There is no index on this sum, so PostgreSQL can't use one.
    distance = f"(e.candidate <#> {states}.v)" + (" + 0" if exact else "")
    return text.replace("{distance}", distance).replace("{order}", "distance, e.key" if exact else distance)


def _vector(sent: bytes) -> FloatArray:
    """A vector (D,) from pgvector's binary format: two 16-bit numbers, then float32 in network order."""
    return np.frombuffer(sent, dtype=">f4", offset=4).astype(np.float32)
