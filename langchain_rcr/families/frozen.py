"""Encoders of the `embeddings` family: frozen vectors, a small trainable head, an optional n-gram residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.families.backbone import Backbone
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.ngrams import NgramEmbedding, NgramVocabulary
from langchain_rcr.items import Item, View
from langchain_rcr.rows import SparseRows


@dataclass(frozen=True, slots=True)
class FrozenVectors:
    """N frozen vectors (N, d), and the n-gram bags of the same items where there is a residual."""

    vectors: NDArray[np.float32]
    bags: SparseRows | None

    def __len__(self) -> int:
        return len(self.vectors)

    def select(self, rows: NDArray[np.int64]) -> FrozenVectors:
        """The features of some rows, in that order."""
        return FrozenVectors(self.vectors[rows], None if self.bags is None else self.bags.select(rows))


class EmbeddingsEncoder(Encoder):
    """scale · (W · frozen(source) + Σ n-gram vectors).

    Args:
        backbone: the frozen text encoder; it reads the question, whose wording a query shares.
        vocabulary: the n-grams of the residual; None for none.
        dim: D; None for the backbone's own.
        view: which texts the n-gram residual reads.
        init: W starts as init · I (init · a fixed random projection where D ≠ d), the n-gram vectors as init · a
            shared random draw. E_z starts with a negative value: what is picked is needed less.
        ngram_init: scale of the n-gram residual at the start, relative to the frozen vectors.
        scale: a constant factor on the vectors.
        queries: whether it reads queries (E_x), which some embedding models treat differently.
        seed: seed of the random parts; the three encoders of a retriever share it.
    """

    arguments = ("dim", "view", "scale", "queries")
    vocabularies: ClassVar = {"vocabulary": NgramVocabulary}
    backbone: Backbone

    def __init__(
        self,
        backbone: Backbone,
        vocabulary: NgramVocabulary | None,
        *,
        dim: int | None = None,
        view: View = "both",
        init: float = 1.0,
        ngram_init: float = 0.0,
        scale: float = 1.0,
        queries: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.vocabulary, self.queries = backbone, vocabulary, queries
        self.dim = dim or backbone.dim
        self.view, self.scale = view, scale
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(backbone.dim, self.dim, bias=False)
        with torch.no_grad():
            if self.dim == backbone.dim:
                self.head.weight.copy_(init * torch.eye(self.dim))
            else:
                projection = torch.randn(self.dim, backbone.dim, generator=generator) / self.dim**0.5
                self.head.weight.copy_(init * projection)
        self.ngrams = (
            NgramEmbedding(len(vocabulary), self.dim, init * ngram_init, generator) if vocabulary is not None else None
        )

    def featurize(self, items: Sequence[Item]) -> FrozenVectors:
        """Frozen vectors of the questions, and n-gram bags."""
        vectors = self.backbone.embed([item.source for item in items], queries=self.queries)
        return FrozenVectors(vectors, None if self.vocabulary is None else self.vocabulary.bags(items, self.view))

    def forward(self, features: FrozenVectors) -> Tensor:
        """(N, D)."""
        vectors = torch.from_numpy(features.vectors).to(self.head.weight.device)
        out: Tensor = self.head(vectors)
        if self.ngrams is not None:
            out = out + self.ngrams(features.bags)
        return self.scale * out

    def reads(self) -> tuple[Any, ...]:
        """Backbone and role, vocabulary and view."""
        role = self.queries and not self.backbone.symmetric
        return (id(self.backbone), role, None if self.vocabulary is None else (self.vocabulary.digest, self.view))
