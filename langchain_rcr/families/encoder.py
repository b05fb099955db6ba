"""What an encoder is: text to features once, features to vectors as often as training needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.items import Item

if TYPE_CHECKING:
    from langchain_rcr.families.backbone import Backbone


class Features(Protocol):
    """N featurised items: token ids, n-gram bags, frozen vectors. No trainable part took part in making them."""

    def __len__(self) -> int:
        """N."""
        ...

    def select(self, rows: NDArray[np.int64]) -> Self:
        """The features of some rows, in that order."""
        ...


class Encoder(nn.Module, ABC):
    """One of the three encoders E_x, E_z, E_c: items → (N, D).

    A subclass implements `featurize` (text → features; slow, done once a text) and `forward` (features → vectors;
    differentiable, done at every training step), what these two depend on, and how it is saved and loaded.
    """

    batch_size: ClassVar[int] = 512
    """Texts encoded at once without gradients."""
    dim: int
    """D, the length of its vectors."""
    backbone: Backbone | None = None
    """The frozen text encoder that it reads through, if any; saved once for all three encoders."""

    @abstractmethod
    def featurize(self, items: Sequence[Item]) -> Features:
        """Everything about the items that training doesn't change."""

    @abstractmethod
    def forward(self, features: Any) -> Tensor:
        """Vectors (N, D) float32 of featurised items; gradients flow to the trainable parameters."""

    @abstractmethod
    def reads(self) -> tuple[Any, ...]:
        """What `featurize` depends on: encoders of one class with equal `reads()` give the same features."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values that, with the weights, decide its vectors: the content of encoder.json."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what `load` needs into an existing folder."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """Read an encoder back.

        Args:
            folder: what `save` wrote.
            backbone: the frozen text encoder that the three encoders share, where there is one.

        Raises:
            CheckpointError: a file is missing or doesn't fit.
        """

    def encode(self, items: Sequence[Item], batch_size: int | None = None) -> NDArray[np.float32]:
        """Vectors (N, D) float32 of items, without gradients."""
        return self.vectors(self.featurize(items), batch_size)

    def vectors(self, features: Any, batch_size: int | None = None) -> NDArray[np.float32]:
        """Vectors (N, D) float32 of featurised items, without gradients, `batch_size` at a time."""
        size = batch_size or self.batch_size
        out = np.empty((len(features), self.dim), dtype=np.float32)
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                for rows in np.array_split(self.order(features), max(1, -(-len(features) // size))):
                    if len(rows):
                        out[rows] = self(features.select(rows)).float().cpu().numpy()
        finally:
            self.train(was_training)
        return out

    def order(self, features: Any) -> NDArray[np.int64]:
        """The order in which `vectors` goes through the rows; texts of like length together pad least."""
        return np.arange(len(features))
