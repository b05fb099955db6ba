"""The step-by-step loop: each pick is one inner-product search with a state made of the picks before it.

The loop is a generator. It yields what it asks of the reader, (name of a method, arguments), and is sent the answer, so
that one loop serves engines that are called (`run`) and engines that are awaited (`arun`). "advance" is a hint that a
reader may do without: how the coming states follow from the last ones.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import AsyncReader, FloatArray, IntArray, PoolVectors, Row, Searcher
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.state import AdditiveState, State

T = TypeVar("T")
Asking = Generator[tuple[str, tuple[Any, ...]], Any, T]

_NONE = np.empty(0, dtype=np.int64)
_SHORTLIST = 8
"""Candidates looked at for one that a constraint allows, before more are fetched."""


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
        beam_width: sequences kept for each query; 1: greedy decoding (section 3.2).
        tau: τ of π = softmax(logits / τ).
        probabilities: find out π of every pick, over what is left at its step; beams and `min_probability` do anyway.
        min_probability: end a sequence where the next pick would be less probable.
        stop_early: end a sequence where the next pick's logit is not above 0: nothing is gained any more.
        constraints: see `Constraint`.
    """

    k: int
    beam_width: int = 1
    tau: float = 1.0
    probabilities: bool = False
    min_probability: float = 0.0
    stop_early: bool = False
    constraints: tuple[Constraint, ...] = ()

    @property
    def scored(self) -> bool:
        """Whether probabilities are needed."""
        return self.probabilities or self.beam_width > 1 or self.min_probability > 0


@dataclass(frozen=True, slots=True)
class Picks:
    """What was picked for B queries.

    Args:
        positions: (B, k) int64; positions[b, t] is the key of query b's pick at step t (the pool position, for a
            matrix); −1 where its sequence ended before.
        logits: (B, k) float32; the pick's logit (Eq. 4) in the state it was picked in; −inf where there is none.
        probabilities: (B, k) float64; π of the pick among the candidates left; NaN where it wasn't asked for.
    """

    positions: IntArray
    logits: FloatArray
    probabilities: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One partial context of a query."""

    query: int
    picks: tuple[int, ...] = ()
    logits: tuple[float, ...] = ()
    log_probs: tuple[float, ...] = ()
    score: float = 0.0
    rows: tuple[Row, ...] = ()
    ended: bool = False
    parent: int = 0
    """Which of the step before it continues."""

    def with_pick(self, key: int, logit: float, log_prob: float, row: Row | None, parent: int) -> _Sequence:
        return _Sequence(
            self.query,
            (*self.picks, key),
            (*self.logits, logit),
            (*self.log_probs, log_prob),
            self.score + log_prob,
            self.rows if row is None else (*self.rows, row),
            parent=parent,
        )

    def end(self) -> _Sequence:
        return _Sequence(self.query, self.picks, self.logits, self.log_probs, self.score, self.rows, ended=True)


@dataclass(slots=True)
class _Found:
    """The best allowed candidates of one sequence, best first."""

    keys: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    rows: list[Row | None] = field(default_factory=list)


def greedy(
    queries: FloatArray,
    pool: PoolVectors | Searcher,
    state: State[Any],
    k: int,
    *,
    exclude: Sequence[Collection[int]] | None = None,
    groups: NDArray[np.integer[Any]] | None = None,
) -> Picks:
    """Greedy decoding of the policy (section 3.2): at every step the candidate with the largest logit.

    Args:
        queries: E_x of the queries, (B, D) float32.
        pool: the pool's vectors, or something that searches them.
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
    searcher = MatrixTable(pool) if isinstance(pool, PoolVectors) else pool
    batch = len(queries)
    barred = [_positions(row) for row in exclude] if exclude is not None else [_NONE] * batch
    _check(k, searcher.size, batch, barred)
    if groups is not None and len(groups) != searcher.size:
        msg = f"groups has {len(groups)} entries for a pool of {searcher.size}"
        raise InputError(msg)

    current = state.start(queries)
    masked = list(barred)
    positions = np.empty((batch, k), dtype=np.int64)
    logits = np.empty((batch, k), dtype=np.float32)
    for step in range(k):
        found, values = searcher.search(current.vector(), 1, masked)
        best, logit = found[:, 0], values[:, 0]
        for row in np.flatnonzero(best < 0):
            masked[row] = np.concatenate([barred[row], positions[row, :step]])
            again, value = searcher.search(current.vector()[row : row + 1], 1, [masked[row]])
            best[row], logit[row] = again[0, 0], value[0, 0]
        positions[:, step], logits[:, step] = best, logit
        if step + 1 < k:
            current = current.update(searcher.vectors(best))
            masked = [
                np.append(row, pick if groups is None else np.flatnonzero(groups == groups[pick]))
                for row, pick in zip(masked, best, strict=True)
            ]
    return Picks(positions, logits, np.full((batch, k), np.nan))


