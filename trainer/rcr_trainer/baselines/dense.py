"""Selectors that embed questions: top-k by similarity, and maximal marginal relevance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.families.model_files import unit
from langchain_rcr.index.ranking import places
from rcr_trainer.baselines.base import Baseline, Embed, TradeOff, distinct, top_k


class EmbeddingSelector(Baseline):
    """Base of the selectors that compare one embedding a question."""

    needs: ClassVar[tuple[str, ...]] = ("embed",)

    def _fit(self) -> None:
        texts, self._row_of = distinct(self._questions)
        self._vectors = self._embed(texts)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, D) unit vectors in float32."""
        embed: Any = self.resources.embed
        return unit(np.asarray(embed(list(texts)), dtype=np.float32))

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return self._rank(self._similarity(self._embed(queries)), k, excluded)

    def _similarity(self, vectors: np.ndarray) -> np.ndarray:
        """(b, N): the cosine of each vector (b, D) with the question of each example."""
        with np.errstate(invalid="ignore"):  # OpenBLAS may raise the flag for lanes that are no part of the product
            similarity: np.ndarray = (vectors @ self._vectors.T)[:, self._row_of]
        return similarity

    @abstractmethod
    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        """Positions (b, k), given the similarity (b, N), which may be overwritten."""


class DenseSelector(EmbeddingSelector):
    """Picks the k examples with the highest cosine between the embeddings of their questions and the query's."""

    name: ClassVar[str] = "dense"

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        return top_k(similarity, k, excluded)


class BERTSelector(DenseSelector):
    """Picks by the inner product of mean-pooled BERT vectors (paper, Eq. 2 and section 4, "Baselines").

    Assumed, as the paper doesn't say: token vectors are averaged, and of an example the question is embedded.
    """

    name: ClassVar[str] = "bert"
    needs: ClassVar[tuple[str, ...]] = ("encode",)
    base: ClassVar[str] = "bert-base-uncased"

    def __init__(self, examples: Sequence[Mapping[str, Any]], **options: Any) -> None:
        super().__init__(examples, **options)
        encode: Any = self.resources.encode
        self._encode: Embed = encode(self.name, self.base)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.asarray(self._encode(list(texts)), dtype=np.float32)


class ContrieverSelector(BERTSelector):
    """The same with Contriever (Izacard et al., TMLR 2022), which was trained for inner products of such vectors."""

    name: ClassVar[str] = "contriever"
    base: ClassVar[str] = "facebook/contriever"


class MMRSelector(EmbeddingSelector):
    """Picks, one after the other, the example most like the query and least like the picks so far.

    That is, the largest λ·cos(query, c) − (1 − λ)·max over the picks of cos(pick, c), over the whole pool. As in
    LangChain, the first pick is the most similar one whatever λ is.

    Attributes:
        lambda_mult: λ in [0, 1]; the default is LangChain's.
    """

    name: ClassVar[str] = "mmr"
    trade_off: ClassVar[TradeOff | None] = TradeOff("lambda_mult", (0.3, 0.5, 0.7, 0.9))
    lambda_mult: float = 0.5

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        similarity[places(excluded, similarity.shape[1])] = -np.inf
        rows = np.arange(len(similarity))
        # A product with λ = 0 would turn −inf into nan.
        weighted = np.float32(self.lambda_mult) * np.maximum(similarity, -1)
        relevance = np.where(np.isneginf(similarity), -np.inf, weighted)
        picked = np.empty((len(similarity), k), dtype=np.int64)
        picked[:, 0] = similarity.argmax(axis=1)
        redundancy = np.full_like(similarity, -np.inf)
        for t in range(1, k):
            last = picked[:, t - 1]
            relevance[rows, last] = -np.inf
            np.maximum(redundancy, self._similarity(self._vectors[self._row_of[last]]), out=redundancy)
            picked[:, t] = (relevance - np.float32(1 - self.lambda_mult) * redundancy).argmax(axis=1)
        return picked
