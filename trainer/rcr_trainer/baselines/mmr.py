"""Maximal marginal relevance: similar to the query, unlike what is already picked (Carbonell and Goldstein, 1998)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.baselines.base import top_k
from rcr_trainer.baselines.dense import EmbeddingSelector
from rcr_trainer.programs.coverage import excluded_entries, row_blocks


class MMRSelector(EmbeddingSelector):
    """Picks, one after the other, the example most like the query and least like the picks so far.

    That is, with the largest λ·cos(query, c) − (1 − λ)·max over the picks of cos(pick, c). The first pick is the most
    similar one whatever λ is, as in LangChain.

    Args:
        examples: the pool, one dict per example.
        lambda_mult: λ, from 0 (unlike the picks) to 1 (similar to the query).
        fetch_k: choose among the fetch_k most similar candidates; None: among the whole pool.
        **options: as for `EmbeddingSelector`.
    """

    name: ClassVar[str] = "mmr"

    def __init__(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        lambda_mult: float = 0.5,
        fetch_k: int | None = None,
        **options: Any,
    ) -> None:
        if not 0 <= lambda_mult <= 1:
            raise InputError(f"lambda_mult is {lambda_mult}; it must lie between 0 and 1")
        self.lambda_mult = lambda_mult
        self.fetch_k = fetch_k
        super().__init__(examples, **options)

    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        vectors = self._embed_queries(queries)
        return maximal_marginal_relevance(
            vectors,
            self._vectors,
            self._row_of,
            excluded,
            k=k,
            lambda_mult=self.lambda_mult,
            fetch_k=self.fetch_k,
        )


def maximal_marginal_relevance(
    queries: np.ndarray,
    vectors: np.ndarray,
    row_of: np.ndarray,
    excluded: Sequence[np.ndarray],
    *,
    k: int,
    lambda_mult: float,
    fetch_k: int | None = None,
) -> np.ndarray:
    """Positions (B, k) int64 by maximal marginal relevance, for all queries at once.

    Args:
        queries: (B, D) unit vectors.
        vectors: (U, D) unit vectors of the pool's distinct questions.
        row_of: (N,) int; candidate n has the vector vectors[row_of[n]].
        excluded: per query, the positions it may not pick.
        k: picks per query.
        lambda_mult: λ.
        fetch_k: choose among the fetch_k most similar candidates; None: among all.

    Raises:
        InputError: fetch_k is smaller than k.
    """
    if fetch_k is not None and fetch_k < k:
        raise InputError(f"k is {k}, but fetch_k is only {fetch_k}")
    picked = np.empty((len(queries), k), dtype=np.int64)
    for block in row_blocks(len(queries), max(len(row_of), (fetch_k or 0) * vectors.shape[1])):
        similarity = (queries[block] @ vectors.T)[:, row_of]
        similarity[excluded_entries(excluded[block])] = -np.inf
        if fetch_k is None or fetch_k >= len(row_of):
            picked[block] = _among_all(similarity, vectors, row_of, k, lambda_mult)
        else:
            # In ascending order of position, so that ties go to the lowest here too.
            fetched = np.sort(top_k(similarity, fetch_k), axis=1)
            chosen = _among_fetched(
                np.take_along_axis(similarity, fetched, axis=1), vectors[row_of[fetched]], k, lambda_mult
            )
            picked[block] = np.take_along_axis(fetched, chosen, axis=1)
    return picked


def _among_all(
    similarity: np.ndarray, vectors: np.ndarray, row_of: np.ndarray, k: int, lambda_mult: float
) -> np.ndarray:
    """Positions (b, k); similarity (b, N) is −inf for what may not be picked."""
    return _steps(similarity, lambda last: (vectors[row_of[last]] @ vectors.T)[:, row_of], k, lambda_mult)


def _among_fetched(similarity: np.ndarray, vectors: np.ndarray, k: int, lambda_mult: float) -> np.ndarray:
    """Columns (b, k) of the fetched candidates, whose similarity is (b, F) and vectors are (b, F, D)."""
    rows = np.arange(len(vectors))
    return _steps(similarity, lambda last: np.einsum("bfd,bd->bf", vectors, vectors[rows, last]), k, lambda_mult)


def _steps(
    similarity: np.ndarray, similar_to: Callable[[np.ndarray], np.ndarray], k: int, lambda_mult: float
) -> np.ndarray:
    """The greedy loop; similar_to(last (b,)) gives every candidate's similarity (b, F) to the pick just made."""
    rows = np.arange(len(similarity))
    # A product with λ = 0 would turn −inf into nan.
    relevance = np.where(np.isneginf(similarity), -np.inf, np.float32(lambda_mult) * np.maximum(similarity, -1))
    picked = np.empty((len(similarity), k), dtype=np.int64)
    picked[:, 0] = similarity.argmax(axis=1)
    redundancy = np.full_like(similarity, -np.inf)
    for t in range(1, k):
        relevance[rows, picked[:, t - 1]] = -np.inf
        np.maximum(redundancy, similar_to(picked[:, t - 1]), out=redundancy)
        picked[:, t] = (relevance - np.float32(1 - lambda_mult) * redundancy).argmax(axis=1)
    return picked
