"""Selectors that need no model: random examples, none, and the best by BM25."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rcr_trainer.baselines.base import Baseline
from rcr_trainer.data.arrays import top_k
from rcr_trainer.data.okapi import BM25Scorer


class RandomSelector(Baseline):
    """Draws k examples without replacement; the draw depends only on the seed and the query's text."""

    needs: ClassVar[tuple[str, ...]] = ("seed",)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        picked = np.empty((len(queries), k), dtype=np.int64)
        for row, (query, entry) in enumerate(zip(queries, excluded, strict=True)):
            digest = hashlib.blake2b(f"{self.resources.seed}\n{query}".encode("utf-8", "surrogatepass"), digest_size=16)
            order = np.random.default_rng(int(digest.hexdigest(), 16)).permutation(len(self.examples))
            # Of the first k + |excluded| drawn, at most |excluded| are dropped.
            head = order[: k + entry.size]
            picked[row] = head[~np.isin(head, entry)][:k]
        return picked


class NoneSelector(Baseline):
    """No examples: a prompt shows none. If asked for positions anyway, it gives the pool's first."""

    shows: ClassVar[bool] = False

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(np.zeros((len(queries), len(self.examples))), k, excluded)


class BM25Selector(Baseline):
    """Picks the k examples whose questions score highest for the query."""

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(self._scorer.scores(queries), k, excluded)
