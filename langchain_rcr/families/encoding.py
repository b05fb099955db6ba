"""What every encoder does: text to features once, features to vectors. Doesn't load torch.

`BaseEncoder` keeps its arrays in NumPy, which suffices for closed-form fits and serving. For training by gradients,
`langchain_rcr.families.encoder.Encoder` keeps them in torch. Both share the code of the formulas; at the end is what
these need beyond the functions that NumPy and torch have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from langchain_rcr.basics.files import digest, read_json, write_json
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import BoolArray, DoubleArray, FloatArray, IntArray, Rows, SparseRows
from langchain_rcr.errors import CheckpointError, refusing


class Features(Protocol):
    """N featurised items, such as token ids, n-gram bags or frozen vectors. Training doesn't change them."""

    def __len__(self) -> int: ...

    def select(self, rows: IntArray) -> Self:
        """The features of some rows, in that order."""
        ...


class Backbone(Protocol):
    """A frozen text encoder that a family's encoders read through."""

    dim: int
    symmetric: bool
    """Whether a query and a pool entry with the same text get the same vector."""

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> FloatArray:
        """Unit vectors (N, d) of texts, which are queries or pool entries."""
        ...

    def describe(self, folder: Path) -> dict[str, Any]:
        """JSON values from which `load_backbone` restores it; may write files into `folder`."""
        ...


class Vocabulary(ABC):
    """What an encoder learns from the training pool, such as its n-grams; stored in its own JSON file."""

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
        """Read a file that holds `to_json`, or raise a `CheckpointError` if its digest is not the expected one."""
        value = read_json(file, ())
        with refusing(f"{file} can't be used", CheckpointError):
            vocabulary = cls.from_json(value)
        check_digest(file, vocabulary.digest, expected)
        return vocabulary


def check_digest(file: Path, found: str, expected: object) -> None:
    """Raise a `CheckpointError` unless a vocabulary is the one that its encoder was saved with."""
    if found != expected:
        raise CheckpointError(
            f"{file} is not the one that {file.parent.name}/encoder.json was written with (files of two checkpoints?)"
        )


