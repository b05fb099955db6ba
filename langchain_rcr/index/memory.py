"""The pool as matrices in memory, dense or sparse: exact search by one product a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.rows import LARGE, FloatArray, IntArray, SparseRows, growing, product
from langchain_rcr.index.base import PoolVectors, Search
from langchain_rcr.index.coarse import Coarse, CoarseProduct, CoarseScan, Near
from langchain_rcr.index.local import LocalIndex, Table
from langchain_rcr.index.ranking import best, blocks, first_best, log_sums, nothing, places, slack, slack_alone

_LOOKED_AT = (64, 1024)
"""Rows of a large dense pool that are looked at more closely; where they don't settle which is the best, all are."""
_FEW, _FEW_SCREENED, _FEW_SPARSE = 2, 3, 3
"""States that are faster followed one by one than together: in any pool, in a large dense one; those whose first logits
are faster found one by one in a large sparse one."""
_CACHED = 1 << 18
"""Numbers gathered at once: they stay in a core's cache while they are multiplied."""


class MatrixTable(Table):
    """Exact search of (N, D) matrices; see `Table`. The scores of a step serve its search and its partition."""

    def __init__(self, vectors: PoolVectors) -> None:
        super().__init__(vectors)
        self._candidate = growing(vectors.candidate)
        self._scan, self._product = CoarseScan(), CoarseProduct()

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table = super().extended(vectors)
        table._candidate = self._candidate.extended(vectors.candidate)
        table._scan, table._product = CoarseScan(), CoarseProduct()
        return table

    def found(self, search: Search) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """See `Table.found`."""
        states, exclude, tau = search.states, search.exclude, search.tau
        keys, logits = nothing(len(states), search.t)
        totals = None if tau is None else np.empty(len(states))
        margin = slack(states, self._longest)
        for block in blocks(len(states), len(self)):
            scores = self.scores(states[block])
            keys[block], logits[block] = best(scores, margin[block], search.t, exclude[block])
            if totals is not None and tau is not None:
                totals[block] = log_sums(scores, tau, exclude[block])
        return keys, logits, totals

    def scores(self, states: FloatArray) -> FloatArray:
        """All logits of (B, D) states at once, (B, N) float32; −inf for rows that can't be found."""
        scores = product(states, self._candidate.rows)
        if self._allowed is not None:
            np.copyto(scores, -np.inf, where=~self._allowed)
        return scores

    def first(
        self,
        states: FloatArray,
        exclude: Sequence[IntArray],
        masked: Sequence[IntArray],
        tau: float | None,
        *,
        rough: bool = False,
    ) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """The best candidate of each state: what `found` does for one, without what several need.

        Args:
            states: state vectors, (B, D) float32.
            exclude: for each state the rows that may not be found.
            masked: for each state rows that are found only where there is no other.
            tau: τ, where the log partition is wanted, too; masked rows are in it.
            rough: whether it may be off by some thousandth in a large dense pool.

        Returns:
            Keys (B,), logits (B,) and, where there is a τ, log partitions (B,). Each state must have a candidate.
        """
        margin = slack(states, self._longest)
        if (tau is None or rough) and self._screens(self._product):
            of = places(exclude, len(self)), places(masked, len(self))
            near = self._product.nearest(states, margin, *of, self._allowed, tau)
            if near is not None:
                return self._first_of(states, margin, near, tau)
        scores = self.scores(states)
        hidden = []
        for line, barred, others in zip(scores, exclude, masked, strict=True):
            line[barred] = -np.inf
            hidden.append(line[others])
            line[others] = -np.inf
        keys = first_best(scores, margin)
        logits = scores[np.arange(len(keys)), keys]
        for row in np.flatnonzero(logits == -np.inf).tolist():
            scores[row, masked[row]] = hidden[row]
            keys[row] = first_best(scores[row : row + 1], margin[row : row + 1])[0]
            logits[row] = scores[row, keys[row]]
        if tau is None:
            return keys, logits, None
        for line, others, values in zip(scores, masked, hidden, strict=True):
            line[others] = values
        return keys, logits, log_sums(scores, tau, ())

    def _first_of(
        self, states: FloatArray, margin: FloatArray, near: Near, tau: float | None
    ) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """`first`, where it is known which rows alone can be the best."""
        whose, keys, each = near.whose, near.keys, np.arange(len(states))
        logits = np.empty(len(keys), dtype=np.float32)
        for some in blocks(len(keys), states.shape[1], _CACHED):
            np.einsum("md,md->m", self._candidate.rows[keys[some]], states[whose[some]], out=logits[some])
        top = np.maximum.reduceat(logits, np.searchsorted(whose, each))
        best_ones = np.flatnonzero(logits >= (top - margin)[whose])
        at = best_ones[np.searchsorted(whose[best_ones], each)]
        totals = near.log_partition
        if totals is not None and tau is not None:
            # These few make up most of it.
            exact, rounded = (np.exp(of / tau - totals[whose]) for of in (logits, near.logits))
            totals = totals + np.log1p(np.bincount(whose, exact - rounded))
        return keys[at], logits[at], totals

    def followed(self, states: FloatArray, tau: float | None, *, rough: bool = False) -> list[Followed] | None:
        """What finds the picks for each of (B, D) states and for those that come of it, one by one.

        Args:
            states: before the first pick.
            tau: τ, where log partitions are wanted, too.
            rough: see `first`.

        Returns:
            None where it is faster to search for all together (`first`).
        """
        rows, count = self._candidate.rows, len(states)
        if isinstance(rows, SparseRows) and rows.worth_following():
            starts = [None] * count if count <= _FEW_SPARSE else self.scores(states)
            each = zip(states, starts, strict=True)
            return [FollowedByColumn(self, self._longest, state[None], rows, scores) for state, scores in each]
        screened = tau is None and 0 < count <= _FEW_SCREENED and self._screens(self._scan)
        most = _FEW_SCREENED if screened else _FEW
        if tau is not None and rough and self._screens(self._product):
            most = min(_FEW, self._product.least() - 1)
        if not 0 < count <= most:
            return None
        return [(Screened if screened else Followed)(self, self._longest, state[None]) for state in states]

    def _screens(self, coarse: Coarse) -> bool:
        """Whether rounded rows can show which few are looked at."""
        rows = self._candidate.rows
        if isinstance(rows, SparseRows) or rows.size < LARGE or not np.isfinite(self._longest):
            return False
        return coarse.ready(rows)

    def nearest(self, state: FloatArray, count: int, exclude: Sequence[IntArray]) -> tuple[IntArray, FloatArray, float]:
        """Of a large dense pool the rows that seem best for a state (D,).

        Returns:
            Their keys (M,) and logits (M,), and what the logit of no other candidate is above.
        """
        keys, ceiling = self._scan.nearest(state, count)
        if self._allowed is not None:
            keys = keys[self._allowed[keys]]
        for rows in exclude:
            keys = keys[~np.isin(keys, rows)]
        return keys, self._candidate.rows[keys] @ state, ceiling

    def candidates(self, keys: IntArray) -> FloatArray:
        """See `Table.candidates`."""
        return self._candidate.rows[keys]

    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """See `Table.pool_vectors`."""
        every = PoolVectors(self._candidate.rows, self._context.rows)
        return every if len(keys) == len(self) else every.take(keys)


