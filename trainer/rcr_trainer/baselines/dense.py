"""Dense top-k: the examples whose questions have the most similar embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.baselines.base import Baseline, Embed, TopK


class EmbeddingSelector(Baseline):
    """Base of the selectors that compare embeddings; owns the pool's vectors.

    Args:
        examples: the pool, one dict per example.
        embed: embeds texts; called once for each distinct question of the pool, and for every query.
        **options: as for `Baseline`.

    Raises:
        InputError: embeddings of a wrong shape or with values that are not finite.
    """

    needs: ClassVar[tuple[str, ...]] = ("embed",)

    def __init__(self, examples: Sequence[Mapping[str, Any]], *, embed: Embed, **options: Any) -> None:
        self.embed = embed
        self._rows: dict[str, int] = {}  # question → row of _vectors
        self._vectors = np.empty((0, 0), dtype=np.float32)
        super().__init__(examples, **options)

    def _fit(self) -> None:
        new = [text for text in dict.fromkeys(self._questions) if text not in self._rows]
        if new:
            vectors = self._embed_checked(new)
            self._vectors = np.concatenate([self._vectors, vectors]) if self._rows else vectors
            self._rows.update(zip(new, range(len(self._rows), len(self._vectors)), strict=True))
        # Equal questions share one vector and one score, so that their tie is exact whatever BLAS does.
        self._row_of = np.array([self._rows[text] for text in self._questions], dtype=np.int64)

    def _embed_checked(self, texts: Sequence[str]) -> np.ndarray:
        """(n, D) unit vectors in float32."""
        vectors = np.asarray(self.embed(list(texts)))
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise InputError(f"embed returned an array of shape {vectors.shape} for {len(texts)} texts")
        if self._rows and vectors.shape[1] != self._vectors.shape[1]:
            raise InputError(f"embed gave {vectors.shape[1]} dimensions, the pool has {self._vectors.shape[1]}")
        return unit_vectors(vectors)


class DenseSelector(EmbeddingSelector, TopK):
    """Picks the k examples with the highest cosine between the embeddings of their questions and the query's."""

    name: ClassVar[str] = "dense"

    def _scorer_of(self, queries: Sequence[str]) -> Callable[[slice], np.ndarray]:
        vectors = self._embed_checked(queries)
        return lambda block: (vectors[block] @ self._vectors.T)[:, self._row_of]


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """(n, D) float32 rows of length 1; a zero row stays zero.

    Raises:
        InputError: a value is not finite.
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all():
        raise InputError("embeddings hold values that are not finite")
    return vectors / np.where(lengths > 0, lengths, 1)
