"""The step-by-step loop: each pick is one inner-product search with a state made of the picks before it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.families.state import State
from langchain_rcr.index.base import PoolVectors, Reader, Row, Search
from langchain_rcr.index.local import LocalReader
from langchain_rcr.index.memory import Followed, MatrixTable
from langchain_rcr.index.ranking import blocks, checked_exclude
from langchain_rcr.policy.constraints import DifferentPrograms

_NONE = np.empty(0, dtype=np.int64)
_SHORTLIST = 8
"""Candidates looked at for one that a constraint allows, before more are fetched."""


class _Turns:
    """As many at once as there are cores: more threads would hand Python's lock and the caches to and fro."""

    def __init__(self) -> None:
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)  # threads that hold one are not in the child

    def _start(self) -> None:
        self._free = threading.BoundedSemaphore(os.cpu_count() or 1)

    def one(self) -> AbstractContextManager[Any]:
        """A turn: waits until there is one."""
        return self._free


_turns = _Turns()


class Constraint(Protocol):
    """What a set of picks must keep to, beside its logits."""

    soft: bool
    """Whether it gives way where nothing else is left."""

    def allows(self, picked: Sequence[Row], candidate: Row) -> bool:
        """Whether the candidate may follow the picks."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How a selection goes.

    Args:
        k: picks a query.
        k_min: fewer picks than this are an error (`ExampleStore` raises it).
        beam_width: sequences kept for each query; 1: greedy decoding (section 3.2).
        tau: τ of π = softmax(logits / τ).
        probabilities: find out π of every pick, over what is left at its step; beams and `min_probability` do anyway.
        min_probability: end a sequence where the next pick would be less probable.
        stop_early: end a sequence where the next pick's logit is not above 0: nothing is gained any more.
        constraints: see `Constraint`.
        relevance: find out each pick's logit for the question alone (`ExampleStore` does).
    """

    k: int
    beam_width: int = 1
    tau: float = 1.0
    probabilities: bool = False
    min_probability: float = 0.0
    stop_early: bool = False
    constraints: tuple[Constraint, ...] = ()
    relevance: bool = False
    k_min: int = 0

    @property
    def scored(self) -> bool:
        """Whether probabilities are needed."""
        return self.probabilities or self.beam_width > 1 or self.min_probability > 0


class Hit(NamedTuple):
    """A candidate found at one step."""

    key: int
    logit: float
    context: FloatArray
    """E_z, (D,)."""
    row: Row


