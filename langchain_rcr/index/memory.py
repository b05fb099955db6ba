"""The pool as matrices in memory, dense or sparse: exact search by one product a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.index.base import PoolVectors, Search
from langchain_rcr.index.local import LocalIndex, Table
from langchain_rcr.index.ranking import best, blocks, first_best, log_sums, nothing, slack, slack_alone
from langchain_rcr.rows import FloatArray, IntArray, Rows, SparseRows, growing, product


class MatrixTable(Table):
    """Exact search of (N, D) matrices; see `Table`. The scores of a step serve its search and its partition."""

    def __init__(self, vectors: PoolVectors) -> None:
        super().__init__(vectors)
        self._candidate = self._context if vectors.context is vectors.candidate else growing(vectors.candidate)

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table, once = super().extended(vectors), self._candidate is self._context
        both = once and vectors.context is vectors.candidate
        table._candidate = table._context if both else self._candidate.extended(vectors.candidate)
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
        self, states: FloatArray, exclude: Sequence[IntArray], masked: Sequence[IntArray], tau: float | None
    ) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """The best candidate of each state: what `found` does for one, without what several need.

        Args:
            states: state vectors, (B, D) float32.
            exclude: for each state the rows that may not be found.
            masked: for each state rows that are found only where there is no other.
            tau: τ, where the log partition is wanted, too; masked rows are in it.

        Returns:
            Keys (B,), logits (B,) and, where there is a τ, log partitions (B,). Each state must have a candidate.
        """
        scores, margin = self.scores(states), slack(states, self._longest)
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

    def follow(self, state: FloatArray) -> Followed:
        """What finds the picks for one state (1, D) and for those that come of it."""
        return Followed(self, self._candidate.rows, self._longest, state)

    def candidates(self, keys: IntArray) -> FloatArray:
        """See `Table.candidates`."""
        return self._candidate.rows[keys]

    def pool_vectors(self, keys: IntArray) -> PoolVectors:
        """See `Table.pool_vectors`."""
        every = PoolVectors(self._candidate.rows, self._context.rows)
        return every if len(keys) == len(self) else every.take(keys)


class Followed:
    """The logits of one state, and from step to step of what becomes of it.

    A step changes a state in the columns that the pick has. In a large sparse pool few other rows have them, and, from
    the second question on, the logits of these alone are brought up to date. That lets rounding errors add up, so that
    of the best rows the logits are then worked out anew.

    Args:
        table: whose rows are found.
        rows: E_c, (N, D).
        longest: max |E_c|.
        state: (1, D) float32.
    """

    def __init__(self, table: MatrixTable, rows: Rows, longest: float, state: FloatArray) -> None:
        self._table, self._longest, self._state = table, longest, state
        self._sparse = rows if isinstance(rows, SparseRows) and rows.worth_following() else None
        self._scores = table.scores(state)[0]
        self._slack = self._rounding = slack_alone(state[0], longest)
        self._off = np.float32(0)

    def move(self, state: FloatArray) -> None:
        """Go on to the next state (1, D)."""
        if self._sparse is None:
            self._scores = self._table.scores(state)[0]
        else:
            self._sparse.follow(self._scores, (state - self._state)[0])
            self._off += 2 * self._rounding
        self._state, self._slack = state, slack_alone(state[0], self._longest)

    def first(self, exclude: list[int], masked: Sequence[IntArray]) -> tuple[int, np.float32]:
        """The best candidate and its logit; see `MatrixTable.first`."""
        line = self._scores
        line[exclude] = -np.inf
        open_ = line.copy() if masked else line
        for rows in masked:
            open_[rows] = -np.inf
        top = open_.max()
        if top == -np.inf:
            open_, top = line, line.max()
        near = open_ >= top - self._slack - self._off
        if self._sparse is None:
            key = int(near.argmax())
            return key, line[key]
        keys = np.flatnonzero(near)
        logits = self._sparse.dots(keys, self._state[0])
        at = int((logits >= logits.max() - self._slack).argmax())
        return int(keys[at]), logits[at]

    def log_partition(self, tau: float) -> float:
        """Log Σ exp(logit / τ) over the candidates that `first` looked at last, masked ones too."""
        return float(log_sums(self._scores[None].copy(), tau, ())[0])


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the engine where none is named."""

    def _table(self, vectors: PoolVectors) -> MatrixTable:
        return MatrixTable(vectors)
