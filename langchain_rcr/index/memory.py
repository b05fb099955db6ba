"""The pool as matrices in memory, dense or sparse: search by one product per step, or by a few columns."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Self

import numpy as np

from langchain_rcr.basics.rows import LARGE, TRIALS, FloatArray, Growing, IntArray, SparseRows, product, taken
from langchain_rcr.index.base import BEST, PoolVectors, Row
from langchain_rcr.index.local import LocalIndex, Table
from langchain_rcr.index.ranking import (
    Near,
    Ranked,
    best,
    best_of,
    blocks,
    in_order,
    log_sums,
    near_best,
    nothing,
    slack,
)

_LOOKED_AT = (64, 1024)
"""How many rows of a large dense pool are examined closely, in two attempts; if they don't settle which is best, all
rows are."""
_AT_ONCE = 4096
"""Rows rounded at a time."""
_MOST = 127
"""The largest whole number in 8 bits."""
_FEW = 3
"""Up to this many states, screening one by one (`Coarse`) is faster than multiplying them together."""
_READ = 0.3
"""Numbers that a step reads per row of the pool, out of about 40 in a row."""
_SAMPLED = 64
"""Roughly which rows are the best `BEST` is estimated from a sample of one row in this many. The picks' logits sum to
about 0.4 % less than exact picks' (trials: a million drawn examples, 60,000 of COVR's)."""
_RARE = 10
"""If fewer than one row in ten can be found, these are taken out for a selection, and all of them are looked at."""


class MatrixTable(Table):
    """Exact search of (N, D) matrices; see `Table`. A step's scores serve both its search and its partition."""

    _screens = False
    """In a large dense table that is `opened`: whether to screen candidates with rounded rows."""
    _steps: _Steps | None = None
    """In a large sparse table that is `opened`: the scores of the last step."""
    _part: tuple[MatrixTable, IntArray] | None = None
    """In a table that is `opened`, if few rows can be found: a table of these alone, and their keys."""

    def __init__(self, vectors: PoolVectors, rows: Iterable[Row] = ()) -> None:
        super().__init__(vectors, rows)
        self._candidate, self._coarse = Growing(vectors.candidate), Coarse()

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table = super().extended(vectors)
        table._candidate, table._coarse = self._candidate.extended(vectors.candidate), Coarse()
        return table

    def opened(self) -> Self:
        """See `Table.opened`."""
        rows = self._candidate.rows
        if 0 < _RARE * self.size < len(self):
            keys = np.flatnonzero(self.allowed)
            few = taken(rows, keys)
            part = MatrixTable(PoolVectors(few, few))._with(_longest=self._longest)
            return self._with(_part=(part, keys))
        if isinstance(rows, SparseRows):
            return self._with(_steps=_Steps(rows)) if rows.worth_following() else self
        return self._with(_screens=True) if rows.size >= LARGE and np.isfinite(self._longest) else self

    def found(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Ranked:
        """See `Table.found`."""
        if self._part is not None:
            part, of = self._part
            places, logits, sums = part.found(states, t, np.searchsorted(of, exclude), tau)
            return np.where(places < 0, places, of[places]), logits, sums
        parts = [*blocks(len(states), len(self))] if len(states) > 1 else []
        if len(parts) > 1:
            plain = self._with(_steps=None)  # it only remembers one block
            found = [MatrixTable.found(plain, states[some], t, exclude[some], tau) for some in parts]
            every, theirs, totals = zip(*found, strict=True)
            return np.concatenate(every), np.concatenate(theirs), None if tau is None else np.concatenate(totals)
        margin = slack(states, self._longest)
        if not (len(states) and len(self)):
            return *nothing(len(states), t), None if tau is None else np.full(len(states), -np.inf)
        if tau is None and self._screens and len(states) <= _FEW:
            screened = self._screened(states, t, exclude, margin)
            if screened is not None:
                return *screened, None
        scores = product(states, self._candidate.rows) if self._steps is None else self._steps.scores(states)
        if self.size < len(self):
            np.copyto(scores, -np.inf, where=~self.allowed)
        for line, barred in zip(scores, exclude, strict=True):
            line[barred] = -np.inf
        find = best if self._steps is None else self._steps.best
        keys, logits = find(scores, margin, t)
        return keys, logits, None if tau is None else log_sums(scores, tau)

    def _screened(self, states: FloatArray, t: int, exclude: IntArray, margin: FloatArray) -> Near | None:
        """Keys and logits (B, t), if an 8-bit scan shows which few rows can be the best."""
        rows = self._candidate.rows
        if isinstance(rows, SparseRows) or not self._coarse.ready(rows):
            self._screens = False
            return None
        keys, logits = nothing(len(states), t)
        for at, state in enumerate(states):
            for count in _LOOKED_AT:
                near, ceiling = self._coarse.nearest(state, count)
                near = near[~np.isin(near, exclude[at]) & self.allowed[near]]
                found, values = in_order(near, rows[near] @ state, float(margin[at]), t)
                if len(found) == t and values.min() - margin[at] > ceiling:
                    keys[at], logits[at] = found, values
                    break
            else:
                return None
        return keys, logits

    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """See `Table.pool_vectors`; not copied if all are asked for."""
        every = PoolVectors(self._candidate.rows, self._context.rows)
        return every if np.array_equal(keys, np.arange(len(self))) else every.take(keys)


class ColumnTable(MatrixTable):
    """Approximate search of large sparse matrices (N, D), exact search of others. See `Table`.

    The few columns in which a state is largest make up most of the best rows' logits, so these are read first. The
    rows that are best by them are then looked at in full (after Turtle and Flood, "Query evaluation: strategies and
    optimizations", 1995, without the proof that no other row is better). Partitions sum over these rows.
    """

    def found(self, states: FloatArray, t: int, exclude: IntArray, tau: float | None = None) -> Ranked:
        """See `Table.found`."""
        rows = self._candidate.rows
        if self._steps is None or not isinstance(rows, SparseRows):
            return super().found(states, t, exclude, tau)
        (keys, logits), totals = nothing(len(states), t), np.full(len(states), -np.inf)
        margin, short = slack(states, self._longest), list[int]()
        for at, state in enumerate(states):
            near = self._near(rows, state, max(BEST, 4 * t))
            near = near[~np.isin(near, exclude[at])]
            values = product(state[None], rows.select(near))[0]
            if np.count_nonzero(values > 0) < t:  # what is needed is too rare, or too frequent to be read
                short.append(at)
                continue
            keys[at], logits[at] = in_order(near, values, float(margin[at]), t)
            if tau is not None:
                totals[at] = log_sums(values[None], tau)[0]
        if short:
            keys[short], logits[short], others = super().found(states[short], t, exclude[short], tau)
            totals[short] = totals[short] if others is None else others
        return keys, logits, None if tau is None else totals

    def _near(self, rows: SparseRows, state: FloatArray, count: int) -> IntArray:
        """Keys of roughly the `count` best rows by the state's largest columns."""
        scores = rows.partly(state, int(_READ * len(rows)))
        if self.size < len(self):
            scores *= self.allowed
        some = scores[:: max(1, min(_SAMPLED, len(rows) // count))]
        best = np.sort(some[some > 0])[-max(1, count * len(some) // len(rows)) :]
        return np.flatnonzero(scores >= best[0]) if len(best) else np.empty(0, dtype=np.int64)


class Coarse:
    """A large matrix in 8 bits: tells which few rows can be the best for a state in a quarter of the time.

    With c = ĉ + e and s = ŝ + f, where ĉ and ŝ are rounded, c · s is at most |e| |s| + |ĉ| |f| away from ĉ · ŝ.

    Rows are rounded once they are asked for more than `TRIALS` times: rounding costs as much as about ten questions
    save, and a pool that changes with each call would pay it each time. FAISS, from an extra, keeps and scans the
    rounded rows; without it there are none. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock, self._asked, self._held = threading.Lock(), 0, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def ready(self, rows: FloatArray) -> bool:
        """Whether `nearest` can be called; may round the finite rows (N, D), which must be the same in each call."""
        if not self._held and self._lock.acquire(blocking=False):
            try:
                self._asked += 1
                if self._asked > TRIALS and not self._held and find_spec("faiss") is not None:
                    self._round(rows)
                    self._held = True
            finally:
                self._lock.release()
        return self._held

    def _round(self, rows: FloatArray) -> None:
        import faiss

        self._index = faiss.IndexScalarQuantizer(
            rows.shape[1], faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT
        )
        self._unit = _unit(rows)
        squares = lengths = 0.0
        for first in range(0, len(rows), _AT_ONCE):
            part = rows[first : first + _AT_ONCE]
            codes = np.rint(part / self._unit)
            self._index.add(codes)
            near = codes * self._unit
            squares = max(squares, np.square(part - near).sum(axis=1).max(initial=0))
            lengths = max(lengths, np.square(near).sum(axis=1).max(initial=0))
        self._error, self._longest = np.sqrt(squares), np.sqrt(lengths)

    def nearest(self, state: FloatArray, count: int) -> tuple[IntArray, float]:
        """Keys (M,) of the `count` rows that seem best for a state (D,), and a bound on the other rows' logits."""
        unit = _unit(state)
        codes = np.rint(state / unit)
        off = self._error * np.linalg.norm(state) + self._longest * np.linalg.norm(state - codes * unit)
        scores, keys = self._index.search(codes[None], count)
        found: IntArray = keys[0][keys[0] >= 0]
        return found, float(scores[0, -1] * (self._unit * unit) + off) if len(found) == count else -np.inf


def _unit(numbers: FloatArray) -> np.float32:
    """The value of one unit of the rounded numbers."""
    return np.float32(np.abs(numbers).max(initial=0) / _MOST or 1)


class _Steps:
    """The logits of a large sparse pool, from step to step of one selection.

    A step changes a state in the pick's columns. Few rows have these, and only their logits are updated. As this lets
    rounding errors add up, the best rows' logits are then recomputed.
    """

    def __init__(self, rows: SparseRows) -> None:
        self._rows = rows
        self._states, self._kept = np.empty((0, rows.dim), dtype=np.float32), np.empty((0, 0), dtype=np.float32)
        self._taken = 0  # steps since all logits were computed

    def scores(self, states: FloatArray) -> FloatArray:
        """All logits (B, N), up to rounding errors; a copy."""
        if self._states.shape == states.shape:
            for line, change in zip(self._kept, states - self._states, strict=True):
                self._rows.follow(line, change)
            self._taken += 1
        else:
            self._kept, self._taken = product(states, self._rows), 0
        self._states = states
        return self._kept.copy()

    def best(self, scores: FloatArray, slack: FloatArray, t: int) -> Near:
        if not self._taken:
            self._rounding = float(slack.max())
        off = slack + np.float32(2 * self._taken * self._rounding)
        each = zip(near_best(scores, off, t), self._states, strict=True)
        return best_of(((near, self._rows.dots(near, state)) for (near, _), state in each), slack, t)


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the default engine."""

    def _table(self, vectors: PoolVectors, rows: Iterable[Row]) -> MatrixTable:
        return MatrixTable(vectors, rows)
