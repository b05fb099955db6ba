"""The encoder of the `embeddings` and `lexical` families: frozen vectors through a trained head, and n-gram vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.errors import InputError
from langchain_rcr.families.encoder import Backbone, Encoder
from langchain_rcr.families.ngrams import NgramEmbedding, NgramVocabulary


@dataclass(frozen=True, slots=True)
class FrozenVectors:
    """Frozen vectors (N, d) and, if n-grams are read, the bags of the same items."""

    vectors: NDArray[np.float32]
    bags: SparseRows | None

    def __len__(self) -> int:
        return len(self.vectors)

    def select(self, rows: NDArray[np.int64]) -> FrozenVectors:
        """The features of some rows, in that order."""
        return FrozenVectors(self.vectors[rows], None if self.bags is None else self.bags.select(rows))


class LinearEncoder(Encoder):
    """scale · (W · frozen(source) + Σ n-gram vectors); either part may be left out.

    Args:
        backbone: the frozen text encoder, which reads the question alone, as that is all a query has; None: no such.
        vocabulary: the n-grams; None: no n-grams.
        dim: D; None: the backbone's own.
        init: W starts as init · I (init · a fixed random projection where D ≠ d), the n-gram vectors as init · a
            shared random draw. E_z starts with a negative value: what is picked is needed less.
        ngram_init: scale of the n-gram vectors at the start, relative to the frozen vectors.
        scale: a constant factor on the vectors; the product of E_x's and E_c's sets how sharp the first policy is.
        queries: whether it reads queries (E_x), which some embedding models treat differently.
        seed: of the random parts; the three encoders of a policy share it.

    Raises:
        InputError: neither `dim` nor a backbone says how long the vectors are.
    """

    arguments = ("dim", "scale", "queries")
    vocabularies: ClassVar = {"vocabulary": NgramVocabulary}

    def __init__(
        self,
        backbone: Backbone | None = None,
        vocabulary: NgramVocabulary | None = None,
        *,
        dim: int | None = None,
        init: float = 1.0,
        ngram_init: float = 0.0,
        scale: float = 1.0,
        queries: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.vocabulary, self.queries, self.scale = backbone, vocabulary, queries, scale
        width = 0 if backbone is None else backbone.dim
        self.dim = dim or width
        if not self.dim:
            raise InputError("dim: must be given where there is no frozen text encoder")
        generator = torch.Generator().manual_seed(seed)
        self.head: nn.Linear | None = None
        self.ngrams: NgramEmbedding | None = None
        if width:
            self.head = nn.Linear(width, self.dim, bias=False)
            projected = self.dim != width
            start = torch.randn(self.dim, width, generator=generator) / self.dim**0.5 if projected else torch.eye(width)
            self.head.weight = nn.Parameter(init * start)
        if vocabulary is not None:
            self.ngrams = NgramEmbedding(len(vocabulary), self.dim, init * ngram_init, generator)

    def featurize(self, items: Sequence[Item]) -> FrozenVectors:
        """See `Encoder.featurize`."""
        vectors = np.zeros((len(items), 0), dtype=np.float32)
        if self.backbone is not None:
            vectors = self.backbone.embed([item.source for item in items], queries=self.queries)
        return FrozenVectors(vectors, None if self.vocabulary is None else self.vocabulary.bags(items))

    def forward(self, features: FrozenVectors) -> Tensor:
        """See `Encoder.forward`."""
        out: Any = 0.0
        if self.head is not None:
            out = self.head(torch.from_numpy(features.vectors).to(self.head.weight.device))
        if self.ngrams is not None:
            out = out + self.ngrams(features.bags)
        vectors: Tensor = self.scale * out
        return vectors

    def reads(self) -> tuple[Any, ...]:
        """See `Encoder.reads`."""
        role = self.queries and self.backbone is not None and not self.backbone.symmetric
        return (id(self.backbone), role, None if self.vocabulary is None else self.vocabulary.digest)