class BaseEncoder(ABC):
    """One of the three encoders E_x, E_z, E_c: items → (N, D).

    A subclass implements `featurize` (text → features: slow, once per text) and `forward` (features → vectors). `load`
    restores it from the constructor arguments that it lists and the arrays that it names with `keep`.
    """

    arguments: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that determine its vectors and are also attributes. They make up encoder.json."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Further such arguments, left out of encoder.json if they are 0."""
    vocabularies: ClassVar[Mapping[str, type[Vocabulary]]] = {}
    """Further such arguments, each stored in its own file unless it is None."""
    grown: ClassVar[tuple[str, ...]] = ()
    """Vocabularies and arrays that `grow` changes, so the policy's fingerprint ignores them."""
    fitted: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of arrays whose shapes come from a fit rather than from the arguments."""
    rates: ClassVar[Mapping[str, float]] = {}
    """GRPO's learning rates for parameters that aren't network weights, by name prefix; they decay as `lr` does."""
    batch_size: ClassVar[int] = 512
    """Texts per batch when encoding without gradients."""
    trainable: ClassVar[bool] = False
    """Whether its arrays are torch tensors."""
    xp: ClassVar[Any] = np
    """The module whose functions its formulas call: NumPy or torch."""
    dim: int
    """D, the length of its vectors."""
    backbone: Backbone | None = None
    """The frozen text encoder it reads through, if any. The three encoders share one."""

    @abstractmethod
    def featurize(self, items: Sequence[Item]) -> Features:
        """Everything about the items that training doesn't change."""

    @abstractmethod
    def forward(self, features: Any) -> Any:
        """Vectors (N, D) float32 of featurised items."""

    def keep(self, name: str, array: NDArray[Any], *, trained: bool = False, saved: bool = True) -> None:
        """Keep an array that formulas read as an attribute, under its name in the file; `a.b` is attribute b of a.

        It may be `trained`, and is either `saved` in the checkpoint or derived from the arguments.
        """
        *places, last = name.split(".")
        owner: Any = self
        for place in places:
            owner.__dict__.setdefault(place, SimpleNamespace())
            owner = getattr(owner, place)
        setattr(owner, last, array)
        if saved:
            self.__dict__.setdefault("_kept", []).append(name)

    def given(self, array: NDArray[Any]) -> Any:
        """An array as the formulas take it."""
        return array

    def taken(self, values: Any) -> FloatArray:
        """A result of the formulas as an array, without gradients."""
        return np.asarray(values)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """All saved arrays by name."""
        kept: list[str] = self.__dict__.get("_kept", [])
        return {name: attrgetter(name)(self) for name in kept}

    def put(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite some of `tensors`; fitted ones may change shape."""
        for name, array in tensors.items():
            place, _, last = name.rpartition(".")
            setattr(attrgetter(place)(self) if place else self, last, array)

    def grow(self, items: Sequence[Item], *, labels_only: bool = False) -> None:  # noqa: B027
        """Learn from examples added to a pool, without training; with `labels_only`, only those with new labels."""

    def describe(self, items: Sequence[Item]) -> None:  # noqa: B027
        """After a fit, declare that the questions of these fitted examples describe what is in their programs."""

    @property
    def stale(self) -> bool:
        """Whether `grow` has taken in so much since the fit that another one is worth its time."""
        return False

    def keep_preferences(self, other: Any) -> None:  # noqa: B027
        """After a fit, take over from another encoder what was tuned on answers and doesn't depend on the examples."""

    def unseen(self, names: IntArray) -> BoolArray:
        """(N,) which examples the fit hasn't seen, by the hashes (N, 2) of question and program; none without a fit."""
        return np.zeros(len(names), dtype=np.bool_)

    def relevance(self, features: Any) -> DoubleArray:
        """(N,) from 0 to 1: how near questions are to the fitted ones, as a rank; 1 without a fit."""
        return np.ones(len(features))

    def drafted(self, features: Any, drafts: Sequence[str | None]) -> Features:
        """Features of questions with drafts of their programs, which may be wrong; for families that take drafts."""
        raise NotImplementedError

    def logged(self) -> dict[str, float]:
        """Interpretable parameters in their own units; GRPO logs how they change."""
        return {}

    def reads(self) -> tuple[Any, ...]:
        """What `featurize` depends on: encoders of one class whose `reads()` are equal share their features."""
        return (id(self),)

    def settings(self) -> dict[str, Any]:
        """JSON values that, with the tensors, determine its vectors. A vocabulary appears as its digest."""
        known = {name: getattr(self, name) for name in self.vocabularies}
        digests = {name: None if value is None else value.digest for name, value in known.items()}
        optional = {name: value for name in self.optional if (value := getattr(self, name))}
        return {name: getattr(self, name) for name in self.arguments} | optional | digests

    def save(self, folder: Path) -> None:
        """Write encoder.json, model.safetensors and a JSON file per vocabulary into an existing folder."""
        write_json(folder / "encoder.json", self.settings() | {"backbone": self.backbone is not None})
        for name in self.vocabularies:
            if getattr(self, name) is not None:
                write_json(folder / f"{name}.json", getattr(self, name).to_json())
        arrays = {name: np.asarray(array, order="C") for name, array in self.tensors().items()}
        save_file(arrays, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """Read an encoder back, over the frozen text encoder that it shares with the other two, if any."""
        file, weights = folder / "encoder.json", folder / "model.safetensors"
        arguments = read_json(file, ("backbone", *cls.vocabularies))
        for name, kind in cls.vocabularies.items():
            if arguments[name] is not None:
                arguments[name] = kind.load(folder / f"{name}.json", arguments[name])
        if arguments.pop("backbone"):
            if backbone is None:
                raise CheckpointError(f"{folder.parent} is not a complete checkpoint: backbone.json is missing")
            arguments["backbone"] = backbone
        with refusing(f"{weights} is damaged", CheckpointError):
            tensors = load_file(weights)
        if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
            raise CheckpointError(f"{weights} has weights that are not finite numbers")
        with refusing(f"{file} was not written by this version of langchain-rcr", CheckpointError):
            encoder = cls._empty(arguments, tensors)
        with refusing(f"{weights} holds the weights of another model", CheckpointError):
            encoder._fill(tensors)
        return encoder

    @classmethod
    def _empty(cls, arguments: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Self:
        """An encoder whose `tensors` are still to be filled; it may not take much more memory than they do."""
        return cls(**arguments)

    def _fill(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite all of `tensors`; a `ValueError` if names, shapes or types differ."""
        own = self.tensors()
        if strange := own.keys() ^ tensors.keys():
            raise ValueError(f"{min(strange)} is in one of both alone")
        for name, array in own.items():
            if tensors[name].shape != array.shape and not name.startswith(self.fitted):
                raise ValueError(f"{name} has shape {tensors[name].shape}, not {array.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            self.put({name: tensors[name].astype(array.dtype, copy=False) for name, array in own.items()})

    def encode(self, items: Sequence[Item]) -> FloatArray:
        """Vectors (N, D) float32 of items, without gradients."""
        return self.vectors(self.featurize(items))

    def vectors(self, features: Any) -> FloatArray:
        """Vectors (N, D) float32 of featurised items, without gradients."""
        if len(features) == 1:
            return self.taken(self.forward(features))
        out = np.empty((len(features), self.dim), dtype=np.float32)
        batches = np.array_split(self.order(features), max(1, -(-len(features) // self.batch_size)))
        for rows in track(batches, "encoding"):
            if len(rows):
                out[rows] = self.taken(self.forward(features.select(rows)))
        return out

    def rows(self, features: Any) -> Rows:
        """`vectors` of a pool; sparse in families whose vectors are mostly 0."""
        return self.vectors(features)

    def order(self, features: Any) -> IntArray:
        """The order in which `vectors` goes through the rows: grouping similar lengths needs the least padding."""
        return np.arange(len(features))


def sums(values: Any, owner: Any, count: int) -> Any:
    """(N, count): sums of values (N, S) with the same `owner` (S,), an ascending column number."""
    if not isinstance(values, np.ndarray):
        return values.new_zeros(len(values), count).index_add(1, owner, values)
    if len(values) == 1:  # faster
        return np.bincount(owner, values[0], minlength=count).astype(values.dtype)[None]
    out = np.zeros((len(values), count), dtype=values.dtype)
    if len(owner):
        firsts = np.flatnonzero(np.diff(owner, prepend=-1))
        out[:, owner[firsts]] = np.add.reduceat(values, firsts, axis=1)
    return out


def norms(values: Any) -> Any:
    """(N, 1): the norm of each row."""
    if not isinstance(values, np.ndarray):
        return values.norm(dim=1, keepdim=True)
    return np.sqrt(np.einsum("nd,nd->n", values, values))[:, None]


def times(values: Any, matrix: Any) -> Any:
    """(N, C): the matrix product of (N, D) and (D, C)."""
    return (values[0] @ matrix)[None] if len(values) == 1 else values @ matrix  # same result in half the time


def shifted(likely: Any, shift: Any, least: float) -> Any:
    """Likelihoods, clipped to `least` … 1 − `least`, with shifted log-odds."""
    if not isinstance(likely, np.ndarray):
        return (likely.logit(least) + shift).sigmoid()
    bounded = likely.clip(least, 1 - least)
    return 1 / (1 + np.exp(-(np.log(bounded / (1 - bounded)) + shift)))


def bag_sums(bags: SparseRows, weight: Any) -> Any:
    """(N, D): for each of N bags over V, the weighted sum of the rows of `weight` (V, D)."""
    if isinstance(weight, np.ndarray):
        return bags.times(weight)
    from torch import from_numpy
    from torch.nn.functional import embedding_bag

    columns, starts, values = (from_numpy(a).to(weight.device) for a in (bags.columns, bags.starts, bags.values))
    return embedding_bag(columns, weight, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
