"""Selectors that cover structures: the gold program's (ceilings, not competitors), or those of nearby questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from scipy import sparse

from langchain_rcr.programs.tree import CHILD, SIBLING
from rcr_trainer.baselines.base import Baseline, TradeOff
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.data.arrays import distinct, top_k
from rcr_trainer.data.coverage import PoolStructures, greedy_coverage
from rcr_trainer.data.okapi import BM25Scorer

# Needs are rounded to this fraction, cosines to six decimals, so that exact ties stay ties whatever BLAS does.
_GRID = 2.0**-16


class OracleSelector(Baseline):
    """Algorithm 1 of the paper: each step picks the example that covers most of what is left of the gold program."""

    needs: ClassVar[tuple[str, ...]] = ("spec",)
    oracle: ClassVar[bool] = True

    def _fit(self) -> None:
        self._structures = PoolStructures(self.resources.spec, self._programs)

    def _pick(self, queries: Sequence[tuple[str, str]], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        needed = self._structures.rows([gold for _, gold in queries])
        return greedy_coverage(needed, self._structures.matrix, k, excluded)[0]


class KNNStructuresSelector(DenseSelector):
    """At each step, picks the example that adds most to the expected number of needed structures shown.

    The probability that a query needs a structure is estimated as the similarity-weighted share of its nearest
    questions' programs that have it: kernel regression (Nadaraya, "On Estimating Regression", 1964; Watson, "Smooth
    Regression Analysis", 1964). A neighbour weighs exp(cosine / temperature); examples that a query may not pick don't
    count. Then it covers as the oracle does.

    Attributes:
        temperature: above 0; the smaller, the more the very nearest count.
        neighbours: how many examples count. With the chosen temperature, 20 to 80 are within half a point of each other
            on the development questions of Geography, Scholar, GeoQuery's template_1 and COVR 100; on tmcd_1 ten cover
            two points more.
    """

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


class CoverLSGoldSelector(Baseline):
    """Cover-LS: covers the structures of the gold program, the largest first, without repeating a template.

    Source: Levy, Bogin and Berant, "Diverse Demonstrations Improve In-context Compositional Generalization", ACL 2023,
    arXiv 2212.06800, section 3.2, Algorithm 1, and the oracle of section 4. For each uncovered structure, by size, it
    takes the example with that structure whose question BM25 scores highest; once all are covered, it starts again.

    Departures: structures of equal size are ordered by name. If nothing can be covered, the rest come in BM25's order,
    already picked templates last.
    """

    needs: ClassVar[tuple[str, ...]] = ("spec",)
    oracle: ClassVar[bool] = True

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)
        self._templates = distinct([self.resources.spec.key(program) for program in self._programs])[1]
        self._pool = PoolStructures(self.resources.spec, self._programs)
        sizes = [name.count(CHILD) + name.count(SIBLING) for name in self._pool.names]
        self._sizes = np.array(sizes, dtype=np.int64)

    def _pick(self, queries: Sequence[tuple[str, str]], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        needed = self._pool.rows([gold for _, gold in queries])  # only structures that the pool has
        order = np.argsort(-self._scorer.scores([text for text, _ in queries]), axis=1, kind="stable")
        ranks = np.argsort(order, axis=1)
        picks = [self._cover(needed[[row]].indices, ranks[row], barred, k) for row, barred in enumerate(excluded)]
        return np.array(picks, dtype=np.int64)

    def _cover(self, wanted: np.ndarray, rank: np.ndarray, barred: np.ndarray, k: int) -> list[int]:
        """Algorithm 1 for one query, given the structures to cover and BM25's ranks (N,)."""
        wanted = wanted[np.argsort(-self._sizes[wanted], kind="stable")]
        has = self._pool.matrix[:, wanted].toarray() > 0  # (N, W)
        covered = np.zeros(len(wanted), dtype=bool)
        left = np.ones(len(rank), dtype=bool)
        left[barred] = False
        fresh, picks = left.copy(), list[int]()
        while len(picks) < k:
            if not fresh.any():
                fresh = left.copy()
            there = has[fresh].any(axis=0)
            covered &= (there & ~covered).any()  # else the cover starts again
            candidates = np.flatnonzero(fresh)
            if (there & ~covered).any():
                candidates = np.flatnonzero(fresh & has[:, (there & ~covered).argmax()])
            best = int(candidates[rank[candidates].argmin()])
            picks.append(best)
            left[best] = False
            fresh &= left & (self._templates != self._templates[best])
            covered |= has[best]
        return picks
