"""The `both` family: structures and text side by side, so that a logit is the sum of what the two parts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_rcr.families.base import Encoder, Features
from langchain_rcr.families.embeddings import Backbone, EmbeddingsEncoder
from langchain_rcr.families.structure.encoders import NeedEncoder, StructureEncoder
from langchain_rcr.items import Item


@dataclass(frozen=True, slots=True)
class JoinedFeatures:
    """The features of N items for both parts."""

    structure: Features
    text: Features

    def __len__(self) -> int:
        return len(self.structure)

    def select(self, rows: NDArray[np.int64]) -> JoinedFeatures:
        """The features of some rows, in that order."""
        return JoinedFeatures(self.structure.select(rows), self.text.select(rows))


class JoinedEncoder(Encoder):
    """[structure part | text part]: the first coordinates stand for structures, the further ones for text.

    How loud the text is beside the structures is a matter of its own scale.

    Args:
        structure: the part that reads programs, or predicts them.
        text: the part that reads questions.
    """

    family = "both"
    batch_size = NeedEncoder.batch_size

    def __init__(self, structure: StructureEncoder, text: EmbeddingsEncoder) -> None:
        super().__init__()
        self.structure, self.text = structure, text
        self.dim, self.structures = structure.dim + text.dim, structure.structures

    @property
    def backbone(self) -> Backbone:
        """The frozen text encoder, which both parts share."""
        return self.text.backbone

    @backbone.setter
    def backbone(self, backbone: Backbone) -> None:
        self.text.backbone = backbone
        if isinstance(self.structure, NeedEncoder):
            self.structure.backbone = backbone

    def featurize(self, items: Sequence[Item]) -> JoinedFeatures:
        """What each part sees of the items; both parts of E_x see the same frozen vectors, made once."""
        if isinstance(self.structure, NeedEncoder):
            views = self.structure.views(items)
            return JoinedFeatures(self.structure.featurize(items, views), self.text.featurize(items, views.vectors))
        return JoinedFeatures(self.structure.featurize(items), self.text.featurize(items))

    def join(self, structure: Features, items: Sequence[Item]) -> JoinedFeatures:
        """The structure part's features of the items, made elsewhere, with the text part's."""
        return JoinedFeatures(structure, self.text.featurize(items))

    def forward(self, features: JoinedFeatures) -> Tensor:
        """(N, D)."""
        return torch.cat([self.structure(features.structure), self.text(features.text)], dim=1)

    def reads(self) -> tuple[Any, ...]:
        """What the parts read."""
        return (self.structure.reads(), self.text.reads())

    def settings(self) -> dict[str, Any]:
        """Those of the parts."""
        return {"structure": self.structure.settings(), "text": self.text.settings()}

    def save(self, folder: Path) -> None:
        """A folder each, structure/ and text/, with the files of their families."""
        for name, part in self._parts():
            (folder / name).mkdir()
            part.save(folder / name)

    def _parts(self) -> list[tuple[str, Encoder]]:
        return [("structure", self.structure), ("text", self.text)]

    @classmethod
    def load(cls, folder: Path, context: dict[str, Any]) -> Self:
        """See `Encoder.load`; `context["backbone"]` is the shared frozen encoder."""
        structure: Any = StructureEncoder.load(folder / "structure", context)
        return cls(structure, EmbeddingsEncoder.load(folder / "text", context))


def structure_part(encoder: Encoder) -> Encoder:
    """The part of an encoder that speaks of structures; the encoder itself where it is not a joined one."""
    return encoder.structure if isinstance(encoder, JoinedEncoder) else encoder


def text_part(encoder: Encoder) -> Encoder:
    """The part of an encoder that speaks of text; the encoder itself where it is not a joined one."""
    return encoder.text if isinstance(encoder, JoinedEncoder) else encoder
