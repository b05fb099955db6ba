"""The step-by-step loop: each pick is one inner-product search with a state made of the picks before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import BoolArray, DoubleArray, FloatArray, IntArray
from langchain_rcr.families.state import State
from langchain_rcr.index.base import Hits, InThisThread, PoolVectors, Reader, Row
from langchain_rcr.index.filters import Filter
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import checked_exclude, filled, nothing

_SHORTLIST = 8
"""Candidates looked at for one that a constraint allows, before more are fetched."""
EXPLORED = 128
"""How many of the best candidates a pick is drawn from. With 32, one question in eight had a pick that a slightly
changed policy makes but that couldn't be drawn; with 128, one in twenty (COVR's split 110, at `explore` 10)."""
_LEAST = np.finfo(np.float64).min
"""Replaces −∞, which can't be subtracted from itself."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a selection goes."""

    k: int  # picks per query
    beam_width: int = 1  # sequences kept per query; 1: greedy decoding (section 3.2)
    tau: float = 1.0  # τ of π = softmax(logits / τ)
    probabilities: bool = False  # compute π of every pick, over the candidates left at its step; beams always do
    stop_early: bool = False  # end a sequence when the next pick's logit is not above 0, as it gains nothing
    different_programs: bool = False  # no two picks have the same `Row.program` while others are left
    fits: Callable[[Sequence[Row]], bool] | None = None  # whether examples may be picked together; may be slow
    k_min: int = 0  # fewer picks than this are an error (`Served` says so)
    explore: float = 0.0
    """Draw each pick from softmax(logits / (explore · τ)) over the `EXPLORED` best candidates, and give its probability
    there; 0: always pick the best. Not with beams."""
    random: np.random.Generator | None = None  # draws
    where: Filter | None = None  # which examples `Served` may pick from
    min_relevance: float = 0.0  # `Served` picks nothing for questions below it; see `Encoder.relevance`
    home: str = ""  # the questions' `Item.home`, for `Served`

    @property
    def scored(self) -> bool:
        """Whether probabilities over all remaining candidates are needed."""
        return (self.probabilities and not self.explore) or self.beam_width > 1

    @property
    def width(self) -> int:
        """How many candidates a step looks at for each sequence."""
        return EXPLORED if self.explore else self.beam_width


@dataclass(slots=True)
class Picks:
    """What was picked for B queries; −1, −inf and NaN where a query's sequence had already ended."""

    positions: IntArray  # (B, k) the key of each pick (the pool position, for a matrix)
    logits: FloatArray  # (B, k) the pick's logit (Eq. 4) in the state it was picked in
    probabilities: DoubleArray  # (B, k) π of the pick among what was left, or of its draw; NaN if not requested
    rows: Mapping[int, Row] | Sequence[Row] = ()  # the examples picked, by key; `greedy` has none

    @classmethod
    def none(cls, batch: int, k: int) -> Picks:
        """Nothing picked yet."""
        return cls(*nothing(batch, k), filled((batch, k), np.nan))

    @property
    def examples(self) -> list[list[Row]]:
        """The examples picked for each query."""
        return [[self.rows[key] for key in keys if key >= 0] for keys in self.positions.tolist()]


class _Beams:
    """The sequences still growing: R of equal length, grouped by query, best first."""

    def __init__(self, state: State[Any], k: int, exclude: IntArray) -> None:
        count, self._first = exclude.shape
        self.state, self.query, self.length = state, np.arange(count), 0
        self._keys = filled((count, self._first + k), -1, np.int64)
        self._keys[:, : self._first] = exclude
        self.logits, self.log_probs = filled((count, k), -np.inf, np.float32), filled((count, k), np.nan)
        """(R, k) log π of the picks; NaN if not needed, and for later ones."""

    @property
    def exclude(self) -> IntArray:
        """(R, E + length) what may not be picked next: what was excluded from the start, then the picks."""
        return self._keys[:, : self._first + self.length]

    @property
    def keys(self) -> IntArray:
        """(R, length) the picks."""
        return self.exclude[:, self._first :]

    def keep(self, at: IntArray) -> None:
        """Go on with some of the sequences (M,)."""
        self.query, self.state, self._keys = self.query[at], self.state.take(at), self._keys[at]
        self.logits, self.log_probs = self.logits[at], self.log_probs[at]

    def grow(self, keys: IntArray, logits: FloatArray, log_probs: DoubleArray) -> None:
        """Add a pick to each (R,)."""
        self._keys[:, self._first + self.length], self.logits[:, self.length] = keys, logits
        self.log_probs[:, self.length] = log_probs
        self.length += 1

    @property
    def picks(self) -> Picks:
        """The picks of each (R, k)."""
        return Picks(self._keys[:, self._first :], self.logits, np.exp(self.log_probs))

    def end(self, queries: IntArray, picks: Picks) -> None:
        """Record the best sequence of each of these queries."""
        at, mine = np.searchsorted(self.query, queries), self.picks
        picks.positions[queries], picks.logits[queries] = mine.positions[at], mine.logits[at]
        picks.probabilities[queries] = mine.probabilities[at]


