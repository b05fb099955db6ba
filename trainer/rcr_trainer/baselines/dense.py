"""Selectors that embed questions: top k by similarity, maximal marginal relevance, and a point process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.families.model_files import unit
from rcr_trainer.baselines.base import Baseline, Embed, TradeOff
from rcr_trainer.data.arrays import distinct, top_k

_NO_VOLUME = 1e-5  # below this, what is left of a candidate's volume of 1 is rounding error


class DenseSelector(Baseline):
    """Picks the k examples whose questions' embeddings have the highest cosine with the query's."""

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
        with np.errstate(invalid="ignore"):  # OpenBLAS may set the flag for lanes outside the product
            similarity: np.ndarray = (vectors @ self._vectors.T)[:, self._row_of]
        return similarity

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        """Positions (b, k), given the similarity (b, N), which may be overwritten."""
        return top_k(similarity, k, excluded)


class BERTSelector(DenseSelector):
    """Picks by the inner product of mean-pooled BERT vectors (paper, Eq. 2 and section 4, "Baselines").

    Assumed, as the paper doesn't say: token vectors are averaged, and only an example's question is embedded.
    """

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

    base: ClassVar[str] = "facebook/contriever"


class MMRSelector(DenseSelector):
    """At each step, picks the example most like the query and least like the picks so far.

    That is, the largest λ·cos(query, c) − (1 − λ)·max over the picks of cos(pick, c), over the whole pool. As in
    LangChain, the first pick is the most similar one, whatever λ is.

    Attributes:
        lambda_mult: λ in [0, 1]; the default is LangChain's.
    """

    trade_off: ClassVar[TradeOff | None] = TradeOff("lambda_mult", (0.3, 0.5, 0.7, 0.9))
    lambda_mult: float = 0.5

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        rows, relevance = np.arange(len(similarity)), np.float32(self.lambda_mult) * similarity
        for alone, weighted, barred in zip(similarity, relevance, excluded, strict=True):
            alone[barred] = weighted[barred] = -np.inf
        picked = np.empty((len(similarity), k), dtype=np.int64)
        picked[:, 0] = similarity.argmax(axis=1)
        redundancy = np.full_like(similarity, -np.inf)
        for t in range(1, k):
            last = picked[:, t - 1]
            relevance[rows, last] = -np.inf
            np.maximum(redundancy, self._similarity(self._vectors[self._row_of[last]]), out=redundancy)
            picked[:, t] = (relevance - np.float32(1 - self.lambda_mult) * redundancy).argmax(axis=1)
        return picked


class DPPSelector(DenseSelector):
    """A determinantal point process conditioned on the query: similar to it, and diverse together (CEIL's TopK-DPP).

    The kernel is L = diag(q) S diag(q) with q = exp(r / 2λ), relevance r = (1 + cos(query, c)) / 2 and similarity
    S = (1 + cos(c, c')) / 2, so log det L_Y = Σ r / λ + log det S_Y: each step picks the example with the largest
    log(new volume) + relevance / λ. This greedy algorithm approximates the mode over the candidates most like the
    query, with an incremental Cholesky factor: Chen, Zhang and Zhou, "Fast Greedy MAP Inference for Determinantal Point
    Process to Improve Recommendation Diversity", NeurIPS 2018, Algorithm 1. Candidates that add no volume (copies of
    picks) come next, then those outside the shortlist, both by relevance.

    Source: Ye, Wu, Feng, Yu and Kong, "Compositional Exemplars for In-context Learning" (CEIL), ICML 2023, arXiv
    2302.05698, sections 3.1 and 3.3, and their code for the shortlist's length and the mapping of cosines to [0, 1].
    Departures: embeddings are not trained (one of CEIL's own baselines); the factor is that of S, with r / λ added to
    the logarithm of each volume, which gives the same picks and can't overflow; a prompt shows the first pick last,
    while their code puts the most similar first.

    Attributes:
        lam: λ above 0; the smaller, the more relevance counts.
        fetch_k: length of the shortlist, the candidates most like the query.
    """

    trade_off: ClassVar[TradeOff | None] = TradeOff("lam", (0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
    lam: float = 0.1
    fetch_k: int = 100

    def _fit(self) -> None:
        super()._fit()
        self._use(self._vectors)

    def _use(self, vectors: np.ndarray) -> None:
        """Rank by these unit vectors (U, D) of the pool's distinct texts."""
        self._vectors = vectors
        lengths = np.linalg.norm(vectors, axis=1)
        self._own_volume = (1 + np.round(lengths, 5).astype(np.float64)) / 2  # 1/2 for a zero vector

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        n_fetched = min(self.fetch_k, len(self.examples))
        steps = min(k, n_fetched)
        # In ascending order of position, so that here, too, ties go to the lowest.
        fetched = np.sort(top_k(similarity, n_fetched, excluded), axis=1)  # (b, F)
        rows, texts = np.arange(len(fetched)), self._row_of[fetched]
        quality, volume = np.take_along_axis(similarity, fetched, axis=1) / self.lam, self._own_volume[texts]
        picked = np.empty((len(fetched), k), dtype=np.int64)
        factor = np.empty((steps, *fetched.shape))  # factor[t]: the row of the Cholesky factor that pick t adds
        for t in range(steps):
            adds = (volume > _NO_VOLUME) & (quality > -np.inf)
            score = np.log(volume, where=adds, out=np.full_like(volume, -np.inf)) + quality
            last = np.where(adds.any(axis=1), score.argmax(axis=1), quality.argmax(axis=1))
            picked[:, t] = fetched[rows, last]
            if t + 1 == steps:
                break
            quality[rows, last] = -np.inf
            own, useful = volume[rows, last], adds[rows, last]
            known = (factor[:t] * factor[:t, rows, last][:, :, None]).sum(axis=0)
            similar = np.take_along_axis(self._similarity(self._vectors[texts[rows, last]]), fetched, axis=1)
            new = (similar - known) / np.sqrt(np.where(useful, own, 1))[:, None]
            factor[t] = np.where(useful[:, None], new, 0)
            volume -= factor[t] ** 2
        if steps < k:
            np.put_along_axis(similarity, fetched, -np.inf, axis=1)
            picked[:, steps:] = top_k(similarity, k - steps)
        return picked

    def _similarity(self, vectors: np.ndarray) -> np.ndarray:
        """(b, N) float64 in [0, 1]; rounded, so that exact ties stay ties whatever BLAS does."""
        cosines = np.round(vectors @ self._vectors.T, 6).astype(np.float64)
        similarity: np.ndarray = ((1 + cosines) / 2)[:, self._row_of]
        return similarity
