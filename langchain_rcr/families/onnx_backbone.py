"""A frozen BERT read by ONNX Runtime: no torch and no transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.files import read_json, write_json, write_text
from langchain_rcr.basics.progress import spread
from langchain_rcr.basics.rows import FloatArray
from langchain_rcr.basics.section import show
from langchain_rcr.errors import InputError, refusing
from langchain_rcr.families import bert
from langchain_rcr.families.base import DEFAULT_BASE
from langchain_rcr.families.model_files import (
    INSIDE,
    LIMITS,
    Pooling,
    PretrainedBackbone,
    Read,
    model_folder,
    special_tokens,
    token_ids,
    unit,
)
from langchain_rcr.families.untrusted import check_saved_files, check_tokenizer


class OnnxBackbone(PretrainedBackbone):
    """A frozen BERT from a local folder or `package:NAME`; for the arguments see `PooledTransformer`.

    It reads each text by itself, so that its vectors are always the same.
    """

    def __init__(self, base: str, *, pooling: Pooling = "mean", max_length: int = 256, saved: bool = False) -> None:
        require("onnxruntime", "offline" if base == DEFAULT_BASE else "onnx")
        if pooling not in ("mean", "cls"):
            raise InputError(f"pooling must be mean or cls, not {show(pooling)}")
        if max_length < 1:
            raise InputError(f"max_length must be at least 1, not {show(max_length)}")
        folder = Path(model_folder(base))
        if not folder.is_dir():
            raise InputError(f"model '{base}': without torch it must be a local folder or package:NAME")
        if saved:
            check_saved_files(folder)
        self.base, self.pooling = INSIDE if Path(base).is_dir() else base, pooling
        with refusing(f"model '{base}' can't be read by ONNX Runtime"):
            self._shape = bert.Shape.of(read_json(folder / "config.json", ()))
            arrays = load_file(folder / "model.safetensors")
            self._arrays = arrays if "words" in arrays else bert.arranged(self._shape, arrays)
            bert.check(self._shape, self._arrays)
            # Only ONNX Runtime reads int8.
            self.kind = "onnx" if self._arrays["words"].dtype == np.int8 else "transformer"
            self._settings = read_json(folder / "tokenizer_config.json", ())
            self._tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
            limit = self._settings.get("model_max_length", max_length)
            self.max_length = int(min(max_length, self._shape.max_position_embeddings, limit))
            self.dim = self._shape.hidden_size
            self.embed(["?"])

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the session is rebuilt."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_session", "_tokenizer")}

    @cached_property
    def _session(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # many questions at once, each in one thread
        options.enable_cpu_mem_arena = False
        graph = bert.graph(self._shape, self._arrays)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        session.disable_fallback()  # falling back to another device needs the file kept in memory
        session.__dict__.pop("_model_bytes", None)
        return session

    @cached_property
    def _tokenizer(self) -> tuple[Any, frozenset[int | None]]:
        """The tokenizer, and the ids of its special tokens except that of unknown words."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._tokenizer_json)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_length)
        named = special_tokens(self._settings)
        ids = {name: tokenizer.token_to_id(token) for name, token in named.items()}
        return tokenizer, frozenset(ids.values()) - {ids.get("unk_token"), None}

    def read(self, texts: Sequence[str]) -> Read:
        """See `LocalBackbone.read`: tokens in context."""
        (tokenizer, special), session = self._tokenizer, self._session
        pooled = np.zeros((len(texts), self.dim), dtype=np.float32)
        tokens = [np.zeros((0, self.dim), dtype=np.float32)] * len(texts)

        def embedded(ids: Sequence[int]) -> tuple[FloatArray, FloatArray]:
            last, inner = session.run(("last", "inner"), {"words": bert.looked_up(self._arrays, ids)})
            whole = last[0, 0] if self.pooling == "cls" else last[0].mean(axis=0)
            return whole, inner[0, [at for at, token in enumerate(ids) if token not in special]]

        every = token_ids(tokenizer, texts, self.max_length, special=True)
        filled = [row for row, ids in enumerate(every) if ids]
        read = spread(embedded, [every[row] for row in filled], "reading questions")
        for row, (whole, inner) in zip(filled, read, strict=True):
            pooled[row], tokens[row] = whole, inner
        return unit(pooled), tokens

    def for_onnx(self, *, int8: bool = False) -> OnnxBackbone:
        """The same model, ready to be stored in a checkpoint, in int8 or as it is."""
        stored = copy.copy(self)
        stored.base = INSIDE
        if int8 and self.kind != "onnx":
            stored.kind, stored._arrays = "onnx", bert.smaller(self._arrays)
            stored.__dict__.pop("_session", None)  # a model that was reopened has one already
        return stored

    def save(self, folder: Path) -> None:
        """See `PretrainedBackbone.save`."""
        tokenizer = json.loads(self._tokenizer_json) | {"padding": None, "truncation": None}
        check_tokenizer(tokenizer, self._shape.vocab_size)
        folder.mkdir()
        small = self.kind == "onnx"
        arrays = self._arrays if small else bert.spread(self._shape, self._arrays)
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(whole, folder / "model.safetensors", None if small else {"format": "pt"})
        write_json(folder / "config.json", self._shape.config())
        write_text(folder / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False))
        kept = {name: self._settings[name] for name in LIMITS if name in self._settings}
        write_json(folder / "tokenizer_config.json", kept | special_tokens(self._settings))