def greedy(
    queries: FloatArray,
    pool: PoolVectors | MatrixTable,
    state: State[Any],
    k: int,
    *,
    exclude: Sequence[Collection[int]] | None = None,
) -> Picks:
    """Greedy decoding of the policy (section 3.2): every step takes the candidate with the largest logit.

    As `select`, from E_x of the queries (B, D) and the pool's vectors or a table of them; `exclude` has for each query
    the pool positions that it must not get (itself, for a training query).

    Raises:
        InputError: k is not positive, a query has fewer than k candidates left, or a position is outside the pool.
    """
    table = MatrixTable(pool) if isinstance(pool, PoolVectors) else pool
    barred = checked_exclude(exclude, len(queries), table.size, k)
    picks = Picks.none(len(queries), k)
    lengths = np.array([len(keys) for keys in barred])
    for length in np.unique(lengths):
        some = np.flatnonzero(lengths == length)
        keys = np.array([barred[at] for at in some])
        found = InThisThread().run(select(queries[some], state, Options(k), table.opened(), keys))
        picks.positions[some], picks.logits[some] = found.positions, found.logits
    return picks


async def select(
    queries: FloatArray, state: State[Any], options: Options, reader: Reader, exclude: IntArray | None = None
) -> Picks:
    """Pick examples for B queries together: every step is one search for all their sequences.

    Args:
        queries: E_x of the queries, (B, D) float32.
        state: how picks compose (its `start` is called here).
        options: k, beams, stopping, what may be picked together.
        reader: the pool; see `CandidateIndex.run` for where to await this.
        exclude: (B, E) keys that each query must not get.

    Returns:
        Picks of up to k distinct candidates per query. Beams return the longest sequence, and of several the one with
        the largest Π π. Of sequences with the same picks in different orders, only the most probable is kept.
    """
    count = len(queries)
    picks: Picks | None = None
    exclude = np.empty((count, 0), dtype=np.int64) if exclude is None else exclude
    beams = _Beams(state.start(queries), options.k, exclude)
    width, tau = options.beam_width, options.tau if options.scored else None
    constrained = options.different_programs or options.fits is not None
    hits: Hits | None = None
    ahead = list[Hits]()
    if width == 1 and not (constrained or options.explore) and hasattr(reader, "ahead"):
        ahead = await reader.ahead(beams.state, options.k, exclude, tau)
    for _ in range(options.k):
        if hits is not None:
            beams.state = beams.state.update(hits.contexts(beams.exclude[:, -1]))
        if constrained:
            hits = await _candidates(beams, options, reader, tau)
        elif ahead:
            hits = ahead.pop(0)
        else:
            hits = await reader.search(beams.state.vector(), options.width, beams.exclude, tau)
        log_probs, grows = _judged(hits, options)
        if options.random is not None:
            hits, log_probs, grows = _drawn(hits, grows, options.explore * options.tau, options.random)
        if width == 1 and np.count_nonzero(grows) == len(grows):  # the usual case, faster
            beams.grow(hits.keys[:, 0], hits.logits[:, 0], log_probs[:, 0])
            continue
        ahead = []  # what was found as if every sequence went on
        picks = picks or Picks.none(count, options.k)
        at, of = _best(beams, hits, log_probs, grows, width)
        beams.end(np.setdiff1d(beams.query, beams.query[at]), picks)
        beams.keep(at)
        if not len(at):
            break
        beams.grow(hits.keys[at, of], hits.logits[at, of], log_probs[at, of])
    if picks is None:
        picks = beams.picks
    else:
        beams.end(beams.query if width == 1 else np.unique(beams.query), picks)
    picks.rows = () if hits is None else hits.rows
    return picks


