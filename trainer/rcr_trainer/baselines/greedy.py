"""Algorithm 1 of the paper with the gold program, a ceiling and not a competitor; and no examples at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rcr_trainer.baselines.base import Baseline, top_k
from rcr_trainer.data.coverage import PoolStructures, greedy_coverage


class NoneSelector(Baseline):
    """No examples: a prompt shows none. Asked for positions all the same, it gives the pool's first."""

    name: ClassVar[str] = "no_examples"
    shows: ClassVar[bool] = False

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(np.zeros((len(queries), len(self.examples))), k, excluded)


class OracleSelector(Baseline):
    """Picks at each step the example that covers most of what is left of the gold program."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[tuple[str, ...]] = ("spec",)
    oracle: ClassVar[bool] = True

    def _fit(self) -> None:
        self._structures = PoolStructures(self.resources.spec, self._programs)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return greedy_coverage(self._structures.rows(queries), self._structures.matrix, k, excluded)[0]
