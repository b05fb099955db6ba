"""The `lexical` family: n-gram bags trained from scratch. Nothing to download; the floor for every other family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from langchain_rcr.families._io import check_digest, read_json, read_tensors, write_tensors
from langchain_rcr.families.base import Encoder
from langchain_rcr.families.ngrams import Bags, NgramEmbedding, NgramVocabulary
from langchain_rcr.files import write_json
from langchain_rcr.items import Item, View


class LexicalEncoder(Encoder):
    """scale · Σ over the item's n-grams of weight · vector.

    Args:
        vocabulary: the n-grams it knows; others are ignored.
        dim: D.
        view: which texts of an item it reads.
        scale: a constant factor; the product of the scales of E_x and E_c sets how sharp the first policy is.
        seed: of the start vectors.
    """

    family = "lexical"

    def __init__(
        self,
        vocabulary: NgramVocabulary,
        *,
        dim: int = 384,
        view: View = "both",
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.dim, self.view, self.scale = dim, view, scale
        self.ngrams = NgramEmbedding(len(vocabulary), dim, 1.0, torch.Generator().manual_seed(seed))

    def featurize(self, items: Sequence[Item]) -> Bags:
        """The items' n-gram bags."""
        return self.vocabulary.bags(items, self.view)

    def forward(self, features: Bags) -> Tensor:
        """(N, D)."""
        out: Tensor = self.ngrams(features)
        return self.scale * out

    def reads(self) -> tuple[Any, ...]:
        """Vocabulary and view."""
        return (self.vocabulary.digest, self.view)

    def settings(self) -> dict[str, Any]:
        """See `Encoder.settings`."""
        return {"dim": self.dim, "view": self.view, "scale": self.scale, "vocabulary": self.vocabulary.digest}

    def save(self, folder: Path) -> None:
        """encoder.json, vocabulary.json, model.safetensors."""
        write_json(folder / "encoder.json", self.settings())
        write_json(folder / "vocabulary.json", self.vocabulary.to_json())
        write_tensors(folder / "model.safetensors", self.state_dict())

    @classmethod
    def load(cls, folder: Path, context: dict[str, Any]) -> Self:
        """See `Encoder.load`."""
        config = read_json(folder / "encoder.json", ("dim", "view", "scale", "vocabulary"))
        vocabulary = NgramVocabulary.from_json(read_json(folder / "vocabulary.json", ("longest", "idf")))
        check_digest(folder / "vocabulary.json", vocabulary.digest, config["vocabulary"])
        encoder = cls(vocabulary, dim=config["dim"], view=config["view"], scale=config["scale"])
        read_tensors(folder / "model.safetensors", encoder)
        return encoder
