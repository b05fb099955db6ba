"""BM25 over the questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rcr_trainer.baselines.base import Baseline, top_k
from rcr_trainer.data.okapi import BM25Scorer


class BM25Selector(Baseline):
    """Picks the k examples whose questions score highest for the query."""

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(self._scorer.scores(queries), k, excluded)
