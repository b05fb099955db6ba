"""Dense top-k: the examples whose questions have the most similar embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.baselines.base import Baseline, top_k_of

Embed: TypeAlias = Callable[[Sequence[str]], np.ndarray]
"""Embeds n texts: (n, D) floats, of any length."""


class EmbeddingSelector(Baseline):
    """Base of the selectors that compare embeddings; owns the pool's vectors.

    Args:
        examples: the pool, one dict per example.
        embed: embeds texts; asked once for each distinct question of the pool, and for every query.
        vectors: (N, D), the examples' embeddings where they are already known, so that several selectors share them.
        **options: as for `Baseline`.

    Raises:
        InputError: embeddings of a wrong shape or with values that are not finite.
    """

    def __init__(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        embed: Embed,
        vectors: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        self.embed = embed
        self._rows: dict[str, int] = {}  # question → row of _vectors
        self._vectors = np.empty((0, 0), dtype=np.float32)
        super().__init__(examples, **options)
        if vectors is not None:
            if len(vectors) != len(self._questions):
                raise InputError(f"{len(vectors)} vectors for {len(self._questions)} examples")
            first: dict[str, int] = {}
            for position, text in enumerate(self._questions):
                first.setdefault(text, position)
            self._append(list(first), unit_vectors(np.asarray(vectors)[list(first.values())]))

    def _fit(self) -> None:
        new = [text for text in dict.fromkeys(self._questions) if text not in self._rows]
        if new:
            self._append(new, embed_unit(self.embed, new))
        # Equal questions share one vector and one score, so that their tie is exact whatever BLAS does.
        self._row_of = np.array([self._rows[text] for text in self._questions], dtype=np.int64)

    def _embed_queries(self, queries: Sequence[str]) -> np.ndarray:
        """(B, D) unit vectors."""
        vectors = embed_unit(self.embed, queries)
        if vectors.shape[1] != self._vectors.shape[1]:
            raise InputError(f"embed gave {vectors.shape[1]} dimensions, the pool has {self._vectors.shape[1]}")
        return vectors

    def _append(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        if self._rows and vectors.shape[1] != self._vectors.shape[1]:
            raise InputError(f"embed gave {vectors.shape[1]} dimensions, the pool has {self._vectors.shape[1]}")
        self._vectors = np.concatenate([self._vectors, vectors]) if self._rows else vectors
        self._rows.update(zip(texts, range(len(self._rows), len(self._vectors)), strict=True))


class DenseSelector(EmbeddingSelector):
    """Picks the k examples with the highest cosine between the embeddings of their questions and the query's."""

    name: ClassVar[str] = "dense"

    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        vectors = self._embed_queries(queries)

        def score(block: slice) -> np.ndarray:
            return (vectors[block] @ self._vectors.T)[:, self._row_of]

        return top_k_of(score, len(queries), len(self._questions), k, excluded)


def embed_unit(embed: Embed, texts: Sequence[str]) -> np.ndarray:
    """(n, D) float32: the texts' embeddings at length 1 (a zero vector stays zero).

    Raises:
        InputError: not one finite vector per text.
    """
    vectors = np.asarray(embed(list(texts)))
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise InputError(f"embed returned an array of shape {vectors.shape} for {len(texts)} texts")
    return unit_vectors(vectors)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """(n, D) float32 rows of length 1; a zero row stays zero."""
    vectors = np.asarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(lengths).all():
        raise InputError("embeddings hold values that are not finite")
    return vectors / np.where(lengths > 0, lengths, 1)