async def _candidates(beams: _Beams, options: Options, reader: Reader, tau: float | None) -> Hits:
    """For each sequence the best candidates that may follow its picks, as many as a step looks at.

    If no candidate that fits has another program, the others that fit take their place.
    """
    states, width = beams.state.vector(), options.width
    found = [dict[int, float]() for _ in states]
    spare = [dict[int, float]() for _ in states]

    def judge(hits: Hits, left: IntArray) -> None:
        for at, keys, logits in zip(left.tolist(), hits.keys.tolist(), hits.logits.tolist(), strict=True):
            picked = [hits.rows[key] for key in beams.keys[at].tolist()]
            # One by one: `fits` calls a tokenizer, which should see no more than it must.
            for key, logit in zip(keys, logits, strict=True):
                if key < 0 or len(found[at]) == width:
                    break
                row = hits.rows[key]
                repeats = options.different_programs and any(row.program == one.program for one in picked)
                into = spare[at] if repeats else found[at]
                if len(into) < width and (options.fits is None or options.fits([*picked, row])):
                    into[key] = logit

    left, seen, t = np.arange(len(states)), beams.exclude, max(_SHORTLIST, 2 * width)
    hits = first = await reader.search(states, t, seen, tau)
    while True:
        if options.fits is not None and hasattr(reader, "aside"):
            await reader.aside(judge, hits, left)
        else:
            judge(hits, left)
        more = [n for n, at in enumerate(left.tolist()) if len(found[at]) < width and hits.keys[n, -1] >= 0]
        if not more:
            break
        seen = np.concatenate((seen[more], hits.keys[more]), axis=1)
        left, t = left[more], 4 * t
        hits = await reader.search(states[left], t, seen)
    keys, logits = nothing(len(states), width)
    for at, some in enumerate(allowed or others for allowed, others in zip(found, spare, strict=True)):
        keys[at, : len(some)], logits[at, : len(some)] = list(some), list(some.values())
    return hits._replace(keys=keys, logits=logits, log_partition=first.log_partition)


def _judged(hits: Hits, options: Options) -> tuple[DoubleArray, BoolArray]:
    """Log π of each hit (R, t), NaN if not needed, and whether a sequence may continue with it (R, t)."""
    log_probs, grows = filled(hits.keys.shape, np.nan), hits.keys >= 0
    if hits.log_partition is not None:
        total = np.maximum(hits.log_partition, _LEAST)[:, None]
        # Could exceed 0 by rounding, or if the total covers only the best candidates.
        log_probs = np.minimum(0.0, hits.logits / np.float64(options.tau) - total)
    if options.stop_early:
        grows &= hits.logits > 0
    return log_probs, grows


def drawn_from(logits: NDArray[Any], tau: float | DoubleArray) -> DoubleArray:
    """Log-probabilities (R, t) of a draw: log softmax(logits / τ); −inf where none can be. τ may be (R, 1)."""
    scaled = logits / np.asarray(tau, dtype=np.float64)
    scaled -= np.maximum(scaled.max(axis=1, keepdims=True), _LEAST)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True)))


def _drawn(
    hits: Hits, grows: BoolArray, tau: float, random: np.random.Generator
) -> tuple[Hits, DoubleArray, BoolArray]:
    """Draw a hit per sequence (R, 1) from those it may continue with; its log-probability; whether there was one."""
    log_probs = drawn_from(np.where(grows, hits.logits, -np.inf), tau)
    # The argmax of log-probabilities plus Gumbel noise is a draw (Gumbel, 1954).
    at = (np.where(grows, log_probs, -np.inf) + random.gumbel(size=grows.shape)).argmax(axis=1)[:, None]
    keys, logits = np.take_along_axis(hits.keys, at, axis=1), np.take_along_axis(hits.logits, at, axis=1)
    drawn = hits._replace(keys=keys, logits=logits)
    return drawn, np.take_along_axis(log_probs, at, axis=1), np.take_along_axis(grows, at, axis=1)


def _best(beams: _Beams, hits: Hits, log_probs: DoubleArray, grows: BoolArray, width: int) -> tuple[IntArray, IntArray]:
    """The most probable sequences (M,) of each query after one more hit (M,); one for each set of picks."""
    at, of = np.nonzero(grows)
    keys, scores = hits.keys[at, of], beams.log_probs[:, : beams.length].sum(axis=1)[at] + log_probs[at, of]
    sets = defaultdict[int, set[frozenset[int]]](set)
    best = list[int]()
    for n in np.lexsort((-scores, beams.query[at])).tolist():
        there, picks = sets[int(beams.query[at[n]])], frozenset((*beams.keys[at[n]].tolist(), int(keys[n])))
        if len(there) < width and picks not in there:
            there.add(picks)
            best.append(n)
    return at[best], of[best]
