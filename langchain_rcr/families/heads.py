"""The vectors of the `embeddings` and `lexical` families: frozen vectors through a head, and n-gram vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows
from langchain_rcr.errors import InputError
from langchain_rcr.families.encoding import Backbone, BaseEncoder, bag_sums
from langchain_rcr.families.ngrams import NgramVocabulary

Normal: TypeAlias = Callable[..., FloatArray]
"""Draws an array of a given shape from the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class FrozenVectors:
    """Frozen vectors (N, d) and, if n-grams are read, the bags of the same items."""

    vectors: FloatArray
    bags: SparseRows | None

    def __len__(self) -> int:
        return len(self.vectors)

    def select(self, rows: IntArray) -> FrozenVectors:
        """The features of some rows, in that order."""
        return FrozenVectors(self.vectors[rows], None if self.bags is None else self.bags.select(rows))


class NumpyLinearEncoder(BaseEncoder):
    """scale · (W · frozen(source) + Σ n-gram vectors); either part may be left out.

    N-gram vectors start with a standard deviation of init/√D: with init = 1, inner products start near tf-idf cosines.

    Args:
        backbone: the frozen text encoder, which reads only the question, as a query has nothing else; None: none.
        vocabulary: the n-grams; None: no n-grams.
        dim: D; None: the backbone's own.
        init: W starts as init · I (init · a fixed random projection where D ≠ d), the n-gram vectors as init · a shared
            random draw. E_z starts with a negative value, as what is picked is needed less.
        ngram_init: scale of the n-gram vectors at the start, relative to the frozen vectors.
        scale: a constant factor on the vectors; the product of E_x's and E_c's sets how sharp the initial policy is.
        queries: whether it reads queries (E_x), which some embedding models treat differently.
        seed: of the random parts, shared by the three encoders of a policy. None: these parts are 0.
    """

    arguments = ("dim", "scale", "queries")
    vocabularies: ClassVar = {"vocabulary": NgramVocabulary}
    head: Any
    ngrams: Any

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
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.vocabulary, self.queries, self.scale = backbone, vocabulary, queries, float(scale)
        width = 0 if backbone is None else backbone.dim
        self.dim = dim or width
        if not self.dim:
            raise InputError("dim: must be given where there is no frozen text encoder")
        normal = self._normal(seed) if seed is not None else lambda *shape: np.zeros(shape, dtype=np.float32)
        if width:
            start = normal(self.dim, width) / self.dim**0.5 if self.dim != width else np.eye(width, dtype=np.float32)
            self.keep("head.weight", init * start, trained=True)
        if vocabulary is not None:
            drawn = normal(len(vocabulary), self.dim) * (init * ngram_init / self.dim**0.5)
            self.keep("ngrams.bag.weight", drawn, trained=True)

    def _normal(self, seed: int) -> Normal:
        generator = np.random.default_rng(seed)
        return lambda *shape: generator.standard_normal(shape, dtype=np.float32)

    @classmethod
    def _empty(cls, arguments: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Self:
        backbone, vocabulary = arguments.get("backbone"), arguments["vocabulary"]
        dim = arguments["dim"] or (0 if backbone is None else backbone.dim)
        shapes = {} if backbone is None else {"head.weight": (dim, backbone.dim)}
        shapes |= {} if vocabulary is None else {"ngrams.bag.weight": (len(vocabulary), dim)}
        if any(tensors[name].shape != shape for name, shape in shapes.items()):
            raise InputError(f"it has vectors of {dim:,} numbers, which doesn't fit the weights beside it")
        return cls(**arguments, seed=None)

    def featurize(self, items: Sequence[Item]) -> FrozenVectors:
        """See `BaseEncoder.featurize`."""
        vectors = np.zeros((len(items), 0), dtype=np.float32)
        if self.backbone is not None:
            vectors = self.backbone.embed([item.source for item in items], queries=self.queries)
        return FrozenVectors(vectors, None if self.vocabulary is None else self.vocabulary.bags(items))

    def forward(self, features: FrozenVectors) -> Any:
        """See `BaseEncoder.forward`."""
        out: Any = 0.0
        if self.backbone is not None:
            out = self.given(features.vectors) @ self.head.weight.T
        if features.bags is not None:
            out = out + bag_sums(features.bags, self.ngrams.bag.weight)
        return self.scale * out

    def reads(self) -> tuple[Any, ...]:
        """See `BaseEncoder.reads`."""
        role = self.queries and self.backbone is not None and not self.backbone.symmetric
        return (id(self.backbone), role, None if self.vocabulary is None else self.vocabulary.digest)