@dataclass(frozen=True, slots=True)
class Picks:
    """What was picked for B queries.

    Args:
        positions: (B, k) int64; positions[b, t] is the key of query b's pick at step t (the pool position, for a
            matrix); −1 where its sequence ended before.
        logits: (B, k) float32; the pick's logit (Eq. 4) in the state it was picked in; −inf where there is none.
        probabilities: (B, k) float64; π of the pick among the candidates left; NaN where it wasn't asked for. Where
            several queries go over a large dense pool in memory, and none ends for its `min_probability`, to about a
            thousandth of it (a hundredth at most in trials).
        hits: for each query its picks with their examples; `greedy` leaves it empty.
    """

    positions: IntArray
    logits: FloatArray
    probabilities: NDArray[np.float64]
    hits: tuple[tuple[Hit, ...], ...] = ()

    @classmethod
    def none(cls, batch: int, k: int) -> Picks:
        """Nothing picked yet."""
        logits = np.full((batch, k), -np.inf, dtype=np.float32)
        return cls(np.full((batch, k), -1, dtype=np.int64), logits, np.full((batch, k), np.nan))


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One partial context of a query."""

    query: int
    hits: tuple[Hit, ...] = ()
    log_probs: tuple[float, ...] = ()
    score: float = 0.0
    ended: bool = False

    @property
    def keys(self) -> IntArray:
        return np.array([hit.key for hit in self.hits], dtype=np.int64)

    def with_pick(self, hit: Hit, log_prob: float) -> _Sequence:
        return _Sequence(self.query, (*self.hits, hit), (*self.log_probs, log_prob), self.score + log_prob)


def greedy(
    queries: FloatArray,
    pool: PoolVectors | MatrixTable,
    state: State[Any],
    k: int,
    *,
    exclude: Sequence[Collection[int]] | None = None,
    groups: NDArray[np.integer[Any]] | None = None,
) -> Picks:
    """Greedy decoding of the policy (section 3.2): at every step the candidate with the largest logit.

    Args:
        queries: E_x of the queries, (B, D) float32.
        pool: the pool's vectors, or a table of them.
        state: how picks compose (its `start` is called here).
        k: how many examples to pick for each query.
        exclude: for each query the pool positions it must not get (itself, for a training query).
        groups: (N,) integers; once a candidate is picked, all of its group are masked (same program, say). Where
            nothing is left but masked groups, the mask is lifted for that query: k picks come back in any case.

    Returns:
        Picks of k distinct positions a query. Equal logits are decided by the lowest position.

    Raises:
        InputError: k is not positive, a query has fewer than k candidates left, a position is outside the pool, or
            groups has another length than the pool.
    """
    table = MatrixTable(pool) if isinstance(pool, PoolVectors) else pool
    barred = checked_exclude(exclude, len(queries), table.size, k)
    if groups is not None and len(groups) != table.size:
        raise InputError(f"groups has {len(groups)} entries for a pool of {table.size}")
    positions, logits, _, _ = _decoded(queries, table, state, k, barred, groups)
    return Picks(positions, logits, np.full(positions.shape, np.nan))


def _decoded(
    queries: FloatArray,
    table: MatrixTable,
    state: State[Any],
    k: int,
    barred: Sequence[IntArray],
    groups: NDArray[np.integer[Any]] | None = None,
    tau: float | None = None,
    *,
    rough: bool = False,
) -> tuple[IntArray, FloatArray, NDArray[np.float64], FloatArray]:
    """See `greedy` and, for `rough`, `MatrixTable.first`.

    Returns:
        Keys (B, k), logits (B, k), log partitions (B, k), NaN without a τ, and E_z of the picks, (B, k, D).
    """
    shape = (len(queries), k)
    keys, logits, totals = np.empty(shape, np.int64), np.empty(shape, np.float32), np.full(shape, np.nan)
    contexts = np.empty((*shape, queries.shape[1]), dtype=np.float32)
    for block in blocks(len(queries), len(table)):
        current, taken, masked = state.start(queries[block]), list(barred[block]), [_NONE] * len(queries[block])
        followed = table.followed(queries[block], tau, rough=rough)
        if followed is not None:
            for row, one in zip(range(len(queries))[block], followed, strict=True):
                out = keys[row], logits[row], totals[row], contexts[row]
                _follow(one, state.start(queries[row : row + 1]), table, barred[row].tolist(), groups, tau, *out)
            continue
        for step in range(k):
            found, logits[block, step], total = table.first(current.vector(), taken, masked, tau, rough=rough)
            keys[block, step], contexts[block, step] = found, table.vectors(found)
            if total is not None:
                totals[block, step] = total
            if step + 1 < k:
                current = current.update(contexts[block, step])
                taken = [np.append(row, key) for row, key in zip(taken, found, strict=True)]
                if groups is not None:
                    same = (np.flatnonzero(groups == groups[key]) for key in found)
                    masked = [np.append(row, more) for row, more in zip(masked, same, strict=True)]
    return keys, logits, totals, contexts


def _follow(
    followed: Followed,
    current: State[Any],
    table: MatrixTable,
    barred: list[int],
    groups: NDArray[np.integer[Any]] | None,
    tau: float | None,
    keys: IntArray,
    logits: FloatArray,
    totals: NDArray[np.float64],
    contexts: FloatArray,
) -> None:
    """`_decoded` for one query; into keys, logits and log partitions (k,) and E_z (k, D)."""
    masked = list[IntArray]()
    for step in range(len(keys)):
        keys[step], logits[step] = key, _ = followed.first(barred, masked)
        if tau is not None:
            totals[step] = followed.log_partition(tau)
        contexts[step] = table.vectors(keys[step : step + 1])[0]
        if step + 1 < len(keys):
            current = current.update(contexts[step : step + 1])
            followed.move(current.vector())
            barred.append(key)
            if groups is not None:
                masked.append(np.flatnonzero(groups == groups[key]))


def _quick(queries: FloatArray, state: State[Any], options: Options, reader: LocalReader, table: MatrixTable) -> Picks:
    """`select` for one beam over a matrix, where nothing but programs has to differ."""
    k, tau = min(options.k, reader.size), options.tau if options.scored else None
    groups, barred = reader.programs if options.constraints else None, [_NONE] * len(queries)
    rough = not options.min_probability  # nobody decides by them
    keys, logits, totals, contexts = _decoded(queries, table, state, k, barred, groups, tau, rough=rough)
    if options.scored or options.stop_early or k < options.k:
        # Above 0 by rounding.
        log_probs = np.minimum(0.0, logits / options.tau - totals)
        ended = logits <= 0 if options.stop_early else np.zeros(keys.shape, dtype=bool)
        if options.scored:
            ended |= np.exp(log_probs) < options.min_probability
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), k) if k else np.zeros(len(queries), dtype=np.int64)
        picks = Picks.none(len(queries), options.k)
        there = np.arange(k) < lengths[:, None]
        picks.positions[:, :k][there], picks.logits[:, :k][there] = keys[there], logits[there]
        picks.probabilities[:, :k][there] = np.exp(log_probs[there])
    else:
        picks, lengths = Picks(keys, logits, totals), np.full(len(queries), k)
    rows = reader.rows
    each = zip(keys.tolist(), logits.tolist(), contexts, lengths.tolist(), strict=True)
    hits = (
        tuple(Hit(key, logit, z, rows[key]) for key, logit, z in zip(line[:n], values[:n], of, strict=False))
        for line, values, of, n in each
    )
    return replace(picks, hits=tuple(hits))


async def select(queries: FloatArray, state: State[Any], options: Options, reader: Reader) -> Picks:
    """Pick examples for B queries together: every step is one search for all their sequences.

    Args:
        queries: E_x of the queries, (B, D) float32.
        state: how picks compose (its `start` is called here).
        options: k, beams, when to stop, what to keep to.
        reader: the pool; see `CandidateIndex.run` for where to await this.

    Returns:
        Picks of up to k distinct candidates a query. With beams: the sequence of the most picks, among them that with
        the largest Π π. Of two that hold the same picks in another order the more probable one is kept.
    """
    simple = options.beam_width == 1 and all(isinstance(one, DifferentPrograms) for one in options.constraints)
    if simple and isinstance(reader, LocalReader) and isinstance(reader.table, MatrixTable):
        with _turns.one():
            return _quick(queries, state, options, reader, reader.table)
    beams = [[_Sequence(query)] for query in range(len(queries))]
    for _ in range(options.k):
        active = [sequence for beam in beams for sequence in beam if not sequence.ended]
        if not active:
            break
        states = _states(queries, state, active)
        tau = options.tau if options.scored else None
        search = Search(states, options.beam_width, [one.keys for one in active], tau)
        found, totals = await _candidates(search, active, options.constraints, reader)
        beams = [[sequence for sequence in beam if sequence.ended] for beam in beams]
        for at, (sequence, hits) in enumerate(zip(active, found, strict=True)):
            total = None if totals is None else float(totals[at])
            beams[sequence.query].extend(_grown(sequence, hits, total, options))
        beams = [_best(beam, options.beam_width) for beam in beams]
    return _picks([beam[0] for beam in beams], options)


def _states(queries: FloatArray, state: State[Any], sequences: Sequence[_Sequence]) -> FloatArray:
    """The vectors (R, D) of R sequences of equal length."""
    current = state.start(queries[[sequence.query for sequence in sequences]])
    for hits in zip(*(sequence.hits for sequence in sequences), strict=True):
        current = current.update(np.stack([hit.context for hit in hits]))
    vectors: FloatArray = current.vector()
    return vectors


async def _candidates(
    search: Search, sequences: Sequence[_Sequence], constraints: Sequence[Constraint], reader: Reader
) -> tuple[list[list[Hit]], NDArray[np.float64] | None]:
    """For each sequence the best `search.t` candidates that the constraints allow, fewer where there are no more.

    Where none is left that all allow, the soft ones give way.
    """
    soft = [constraint for constraint in constraints if constraint.soft]
    hard = [constraint for constraint in constraints if not constraint.soft]
    found: list[list[Hit]] = [[] for _ in sequences]
    spare: list[list[Hit]] = [[] for _ in sequences]
    seen, open_, asked, totals = list(search.exclude), list(range(len(sequences))), search, None
    if constraints:
        asked = replace(search, t=max(_SHORTLIST, 2 * search.t))
    while open_:
        hits = await reader.search(asked)
        totals = hits.log_partition if asked.tau is not None else totals
        still = []
        each = zip(open_, hits.keys, hits.logits.tolist(), hits.contexts, hits.rows, strict=True)
        for at, keys, logits, contexts, rows in each:
            picked = [one.row for one in sequences[at].hits]
            # One by one: constraints ask a tokenizer, which need not see more than it must.
            for hit in map(Hit, keys.tolist(), logits, contexts, rows):
                if len(found[at]) == search.t:
                    break
                into = found[at] if all(one.allows(picked, hit.row) for one in soft) else spare[at]
                if len(into) < search.t and all(one.allows(picked, hit.row) for one in hard):
                    into.append(hit)
            if constraints and len(found[at]) < search.t and keys[-1] >= 0:
                seen[at] = np.concatenate([seen[at], keys])
                still.append(at)
        open_ = still
        asked = Search(search.states[open_], 4 * asked.t, [seen[at] for at in open_])
    return [allowed or others for allowed, others in zip(found, spare, strict=True)], totals


def _grown(sequence: _Sequence, hits: Sequence[Hit], total: float | None, options: Options) -> Iterator[_Sequence]:
    """The sequence with each candidate that may follow; itself, ended, where none may."""
    grown = 0
    for hit in hits:
        # Above 0 where the total is over the best candidates alone, or by rounding.
        log_prob = 0.0 if total is None else min(0.0, hit.logit / options.tau - total)
        if (options.stop_early and hit.logit <= 0) or np.exp(log_prob) < options.min_probability:
            continue
        grown += 1
        yield sequence.with_pick(hit, log_prob)
    if not grown:
        yield replace(sequence, ended=True)


def _best(beam: list[_Sequence], width: int) -> list[_Sequence]:
    """The best sequences of one query: longest first, then most probable; one for each set of picks."""
    ranked = sorted(beam, key=lambda sequence: (-len(sequence.hits), -sequence.score))
    distinct: dict[frozenset[int], _Sequence] = {}
    for sequence in ranked:
        distinct.setdefault(frozenset(hit.key for hit in sequence.hits), sequence)
    return list(distinct.values())[:width]


def _picks(sequences: Sequence[_Sequence], options: Options) -> Picks:
    picks = Picks.none(len(sequences), options.k)
    for at, sequence in enumerate(sequences):
        length = len(sequence.hits)
        picks.positions[at, :length] = sequence.keys
        picks.logits[at, :length] = [hit.logit for hit in sequence.hits]
        if options.scored:
            picks.probabilities[at, :length] = np.exp(sequence.log_probs)
    return replace(picks, hits=tuple(sequence.hits for sequence in sequences))
