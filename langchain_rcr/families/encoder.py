"""The encoder interface: text to features once, features to vectors at every training step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from langchain_rcr.basics.files import digest, read_json, write_json
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import Rows
from langchain_rcr.errors import CheckpointError, InputError, RCRError
from langchain_rcr.families.bounds import Bounded, refusing

if TYPE_CHECKING:
    from langchain_rcr.families.backbone import Backbone


class Features(Protocol):
    """N featurised items: token ids, n-gram bags, frozen vectors. They don't depend on trainable parameters."""

    def __len__(self) -> int:
        """N."""
        ...

    def select(self, rows: NDArray[np.int64]) -> Self:
        """The features of some rows, in that order."""
        ...


class Vocabulary(ABC):
    """What an encoder takes from the training pool, such as its n-grams; stored in a separate JSON file."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads back."""

    @classmethod
    @abstractmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""

    @cached_property
    def digest(self) -> str:
        """Equal for equal vocabularies."""
        return digest(self.to_json())

    @classmethod
    def load(cls, file: Path, expected: object) -> Self:
        """Read a file that holds `to_json`.

        Raises:
            CheckpointError: it is missing or damaged, or its digest is not the expected one.
        """
        value = read_json(file, ())
        try:
            vocabulary = cls.from_json(value)
        except (RCRError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{file} can't be used: {error}") from None
        check_digest(file, vocabulary.digest, expected)
        return vocabulary


def check_digest(file: Path, found: str, expected: object) -> None:
    """Refuse a vocabulary that is not the one its encoder was saved with.

    Raises:
        CheckpointError: naming the file.
    """
    if found != expected:
        raise CheckpointError(
            f"{file} is not the one that {file.parent.name}/encoder.json was written with (files of two checkpoints?)"
        )


_SMALL = 1 << 20
"""Numbers of a tensor that an encoder may make whatever it has saved."""


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: {path.name} is missing")
    try:
        with refusing(f"{path} is damaged"):
            tensors: dict[str, Tensor] = load_file(path)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise CheckpointError(f"{path} has weights that are not finite numbers")
    return tensors


class Encoder(nn.Module, ABC):
    """One of the three encoders E_x, E_z, E_c: items → (N, D).

    A subclass implements `featurize` (text → features; slow, done once a text) and `forward` (features → vectors;
    differentiable, done at every training step). It names those arguments of its constructor that decide its vectors:
    `load` restores it from them and from its tensors.
    """

    arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of the constructor that decide its vectors; also attributes. The content of encoder.json."""
    vocabularies: ClassVar[Mapping[str, type[Vocabulary]]] = {}
    """Further such arguments, each stored in a separate file unless it is None."""
    grown: ClassVar[tuple[str, ...]] = ()
    """Vocabularies that change as examples are added (`grow`): they take no part in what tells policies apart."""
    fitted: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of tensors whose shapes come from a fit, not from the arguments."""

    rates: ClassVar[Mapping[str, float]] = {}
    """GRPO's learning rates of parameters that are not a net's weights, by how their names begin; decayed like `lr`."""

    batch_size: ClassVar[int] = 512
    """Texts per batch when encoding without gradients."""
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

    def grow(self, items: Sequence[Item]) -> None:
        """Take in examples that were added to a pool, without training; for an encoder that can."""

    def drafted(self, features: Any, drafts: Sequence[str | None]) -> Features:
        """Features of questions that a draft of each one's program is known of; for a family that takes drafts.

        Args:
            features: of the questions.
            drafts: a program that may be wrong, one a question; None: there is none.
        """
        raise NotImplementedError

    def logged(self) -> dict[str, float]:
        """Parameters that mean something by themselves, in their units: GRPO's log says how they moved."""
        return {}

    def reads(self) -> tuple[Any, ...]:
        """What `featurize` depends on: encoders of one class with equal `reads()` give the same features."""
        return (id(self),)

    def settings(self) -> dict[str, Any]:
        """JSON values that, with the tensors, decide its vectors; a vocabulary stands there by its digest."""
        known = {name: getattr(self, name) for name in self.vocabularies}
        digests = {name: None if value is None else value.digest for name, value in known.items()}
        return {name: getattr(self, name) for name in self.arguments} | digests

    def save(self, folder: Path) -> None:
        """Write encoder.json, model.safetensors and a JSON file for each vocabulary into an existing folder."""
        write_json(folder / "encoder.json", self.settings() | {"backbone": self.backbone is not None})
        for name in self.vocabularies:
            if getattr(self, name) is not None:
                write_json(folder / f"{name}.json", getattr(self, name).to_json())
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """Read an encoder back.

        Args:
            folder: what `save` wrote.
            backbone: the frozen text encoder that the three encoders share, where there is one.

        Raises:
            CheckpointError: a file is missing or doesn't fit.
        """
        file = folder / "encoder.json"
        arguments = read_json(file, ("backbone", *cls.vocabularies))
        for name, kind in cls.vocabularies.items():
            if arguments[name] is not None:
                arguments[name] = kind.load(folder / f"{name}.json", arguments[name])
        if arguments.pop("backbone"):
            if backbone is None:
                raise CheckpointError(f"{folder.parent} is not a complete checkpoint: backbone.json is missing")
            arguments["backbone"] = backbone
        weights = folder / "model.safetensors"
        tensors = _tensors(weights)
        most = max([_SMALL, *(tensor.numel() for tensor in tensors.values())])
        try:
            with refusing(f"{file} was not written by this version of langchain-rcr"), Bounded(most):
                encoder = cls(**arguments)
        except InputError as error:
            raise CheckpointError(str(error)) from None
        encoder._take(tensors, weights)
        return encoder

    def _take(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        try:
            for name, own in self.state_dict(keep_vars=True).items():
                if name in tensors and name.startswith(self.fitted):
                    own.data = own.new_empty(tensors[name].shape)
            self.load_state_dict(tensors)
        except RuntimeError as error:
            raise CheckpointError(
                f"{path} holds the weights of another model: {' '.join(str(error).split())[:300]}"
            ) from None

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
                batches = np.array_split(self.order(features), max(1, -(-len(features) // size)))
                for rows in track(batches, "encoding"):
                    if len(rows):
                        out[rows] = self(features.select(rows)).float().cpu().numpy()
        finally:
            self.train(was_training)
        return out

    def rows(self, features: Any) -> Rows:
        """`vectors` for a pool: sparse, where most of their numbers are 0."""
        return self.vectors(features)

    def order(self, features: Any) -> NDArray[np.int64]:
        """The order in which `vectors` processes the rows; batches of similar lengths need the least padding."""
        return np.arange(len(features))
