"""The pool as two matrices in memory: exact search by one matrix product a step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import TIE, FloatArray, Follows, IntArray, PoolVectors, Search
from langchain_rcr.index.growing import Growing
from langchain_rcr.index.local import LocalIndex

_BLOCK = 1 << 26
"""Scores held at once (256 MiB of float32): queries are searched in blocks of this many scores."""

_FEW = 4
"""Up to so many candidates a row are found one after the other; more by a partition of the row."""

CROSS_LIMIT = 4096
"""Pools up to this size keep the rows of E_c·E_zᵀ that were needed once (64 MiB of float32 at most)."""


class MatrixTable:
    """Exact MIPS over (N, D) matrices, as a `Searcher` whose keys are row numbers. Never changes; safe from threads.

    `search` is `best` of `scores` with `slack`. Where `cross` has rows, the scores after a pick need no product:
    `scores(state + λ·E_z[key]) = scores(state) + λ·cross(key)`, with the slack `slack(state) + |λ|·slack(E_z[key])`.

    Args:
        vectors: the pool's E_c and E_z; taken over, not copied.
    """

    def __init__(self, vectors: PoolVectors) -> None:
        self._candidate = Growing(vectors.candidate)
        self._context = Growing(vectors.context)
        self._longest = longest(vectors.candidate)
        self._barred: NDArray[np.bool_] | None = None
        self._size = len(vectors.candidate)
        self._cross = self._new_cross()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cross": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cross = self._new_cross()

    def __len__(self) -> int:
        return len(self._candidate)

    @property
    def size(self) -> int:
        """How many candidates can be found."""
        return self._size

    def extended(self, vectors: PoolVectors) -> MatrixTable:
        """This table with more rows, which can all be found; the matrices are copied only when they outgrow memory.

        One thread at a time may extend; see `Growing`.
        """
        table = copy.copy(self)
        table._candidate = self._candidate.extended(vectors.candidate)
        table._context = self._context.extended(vectors.context)
        table._longest = float(np.maximum(self._longest, longest(vectors.candidate)))
        table._size = self._size + len(vectors.candidate)
        if self._barred is not None:
            table._barred = np.concatenate([self._barred, np.zeros(len(vectors.candidate), dtype=bool)])
        table._cross = table._new_cross()
        return table

    def allowing(self, allowed: NDArray[np.bool_]) -> MatrixTable:
        """This table where nothing but the rows with `allowed` (N,) can be found."""
        table = copy.copy(self)
        table._cross = self._cross
        table._barred = ~allowed
        table._size = int(np.count_nonzero(allowed))
        return table

    def search(self, states: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
        """The t best candidates for each state; see `Search`.

        Raises:
            InputError: a state or a candidate is not finite.
        """
        keys = np.full((len(states), t), -1, dtype=np.int64)
        logits = np.full((len(states), t), -np.inf, dtype=np.float32)
        slack = self.slack(states)
        for block in blocks(len(states), len(self)):
            keys[block], logits[block] = best(self.scores(states[block]), slack[block], t, exclude[block])
        return keys, logits

    def scores(self, states: FloatArray) -> FloatArray:
        """All logits of (B, D) states at once, (B, N) float32; −inf for rows that can't be found."""
        scores: FloatArray = states @ self._candidate.rows.T
        if self._barred is not None:
            np.copyto(scores, -np.inf, where=self._barred)
        return scores

    def slack(self, states: FloatArray) -> FloatArray:
        """How far apart a state's equal logits may lie (see `TIE`), (B,) float32.

        Raises:
            InputError: a state or a candidate is not finite.
        """
        return slack(states, self._longest)

    def cross(self, keys: IntArray) -> FloatArray | None:
        """E_c·E_z[key] for each of (B,) keys: (B, N) float32, rows that can't be found included.

        A row is made when its key is first asked for and kept. None where the pool is above `CROSS_LIMIT`.
        """
        return None if self._cross is None else self._cross.rows(keys)

    def opened(self) -> MatrixSteps:
        """This table for one selection."""
        return MatrixSteps(self)

    def vectors(self, keys: IntArray) -> FloatArray:
        """E_z (B, D) of the rows `keys` (B,)."""
        return self._context.rows[keys]

    def candidates(self, keys: IntArray) -> FloatArray:
        """E_c (B, D) of the rows `keys` (B,)."""
        return self._candidate.rows[keys]

    def log_partition(self, states: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
        """Log Σ exp(logit / τ) over all candidates that aren't excluded, exact; see `Searcher.log_partition`."""
        totals = np.empty(len(states))
        for block in blocks(len(states), len(self)):
            totals[block] = log_sums(self.scores(states[block]), tau, exclude[block])
        return totals

    def _new_cross(self) -> _Cross | None:
        return _Cross(self._candidate.rows, self._context.rows) if len(self) <= CROSS_LIMIT else None


class MatrixSteps:
    """A table for the steps of one selection: the scores of a step serve its search and its partition alike.

    Where a step's states follow from the last ones, they also serve that step, which then needs no product. For one
    thread.

    Args:
        table: what is searched.
    """

    def __init__(self, table: MatrixTable) -> None:
        self._table = table
        self._last: tuple[FloatArray, FloatArray] | None = None

    def found(self, search: Search) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """Keys (B, t), logits (B, t) and, where there is a τ, log partitions (B,); see `MatrixTable.search`."""
        states, t, exclude, tau = search.states, search.t, search.exclude, search.tau
        if len(states) * len(self._table) > _BLOCK:
            self._last = None
            totals = None if tau is None else self._table.log_partition(states, tau, exclude)
            return *self._table.search(states, t, exclude), totals
        self._last = scores, margin = self._scored(states, search.follows)
        keys, logits = best(scores, margin, t, exclude)
        return keys, logits, None if tau is None else log_sums(scores.copy(), tau, exclude)

    def _scored(self, states: FloatArray, follows: Follows | None) -> tuple[FloatArray, FloatArray]:
        """Scores (B, N) and slack (B,)."""
        if follows is not None and self._last is not None:
            scores, margin = self._last
            cross = self._table.cross(follows.keys)
            if cross is not None:
                added = self._table.slack(self._table.vectors(follows.keys))
                scores = scores[follows.parents] + np.float32(follows.lam) * cross
                return scores, margin[follows.parents] + abs(follows.lam) * added
        return self._table.scores(states), self._table.slack(states)


class _Cross:
    """Rows of E_z·E_cᵀ (N, N), made one by one when asked for: a pool that changes often never pays for all."""

    def __init__(self, candidate: FloatArray, context: FloatArray) -> None:
        self._candidate, self._context = candidate, context
        self._rows: FloatArray | None = None
        self._made = np.zeros(len(candidate), dtype=bool)
        self._lock = threading.Lock()

    def rows(self, keys: IntArray) -> FloatArray:
        if self._rows is None or not self._made[keys].all():
            with self._lock:
                if self._rows is None:
                    self._rows = np.empty((len(self._candidate),) * 2, dtype=np.float32)
                lacking = np.unique(keys[~self._made[keys]])
                self._rows[lacking] = self._context[lacking] @ self._candidate.T
                self._made[lacking] = True
        return self._rows[keys]


def best(scores: FloatArray, slack: FloatArray, t: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray]:
    """The t best columns of each row of scores.

    Args:
        scores: (B, N) float32; −inf for what may not be found. Written to meanwhile, and restored.
        slack: (B,) how far below a row's best a score still counts as the same; of these the lowest column wins.
        t: how many.
        exclude: for each row columns to leave out; numbers that are no column are ignored.

    Returns:
        Columns (B, t) int64 and their scores (B, t) float32, best first; −1 and −inf where nothing is left.
    """
    rows, columns = _places(exclude, scores.shape[1])
    hidden = scores[rows, columns]
    scores[rows, columns] = -np.inf
    found = _one_by_one if t <= _FEW else _by_partition
    keys, logits = found(scores, slack, t)
    scores[rows, columns] = hidden
    return keys, logits


def first_best(scores: FloatArray, slack: FloatArray) -> IntArray:
    """The lowest position among each row's best scores.

    Args:
        scores: (B, N) float32; −inf for what may not be found.
        slack: (B,) how far below a row's best a score still counts as the same.

    Returns:
        (B,) int64.
    """
    floor = scores.max(axis=1) - slack
    first: IntArray = (scores >= floor[:, None]).argmax(axis=1)
    return first


def in_order(keys: IntArray, scores: FloatArray, slack: float, t: int) -> tuple[IntArray, FloatArray]:
    """The t best of one row's candidates, as `best` orders them; fewer where there are fewer.

    Args:
        keys: (W,) in any order, each once.
        scores: (W,) float32 of each, finite.
        slack: how far below the best that is left a score still counts as the same.
        t: how many.
    """
    order = np.lexsort((keys, -scores))
    keys, scores = keys[order], scores[order]
    if (scores[:-1] - scores[1:] > slack)[:t].all():
        return keys[:t], scores[:t]
    order = np.argsort(keys)
    keys, left = keys[order], scores[order].copy()
    scores = scores[:t].copy()
    at = np.empty(len(scores), dtype=np.int64)
    for step in range(len(scores)):
        at[step] = (left >= left.max() - slack).argmax()
        scores[step] = left[at[step]]
        left[at[step]] = -np.inf
    return keys[at], scores


def slack(states: FloatArray, longest: float) -> FloatArray:
    """How far apart equal logits of each state may lie, (B,) float32; `longest` is max |E_c|.

    Raises:
        InputError: a state or a candidate is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        margin: FloatArray = TIE * longest * np.linalg.norm(states, axis=1)
    if not np.isfinite(margin).all():
        msg = "vectors of queries or examples are not finite numbers: the encoder or its embeddings are broken"
        raise InputError(msg)
    return margin


def log_sums(scores: FloatArray, tau: float, exclude: Sequence[IntArray]) -> NDArray[np.float64]:
    """Log Σ exp(score / τ) of each row of (B, N) scores without the excluded columns, (B,); overwrites the scores."""
    if not scores.shape[1]:
        return np.full(len(scores), -np.inf)
    rows, columns = _places(exclude, scores.shape[1])
    scores[rows, columns] = -np.inf
    top = scores.max(axis=1)
    shift = np.where(np.isfinite(top), top, np.float32(0.0))
    scores -= shift[:, None]
    scores /= np.float32(tau)
    np.exp(scores, out=scores)
    with np.errstate(divide="ignore"):
        total: NDArray[np.float64] = np.log(scores.sum(axis=1, dtype=np.float64)) + shift.astype(np.float64) / tau
    return total


def longest(vectors: FloatArray) -> float:
    """The largest length of (N, D) vectors; NaN where one is not finite."""
    return float(np.sqrt(np.einsum("nd,nd->n", vectors, vectors).max(initial=0.0)))


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of `rows` rows, each with at most `_BLOCK` scores (or one row)."""
    height = max(1, _BLOCK // max(1, columns))
    return (slice(start, start + height) for start in range(0, rows, height))


def _places(exclude: Sequence[IntArray], columns: int) -> tuple[IntArray, IntArray]:
    """Row and column of every excluded score."""
    counts = [len(row) for row in exclude]
    if not sum(counts):
        return (np.empty(0, dtype=np.int64),) * 2
    rows, places = np.repeat(np.arange(len(counts)), counts), np.concatenate(exclude).astype(np.int64)
    there = (places >= 0) & (places < columns)
    return rows[there], places[there]


def _nothing(rows: int, t: int) -> tuple[IntArray, FloatArray]:
    return np.full((rows, t), -1, dtype=np.int64), np.full((rows, t), -np.inf, dtype=np.float32)


def _one_by_one(scores: FloatArray, slack: FloatArray, t: int) -> tuple[IntArray, FloatArray]:
    keys, logits = _nothing(len(scores), t)
    every = np.arange(len(scores))
    for column in range(min(t, scores.shape[1])):
        first = first_best(scores, slack)
        value = scores[every, first]
        found = value > -np.inf
        keys[found, column], logits[found, column] = first[found], value[found]
        scores[every, first] = -np.inf
    rows, columns = np.nonzero(keys >= 0)
    scores[rows, keys[rows, columns]] = logits[rows, columns]
    return keys, logits


def _by_partition(scores: FloatArray, slack: FloatArray, t: int) -> tuple[IntArray, FloatArray]:
    """Every pick lies within the slack of the t-th largest score or above it: the rest needs no look."""
    keys, logits = _nothing(len(scores), t)
    at = max(0, scores.shape[1] - t)
    floor = np.partition(scores, at, axis=1)[:, at] - slack if scores.shape[1] else slack
    for row, values in enumerate(scores):
        near = np.flatnonzero((values >= floor[row]) & (values > -np.inf))
        found, value = in_order(near, values[near], float(slack[row]), t)
        keys[row, : len(found)], logits[row, : len(found)] = found, value
    return keys, logits


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the engine where none is named."""

    def _table(self, vectors: PoolVectors) -> MatrixTable:
        return MatrixTable(vectors)
