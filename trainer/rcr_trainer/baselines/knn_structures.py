"""Needs without training: the structures in the programs of the nearest questions, then greedy coverage of these.

A query needs a structure with the similarity-weighted share of its nearest questions' programs that have it: kernel
regression (Nadaraya, "On Estimating Regression", 1964; Watson, "Smooth Regression Analysis", 1964). The rest is
Algorithm 1 of the paper, as the oracle does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from scipy import sparse

from rcr_trainer.baselines.base import TradeOff, top_k
from rcr_trainer.baselines.dense import EmbeddingSelector
from rcr_trainer.data.coverage import PoolStructures, greedy_coverage

# Needs are rounded to this fraction, cosines to six decimals: exact ties stay ties, whatever BLAS does.
_GRID = 2.0**-16


class KNNStructuresSelector(EmbeddingSelector):
    """Picks, one after the other, the example that adds most to the expected number of needed structures shown.

    A neighbour weighs exp(cosine / temperature). An example that a query may not pick is no neighbour either.

    Attributes:
        temperature: above 0; the smaller, the more the very nearest count.
        neighbours: how many examples count. With the temperature chosen, 20 to 80 are within half a point of each other
            on the development questions of Geography, Scholar, GeoQuery's template_1 and COVR 100; on tmcd_1 ten cover
            two points more.
    """

    name: ClassVar[str] = "knn_structures"
    needs: ClassVar[tuple[str, ...]] = ("embed", "spec")
    trade_off: ClassVar[TradeOff | None] = TradeOff("temperature", (0.02, 0.04, 0.07, 0.1, 0.2))
    temperature: float = 0.07
    neighbours: int = 40

    def _fit(self) -> None:
        super()._fit()
        self._structures = PoolStructures(self.resources.spec, self._programs)

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        similarity = np.round(similarity, 6)
        nearest = top_k(similarity, min(self.neighbours, len(self.examples)), excluded)
        logits = np.take_along_axis(similarity, nearest, axis=1).astype(np.float64) / self.temperature
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        rows = np.repeat(np.arange(len(nearest)), nearest.shape[1])
        mixture = sparse.csr_array((weights.ravel(), (rows, nearest.ravel())), shape=similarity.shape)
        needs = sparse.csr_array(mixture @ self._structures.matrix)
        needs.data = np.round(needs.data / _GRID) * _GRID
        return greedy_coverage(needs, self._structures.matrix, k, excluded)[0]