class Followed:
    """The logits of one state, and from step to step of what becomes of it.

    Args:
        table: whose rows are found.
        longest: max |E_c|.
        state: (1, D) float32.
    """

    _scores: FloatArray | None = None

    def __init__(self, table: MatrixTable, longest: float, state: FloatArray) -> None:
        self._table, self._longest = table, longest
        self.move(state)

    def move(self, state: FloatArray) -> None:
        """Go on to the next state (1, D)."""
        self._state, self._slack = state, slack_alone(state[0], self._longest)
        self._scores = None

    def first(self, exclude: list[int], masked: Sequence[IntArray]) -> tuple[int, np.float32]:
        """The best candidate and its logit; see `MatrixTable.first`."""
        line, open_, top = self._open(exclude, masked)
        key = int((open_ >= top - self._slack).argmax())
        return key, line[key]

    def _open(self, exclude: list[int], masked: Sequence[IntArray]) -> tuple[FloatArray, FloatArray, np.float32]:
        """All logits, those of what may be found, and the best of these."""
        if self._scores is None:
            self._scores = self._table.scores(self._state)[0]
        line = self._scores
        line[exclude] = -np.inf
        open_ = line.copy() if masked else line
        for rows in masked:
            open_[rows] = -np.inf
        top = open_.max()
        return (line, open_, top) if top > -np.inf else (line, line, line.max())

    def log_partition(self, tau: float) -> float:
        """Log Σ exp(logit / τ) over the candidates that `first` looked at last, masked ones too."""
        return float(log_sums(np.array(self._scores)[None], tau, ())[0])


class FollowedByColumn(Followed):
    """`Followed` in a large sparse pool.

    A step changes a state in the columns that the pick has. Few other rows have them, and the logits of these alone are
    brought up to date. That lets rounding errors add up, so that of the best rows the logits are then worked out anew.
    """

    def __init__(
        self, table: MatrixTable, longest: float, state: FloatArray, rows: SparseRows, scores: FloatArray | None = None
    ) -> None:
        super().__init__(table, longest, state)
        self._rows, self._rounding, self._off = rows, self._slack, np.float32(0)
        self._scores = scores

    def move(self, state: FloatArray) -> None:
        """See `Followed.move`."""
        scores = self._scores
        if scores is not None:
            self._rows.follow(scores, state[0] - self._state[0])
            self._off += 2 * self._rounding
        super().move(state)
        self._scores = scores

    def first(self, exclude: list[int], masked: Sequence[IntArray]) -> tuple[int, np.float32]:
        """See `Followed.first`."""
        _, open_, top = self._open(exclude, masked)
        keys = np.flatnonzero(open_ >= top - self._slack - self._off)
        logits = self._rows.dots(keys, self._state[0])
        at = int((logits >= logits.max() - self._slack).argmax())
        return int(keys[at]), logits[at]


class Screened(Followed):
    """`Followed` in a large dense pool: a scan in 8 bits shows which few rows can be the best (`Coarse`)."""

    def first(self, exclude: list[int], masked: Sequence[IntArray]) -> tuple[int, np.float32]:
        """See `Followed.first`."""
        for count in _LOOKED_AT:
            keys, logits, ceiling = self._table.nearest(self._state[0], count, [np.array(exclude), *masked])
            least = logits.max(initial=-np.inf) - self._slack
            if least > ceiling:
                near = logits >= least
                key = keys[near].min()
                return int(key), logits[keys == key][0]
        return super().first(exclude, masked)


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the engine where none is named."""

    def _table(self, vectors: PoolVectors) -> MatrixTable:
        return MatrixTable(vectors)