def select(queries: FloatArray, state: State[Any], options: Options) -> Asking[Picks]:
    """Pick examples for B queries together: every step is one search for all their sequences.

    Args:
        queries: E_x of the queries, (B, D) float32.
        state: how picks compose (its `start` is called here).
        options: k, beams, when to stop, what to keep to.

    Yields:
        What is asked of the reader; see `run` and `arun`.

    Returns:
        Picks of up to k distinct candidates a query. With beams: the sequence of the most picks, among them that with
        the largest Π π. Of two that hold the same picks in another order the more probable one is kept.
    """
    beams = [[_Sequence(query)] for query in range(len(queries))]
    contexts: dict[int, FloatArray] = {}
    for step in range(options.k):
        active = [sequence for beam in beams for sequence in beam if not sequence.ended]
        if not active:
            break
        states = _states(queries, state, active, contexts)
        if step and isinstance(state, AdditiveState) and not options.constraints:
            parents, last = [one.parent for one in active], [one.picks[-1] for one in active]
            yield "advance", (states, _keys(parents), _keys(last), state.lam)
        found = yield from _candidates(states, active, options)
        totals = np.full(len(active), np.nan)
        if options.scored:
            totals = yield "log_partition", (states, options.tau, [_keys(one.picks) for one in active])
        grown = [
            list(_grown(at, *row, options)) for at, row in enumerate(zip(active, found, totals.tolist(), strict=True))
        ]
        beams = [[sequence for sequence in beam if sequence.ended] for beam in beams]
        for sequence in chain.from_iterable(grown):
            beams[sequence.query].append(sequence)
        beams = [_best(beam, options.beam_width) for beam in beams]
        new = list(dict.fromkeys(one.picks[-1] for beam in beams for one in beam if one.picks and not one.ended))
        lacking = [key for key in new if key not in contexts]
        if lacking:
            vectors = yield "vectors", (_keys(lacking),)
            contexts |= zip(lacking, vectors, strict=True)
    return _picks([beam[0] for beam in beams], options)


def run(selection: Asking[T], reader: Searcher) -> T:
    """Answer what a selection asks, and return its result."""
    answer: Any = None
    while True:
        try:
            name, arguments = selection.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        answer = None if _unheeded(reader, name) else getattr(reader, name)(*arguments)


async def arun(selection: Asking[T], reader: AsyncReader) -> T:
    """`run` with a reader that is awaited."""
    answer: Any = None
    while True:
        try:
            name, arguments = selection.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        answer = None if _unheeded(reader, name) else await getattr(reader, name)(*arguments)


def _unheeded(reader: Searcher | AsyncReader, name: str) -> bool:
    return name == "advance" and not hasattr(reader, name)


def _states(
    queries: FloatArray, state: State[Any], sequences: Sequence[_Sequence], contexts: dict[int, FloatArray]
) -> FloatArray:
    """The vectors (R, D) of R sequences of equal length."""
    current = state.start(queries[[sequence.query for sequence in sequences]])
    for picks in zip(*(sequence.picks for sequence in sequences), strict=True):
        current = current.update(np.stack([contexts[key] for key in picks]))
    vectors: FloatArray = current.vector()
    return vectors


def _candidates(states: FloatArray, sequences: Sequence[_Sequence], options: Options) -> Asking[list[_Found]]:
    """The best `beam_width` candidates of each sequence that the constraints allow; fewer where there are no more."""
    width = options.beam_width
    if not options.constraints:
        keys, logits = yield "search", (states, width, [_keys(sequence.picks) for sequence in sequences])
        return [
            _Found(row[row >= 0].tolist(), values[row >= 0].tolist(), [None] * int((row >= 0).sum()))
            for row, values in zip(keys, logits, strict=True)
        ]
    found = yield from _allowed(states, sequences, options.constraints, width)
    short = [at for at, one in enumerate(found) if not one.keys]
    hard = tuple(constraint for constraint in options.constraints if not constraint.soft)
    if short and len(hard) < len(options.constraints):
        again = yield from _allowed(states[short], [sequences[at] for at in short], hard, width)
        for at, one in zip(short, again, strict=True):
            found[at] = one
    return found


