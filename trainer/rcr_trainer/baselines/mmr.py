"""Maximal marginal relevance: similar to the query, unlike what is already picked (Carbonell and Goldstein, 1998)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.baselines.base import TradeOff
from rcr_trainer.baselines.dense import EmbeddingSelector
from rcr_trainer.coverage import excluded_entries


class MMRSelector(EmbeddingSelector):
    """Picks, one after the other, the example most like the query and least like the picks so far.

    That is, with the largest λ·cos(query, c) − (1 − λ)·max over the picks of cos(pick, c), over the whole pool. The
    first pick is the most similar one whatever λ is, as in LangChain.

    Args:
        examples: the pool, one dict per example.
        lambda_mult: λ, from 0 (unlike the picks) to 1 (similar to the query); the default is LangChain's.
        **options: as for `EmbeddingSelector`.
    """

    name: ClassVar[str] = "mmr"
    trade_off: ClassVar[TradeOff | None] = TradeOff("lambda_mult", (0.3, 0.5, 0.7, 0.9))

    def __init__(self, examples: Sequence[Mapping[str, Any]], *, lambda_mult: float = 0.5, **options: Any) -> None:
        if not 0 <= lambda_mult <= 1:
            raise InputError(f"lambda_mult is {lambda_mult}; it must lie between 0 and 1")
        self.lambda_mult = lambda_mult
        super().__init__(examples, **options)

    def _pick_block(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        similarity[excluded_entries(excluded)] = -np.inf
        rows = np.arange(len(similarity))
        # A product with λ = 0 would turn −inf into nan.
        relevance = np.where(
            np.isneginf(similarity), -np.inf, np.float32(self.lambda_mult) * np.maximum(similarity, -1)
        )
        picked = np.empty((len(similarity), k), dtype=np.int64)
        picked[:, 0] = similarity.argmax(axis=1)
        redundancy = np.full_like(similarity, -np.inf)
        for t in range(1, k):
            last = picked[:, t - 1]
            relevance[rows, last] = -np.inf
            np.maximum(redundancy, self._similarity(self._vectors[self._row_of[last]]), out=redundancy)
            picked[:, t] = (relevance - np.float32(1 - self.lambda_mult) * redundancy).argmax(axis=1)
        return picked
