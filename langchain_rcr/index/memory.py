"""The pool as two matrices in memory: exact search by one matrix product a step."""

from __future__ import annotations

import copy
import threading
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.index.base import FloatArray, Follows, IntArray, PoolVectors, Search
from langchain_rcr.index.local import Growing, LocalIndex, Table
from langchain_rcr.index.ranking import best, blocks, log_sums, nothing, slack

CROSS_LIMIT = 4096
"""Pools up to this size keep the rows of E_c·E_zᵀ that were needed once (64 MiB of float32 at most)."""


class MatrixTable(Table):
    """Exact search of (N, D) matrices; see `Table`.

    The scores of a step serve its search and its partition. Where the next step's states follow from them and `cross`
    has rows, they also serve that step, which then needs no product:
    `scores(state + λ·E_z[key]) = scores(state) + λ·cross(key)`, with the slack `slack(state) + |λ|·slack(E_z[key])`.
    """

    def __init__(self, vectors: PoolVectors) -> None:
        super().__init__(vectors)
        self._candidate = Growing(vectors.candidate)
        self._cross = _new_cross(self._candidate.rows, self._context.rows)
        self._last: tuple[FloatArray, FloatArray] | None = None

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table = super().extended(vectors)
        table._candidate = self._candidate.extended(vectors.candidate)
        table._cross = _new_cross(table._candidate.rows, table._context.rows)
        return table

    def opened(self) -> Self:
        """This table for one selection, which remembers the scores of its last step."""
        return copy.copy(self)

    def found(self, search: Search) -> tuple[IntArray, FloatArray, NDArray[np.float64] | None]:
        """See `Table.found`."""
        states, exclude, tau = search.states, search.exclude, search.tau
        keys, logits = nothing(len(states), search.t)
        totals = None if tau is None else np.empty(len(states))
        slices = [*blocks(len(states), len(self))]
        for block in slices:
            scores, margin = self._scored(states[block], search.follows if len(slices) == 1 else None)
            keys[block], logits[block] = best(scores, margin, search.t, exclude[block])
            if totals is not None and tau is not None:
                totals[block] = log_sums(scores.copy(), tau, exclude[block])
            self._last = (scores, margin) if len(slices) == 1 else None
        return keys, logits, totals

    def scores(self, states: FloatArray) -> FloatArray:
        """All logits of (B, D) states at once, (B, N) float32; −inf for rows that can't be found."""
        scores: FloatArray = states @ self._candidate.rows.T
        if self._allowed is not None:
            np.copyto(scores, -np.inf, where=~self._allowed)
        return scores

    def cross(self, keys: IntArray) -> FloatArray | None:
        """E_c·E_z[key] for each of (B,) keys: (B, N) float32, rows that can't be found included.

        A row is made when its key is first asked for and kept. None where the pool is above `CROSS_LIMIT`.
        """
        return None if self._cross is None else self._cross.rows(keys)

    def candidates(self, keys: IntArray) -> FloatArray:
        """See `Table.candidates`."""
        return self._candidate.rows[keys]

    def _scored(self, states: FloatArray, follows: Follows | None) -> tuple[FloatArray, FloatArray]:
        """Scores (B, N) and slack (B,)."""
        if follows is not None and self._last is not None:
            scores, margin = self._last
            cross = self.cross(follows.keys)
            if cross is not None:
                added = slack(self.vectors(follows.keys), self._longest)
                scores = scores[follows.parents] + np.float32(follows.lam) * cross
                return scores, margin[follows.parents] + abs(follows.lam) * added
        return self.scores(states), slack(states, self._longest)


class _Cross:
    """Rows of E_z·E_cᵀ (N, N), made one by one when asked for: a pool that changes often never pays for all."""

    def __init__(self, candidate: FloatArray, context: FloatArray) -> None:
        self._candidate, self._context = candidate, context
        self._rows: FloatArray | None = None
        self._made = np.zeros(len(candidate), dtype=bool)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cross, (self._candidate, self._context)

    def rows(self, keys: IntArray) -> FloatArray:
        if self._rows is None or not self._made[keys].all():
            with self._lock:
                if self._rows is None:
                    self._rows = np.empty((len(self._candidate),) * 2, dtype=np.float32)
                lacking = np.unique(keys[~self._made[keys]])
                self._rows[lacking] = self._context[lacking] @ self._candidate.T
                self._made[lacking] = True
        return self._rows[keys]


def _new_cross(candidate: FloatArray, context: FloatArray) -> _Cross | None:
    return _Cross(candidate, context) if len(candidate) <= CROSS_LIMIT else None


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the engine where none is named."""

    def _table(self, vectors: PoolVectors) -> MatrixTable:
        return MatrixTable(vectors)