def _allowed(
    states: FloatArray, sequences: Sequence[_Sequence], constraints: Sequence[Constraint], width: int
) -> Asking[list[_Found]]:
    found = [_Found() for _ in sequences]
    seen = [_keys(sequence.picks) for sequence in sequences]
    open_, fetch = list(range(len(sequences))), max(_SHORTLIST, 2 * width)
    while open_:
        keys, logits = yield "search", (states[open_], fetch, [seen[at] for at in open_])
        distinct = np.unique(keys[keys >= 0])
        rows = dict(zip(distinct.tolist(), (yield "rows", (distinct,)), strict=True)) if len(distinct) else {}
        still = []
        for at, row_keys, row_logits in zip(open_, keys.tolist(), logits.tolist(), strict=True):
            one = found[at]
            for key, logit in zip(row_keys, row_logits, strict=True):
                if key < 0 or len(one.keys) == width:
                    break
                row = rows[key]
                if all(constraint.allows(sequences[at].rows, row) for constraint in constraints):
                    one.keys.append(key)
                    one.logits.append(logit)
                    one.rows.append(row)
            if len(one.keys) < width and row_keys[-1] >= 0:
                seen[at] = np.concatenate([seen[at], _keys(row_keys)])
                still.append(at)
        open_, fetch = still, 4 * fetch
    return found


def _grown(
    at: int, sequence: _Sequence, found: _Found, total: float, options: Options
) -> Generator[_Sequence, None, None]:
    """The sequence with each candidate that may follow; itself, ended, where none may."""
    grown = 0
    for key, logit, row in zip(found.keys, found.logits, found.rows, strict=True):
        # Above 0 where the total is over the best candidates alone, or by rounding.
        log_prob = min(0.0, logit / options.tau - total) if options.scored else 0.0
        if (options.stop_early and logit <= 0) or np.exp(log_prob) < options.min_probability:
            continue
        grown += 1
        yield sequence.with_pick(key, logit, log_prob, row, at)
    if not grown:
        yield sequence.end()


def _best(beam: list[_Sequence], width: int) -> list[_Sequence]:
    """The best sequences of one query: longest first, then most probable; one for each set of picks."""
    ranked = sorted(beam, key=lambda sequence: (-len(sequence.picks), -sequence.score))
    distinct: dict[frozenset[int], _Sequence] = {}
    for sequence in ranked:
        distinct.setdefault(frozenset(sequence.picks), sequence)
    return list(distinct.values())[:width]


def _picks(sequences: Sequence[_Sequence], options: Options) -> Picks:
    k = options.k
    positions = np.full((len(sequences), k), -1, dtype=np.int64)
    logits = np.full((len(sequences), k), -np.inf, dtype=np.float32)
    probabilities = np.full((len(sequences), k), np.nan)
    for at, sequence in enumerate(sequences):
        length = len(sequence.picks)
        positions[at, :length] = sequence.picks
        logits[at, :length] = sequence.logits
        if options.scored:
            probabilities[at, :length] = np.exp(sequence.log_probs)
    return Picks(positions, logits, probabilities)


def _keys(keys: Sequence[int]) -> IntArray:
    return np.array(keys, dtype=np.int64)


def _positions(row: Collection[int]) -> IntArray:
    return np.unique(np.fromiter(row, dtype=np.int64, count=len(row)))


def _check(k: int, size: int, batch: int, barred: Sequence[IntArray]) -> None:
    if len(barred) != batch:
        msg = f"exclude has {len(barred)} rows for {batch} queries"
        raise InputError(msg)
    if k < 1:
        msg = f"k must be at least 1, not {k}"
        raise InputError(msg)
    outside = next((n for n, row in enumerate(barred) if len(row) and not 0 <= row[0] <= row[-1] < size), None)
    if outside is not None:
        msg = f"exclude[{outside}] names a position outside the pool of {size}"
        raise InputError(msg)
    fewest = size - max((len(row) for row in barred), default=0)
    if batch and k > fewest:
        msg = f"k = {k} examples asked for, but the pool offers only {fewest}"
        raise InputError(msg)
