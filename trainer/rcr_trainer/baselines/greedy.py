"""Algorithm 1 of the paper, with the pool's programs in place of the gold one (fixed), and with the gold one (oracle).

The fixed set tells how far coverage goes without a look at the query. The oracle is a ceiling, not a competitor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from scipy import sparse

from rcr_trainer.baselines.base import Baseline, top_k
from rcr_trainer.data.coverage import PoolStructures, greedy_coverage


class NoneSelector(Baseline):
    """No examples: a prompt shows none. Asked for positions all the same, it gives the pool's first."""

    name: ClassVar[str] = "no_examples"
    shows: ClassVar[bool] = False

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(np.zeros((len(queries), len(self._examples))), k, excluded)


class FixedSelector(Baseline):
    """Picks the set that greedily maximises the mean coverage of the pool's programs.

    A query with excluded positions gets the next ones of the same ranking.
    """

    name: ClassVar[str] = "fixed"
    needs: ClassVar[tuple[str, ...]] = ("spec",)

    def _fit(self) -> None:
        self._pool = PoolStructures(self.resources.spec, self._programs()).matrix
        # Mean coverage of a union is a sum over its structures, so one row (1, S) of what covering each structure adds
        # to it stands for all the programs.
        sizes = np.diff(self._pool.indptr)
        shares = np.divide(1, sizes, out=np.zeros(len(sizes)), where=sizes > 0) / max(1, np.count_nonzero(sizes))
        self._need = sparse.csr_array(shares[None, :] @ self._pool)
        self._ranking = np.empty(0, dtype=np.int64)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        depth = k + max(entry.size for entry in excluded)
        if depth > len(self._ranking):
            self._ranking = greedy_coverage(self._need, self._pool, depth)[0][0]
        head = self._ranking[:depth]
        return np.stack([head[~np.isin(head, entry)][:k] for entry in excluded])


class OracleSelector(Baseline):
    """Picks at each step the example that covers most of what is left of the gold program."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[tuple[str, ...]] = ("spec",)
    oracle: ClassVar[bool] = True

    def _fit(self) -> None:
        self._structures = PoolStructures(self.resources.spec, self._programs())

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return greedy_coverage(self._structures.rows(queries), self._structures.matrix, k, excluded)[0]
