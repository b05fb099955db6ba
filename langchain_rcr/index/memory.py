"""The pool as two matrices in memory: exact search by one matrix product a step."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.index.base import FloatArray, IntArray, PoolVectors, Search
from langchain_rcr.index.local import Growing, LocalIndex, Table
from langchain_rcr.index.ranking import best, blocks, log_sums, nothing, slack


class MatrixTable(Table):
    """Exact search of (N, D) matrices; see `Table`. The scores of a step serve its search and its partition."""

    def __init__(self, vectors: PoolVectors) -> None:
        super().__init__(vectors)
        self._candidate = Growing(vectors.candidate)

    def extended(self, vectors: PoolVectors) -> Self:
        """See `Table.extended`."""
        table = super().extended(vectors)
        table._candidate = self._candidate.extended(vectors.candidate)
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
        scores: FloatArray = states @ self._candidate.rows.T
        if self._allowed is not None:
            np.copyto(scores, -np.inf, where=~self._allowed)
        return scores

    def candidates(self, keys: IntArray) -> FloatArray:
        """See `Table.candidates`."""
        return self._candidate.rows[keys]


class MemoryIndex(LocalIndex):
    """The pool in this process, searched exactly by matrix products; the engine where none is named."""

    def _table(self, vectors: PoolVectors) -> MatrixTable:
        return MatrixTable(vectors)
