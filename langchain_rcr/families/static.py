"""A text encoder without a network: a text is the sum of its tokens' input embeddings. Doesn't load torch.

The embeddings are those of a pretrained model, centred and projected onto their principal components. Frequent tokens
count less (Arora, Liang and Ma, 2017); frequencies follow from Zipf's law, since a tokenizer's vocabulary is roughly in
order of frequency. For the cost in answers see docs/trials.md ("Static vectors").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from langchain_rcr.basics.files import read_json, write_json
from langchain_rcr.errors import CheckpointError, InputError, refusing
from langchain_rcr.families.model_files import LocalBackbone, Read, model_folder, token_ids, unit
from langchain_rcr.families.untrusted import check_tokenizer

PREFIX = "static:"
"""Prefix of a base of which only the input embeddings are used."""
_DIM = 256
"""The most numbers in a token's vector."""
_COMMON = 1e-3
"""a of the weight a / (a + p) of a token of probability p, as published."""
_MATRICES = ("word_embeddings.weight", "embed_tokens.weight", "tok_embeddings.weight", "wte.weight")
"""Name endings of input embeddings in transformers."""


class StaticBackbone(LocalBackbone):
    """Frozen token vectors (V, d), in half precision, and the text of their tokenizer.json."""

    def __init__(self, tokens: NDArray[np.float16], tokenizer: str, *, max_length: int = 256) -> None:
        self._tokens, self._text, self._max_length, self.dim = tokens, tokenizer, max_length, tokens.shape[1]
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)
        ranks = np.arange(2, len(tokens) + 2)
        weights = _COMMON / (_COMMON + 1 / ranks / (1 / ranks).sum())
        self._weights = weights.astype(np.float32)

    @classmethod
    def of(cls, base: str, *, max_length: int = 256) -> Self:
        """Take the input embeddings out of a pretrained model: `package:NAME`, a local folder, or a name on the hub.

        An `InputError` if it can't be found, or has no tokenizer.json or no input embeddings under a known name.
        """
        with refusing(f"model '{base}' can't be loaded (a hub name, a local folder or package:NAME)"):
            weights, tokenizer = (_file(model_folder(base), name) for name in ("model.safetensors", "tokenizer.json"))
            with safe_open(weights, framework="np") as file:
                found = [name for name in file.keys() if name.endswith(_MATRICES)]  # noqa: SIM118 - not a dict
                if not found:
                    raise InputError(f"none of its tensors is named {' or '.join(_MATRICES)}")
                matrix = file.get_tensor(min(found, key=len)).astype(np.float32)
            value = read_json(tokenizer, ("model",)) | {"padding": None, "truncation": None}
            check_tokenizer(value, len(matrix))
        centred = matrix - matrix.mean(axis=0)
        directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :_DIM]  # the first principal components
        tokens = (centred @ directions).astype(np.float16)
        return cls(tokens, json.dumps(value, ensure_ascii=False), max_length=max_length)

    def read(self, texts: Sequence[str]) -> Read:
        """See `LocalBackbone.read`."""
        found = token_ids(self._tokenizer, texts, self._max_length, special=False)
        ids = [np.array(each, dtype=np.int64) for each in found]
        tokens = [self._tokens[each].astype(np.float32) for each in ids]
        sums = [self._weights[each] @ vectors for each, vectors in zip(ids, tokens, strict=True)]
        return unit(np.array(sums, dtype=np.float32).reshape(-1, self.dim)), tokens

    def describe(self, folder: Path) -> dict[str, Any]:
        """See `Backbone.describe`: everything is written, so that serving needs no other model."""
        inside = folder / "backbone"
        inside.mkdir(exist_ok=True)
        save_file({"tokens": self._tokens}, inside / "model.safetensors")
        write_json(inside / "tokenizer.json", json.loads(self._text))
        return {"kind": "static", "max_length": self._max_length}

    @classmethod
    def load(cls, folder: Path, *, max_length: int) -> Self:
        """Read what `describe` has written into a checkpoint, or raise a `CheckpointError`."""
        inside = folder / "backbone"
        with refusing(f"{inside} can't be used", CheckpointError):
            tokens = load_file(inside / "model.safetensors")["tokens"]
            if tokens.ndim != 2 or tokens.dtype != np.float16 or not np.isfinite(tokens).all():
                raise InputError("its token vectors are no matrix of finite numbers in half precision")
            check_tokenizer(read_json(inside / "tokenizer.json", ("model",)), len(tokens))
            return cls(tokens, (inside / "tokenizer.json").read_text(encoding="utf-8"), max_length=max_length)


def _file(folder: str, name: str) -> Path:
    """A file of a local folder, or of a model on the hub."""
    if Path(folder).is_dir():
        return Path(folder) / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(folder, name))
