"""Cover-LS: cover the local structures of a predicted program, the largest first, no program template twice.

Source: Levy, Bogin and Berant, "Diverse Demonstrations Improve In-context Compositional Generalization", ACL 2023,
arXiv 2212.06800, section 3.2 and Algorithm 1. For each structure that is not yet covered, in the order of size, the
example is taken that has it and whose question BM25 scores highest for the query; when all are covered, the cover
begins again.

Departures: there, an auxiliary model predicts programs; without one at hand, the program of the nearest question by
dense embeddings is the prediction. Structures of equal size come in the order of their names. Where no structure can be
covered any more, the examples that are left come in BM25's order, those of templates that were picked last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from scipy import sparse

from langchain_rcr.programs.structures import CHILD, SIBLING
from rcr_trainer.baselines.base import in_blocks
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.coverage import PoolStructures, program_groups
from rcr_trainer.okapi import BM25Scorer


class CoverLSSelector(DenseSelector):
    """Picks, for the largest structure not yet covered, the example that has it and is best by BM25.

    An example that a query may not pick is not its prediction either.
    """

    name: ClassVar[str] = "cover_ls"
    needs: ClassVar[tuple[str, ...]] = ("embed", "spec")

    def _fit(self) -> None:
        super()._fit()
        programs = self._programs()
        self._scorer = BM25Scorer(self._questions)
        self._templates = program_groups(self.resources.spec, programs)
        structures = PoolStructures(self.resources.spec, programs)
        sizes = np.array([name.count(CHILD) + name.count(SIBLING) for name in structures.names], dtype=np.int64)
        self._has = structures.matrix[:, np.argsort(-sizes, kind="stable")]  # (N, S), the largest first
        self._has.sort_indices()
        self._owners = sparse.csc_array(self._has)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        nearest = super()._pick(queries, 1, excluded)[:, 0]

        def pick(block: slice) -> np.ndarray:
            order = np.argsort(-self._scorer.scores(queries[block]), axis=1, kind="stable")
            rows = zip(nearest[block], np.argsort(order, axis=1), excluded[block], strict=True)
            picks = [self._cover(self._structures(query), rank, barred, k) for query, rank, barred in rows]
            return np.array(picks, dtype=np.int64)

        return in_blocks(pick, len(queries), len(self._questions))

    def _cover(self, predicted: np.ndarray, rank: np.ndarray, barred: np.ndarray, k: int) -> list[int]:
        """Algorithm 1 for one query: the structures to cover, BM25's ranks (N,) and what may not be picked."""
        left = np.ones(len(rank), dtype=bool)
        left[barred] = False
        fresh, uncovered, picks = left.copy(), predicted, list[int]()
        while len(picks) < k:
            if not fresh.any():
                fresh = left.copy()
            having = self._having(uncovered, fresh)
            if not len(having):
                uncovered = predicted
                having = self._having(uncovered, fresh)
            candidates = having if len(having) else np.flatnonzero(fresh)
            best = int(candidates[rank[candidates].argmin()])
            picks.append(best)
            left[best] = False
            fresh &= left & (self._templates != self._templates[best])
            uncovered = uncovered[~np.isin(uncovered, self._structures(best))]
        return picks

    def _structures(self, position: int) -> np.ndarray:
        return self._has.indices[self._has.indptr[position] : self._has.indptr[position + 1]]

    def _having(self, structures: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """The fresh examples with the first of these structures that any of them has."""
        for each in structures:
            rows = self._owners.indices[self._owners.indptr[each] : self._owners.indptr[each + 1]]
            if fresh[rows].any():
                found: np.ndarray = rows[fresh[rows]]
                return found
        return np.empty(0, dtype=np.int64)
