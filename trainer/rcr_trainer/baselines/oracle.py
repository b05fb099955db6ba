"""The oracle: greedy coverage of the gold program, which no selector can see. A ceiling, not a competitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rcr_trainer.baselines.base import Baseline
from rcr_trainer.coverage import PoolStructures, greedy_coverage


class OracleSelector(Baseline):
    """Picks by Algorithm 1 of the paper: each step the example that covers most of what is left of the gold program.

    `select_examples` takes the gold program from the target key, `pick` from `references`.
    """

    name: ClassVar[str] = "oracle"
    needs: ClassVar[tuple[str, ...]] = ("spec",)
    oracle: ClassVar[bool] = True

    def _fit(self) -> None:
        self._structures = PoolStructures(self.resources.spec, self._programs())

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return greedy_coverage(self._structures.rows(queries), self._structures.matrix, k, excluded)[0]
