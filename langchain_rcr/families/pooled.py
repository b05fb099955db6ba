"""A pretrained transformer as a function text → vector, and the encoder of the `transformer` family."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, Self, get_args

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from langchain_rcr.basics.files import digest, read_json, write_json
from langchain_rcr.basics.items import Item
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import FloatArray, IntArray
from langchain_rcr.basics.section import show
from langchain_rcr.errors import CheckpointError, InputError, refusing
from langchain_rcr.families.encoder import Bounded, Encoder
from langchain_rcr.families.encoding import Backbone, check_digest
from langchain_rcr.families.model_files import LIMITS, MAX_CHARACTERS, Pooling, Read, model_folder, special_tokens
from langchain_rcr.families.untrusted import check_kind, check_saved_files, check_tokenizer, entries

_LOADING = Lock()
_PLAIN_SIZE = 1 << 20
"""Numbers in a configuration up to this need no justification; larger ones must be a size of the model's tensors."""
_UNSAVED = 1 << 20
"""How many numbers a model may hold besides its saved ones, such as positions."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """N token sequences of different lengths; a batch is padded when it is read."""

    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: IntArray) -> Tokens:
        """The sequences of some rows, in that order."""
        return Tokens([self.ids[row] for row in rows])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Use transformers without its progress bars, and in one thread at a time: its lazy imports aren't thread-safe."""
    with _LOADING:
        from transformers.utils import logging

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()


def _check_saved_model(folder: Path) -> None:
    """Raise a `CheckpointError` if transformers could do more with a checkpoint's model than open a text encoder.

    It also refuses a model that would take much more memory than its weights.
    """
    from transformers import AutoConfig, AutoModel

    config = check_saved_files(folder)
    with refusing(f"{folder}", CheckpointError):
        with refusing("model.safetensors"), safe_open(folder / "model.safetensors", framework="np") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - not a dict
        sizes = [math.prod(shape) for shape in shapes]
        sides = (side for shape, size in zip(shapes, sizes, strict=True) if size for side in shape)
        largest = max([_PLAIN_SIZE, *sides])
        for key, number in entries(config):
            if isinstance(number, int) and abs(number) > largest:
                raise InputError(f"config.json: {key} = {show(number)} doesn't fit the weights beside it")
        with refusing("config.json"), Bounded(_UNSAVED, 10_000 + 200 * len(sizes)), torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.for_model(**config))
        described, saved = sum(parameter.numel() for parameter in model.parameters()), sum(sizes)
        if described > 2 * saved + _UNSAVED:  # tied weights are saved once
            raise InputError(f"config.json describes a model of {described:,} numbers, and its weights have {saved:,}")


def _saved_tokenizer(folder: Path) -> Any:
    """The tokenizer in a checkpoint; only the settings that `PooledTransformer.save` writes count."""
    from transformers import PreTrainedTokenizerFast

    settings = read_json(folder / "tokenizer_config.json", ())
    limits = {name: settings[name] for name in LIMITS if settings.get(name) is not None}
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, **limits, **special_tokens(settings))


class PooledTransformer(nn.Module):
    """A pretrained transformer with its tokenizer, as a function text → vector.

    Args:
        base: hub name, local folder or `package:NAME`.
        pooling: mean over the tokens, or the first token's vector.
        max_length: tokens read of a text; the rest is cut off.
        saved: whether the folder is part of a checkpoint, which anybody may have written (`_check_saved_model`).
        offline: whether a hub name is looked for in the hub's cache only.
    """

    def __init__(
        self, base: str, *, pooling: Pooling = "mean", max_length: int = 256, saved: bool = False, offline: bool = False
    ) -> None:
        super().__init__()
        if pooling not in get_args(Pooling):
            raise InputError(f"pooling must be one of {', '.join(get_args(Pooling))}, not {show(pooling)}")
        self.base, self.pooling = base, pooling
        folder = model_folder(base)
        local = Path(folder).is_dir()
        # A local model needs neither the hub nor the user's token, whatever it references.
        options = {"trust_remote_code": False, "local_files_only": local or offline, "token": False if local else None}
        with undisturbed(), refusing(f"model '{base}' can't be loaded (a hub name, a local folder or package:NAME)"):
            from transformers import AutoModel, AutoTokenizer

            if saved:
                _check_saved_model(Path(folder))
                self.tokenizer: Any = _saved_tokenizer(Path(folder))
            else:
                self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            # transformers 5 would take the file's own type, and half precision is too coarse to train in.
            self.model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
        limit = getattr(self.model.config, "max_position_embeddings", None) or max_length
        # The tokenizer's limit is smaller for models that reserve positions (RoBERTa: 2).
        self.max_length = int(min(max_length, limit, self.tokenizer.model_max_length))
        self.dim = int(self.model.config.hidden_size)

    # A call with output_hidden_states leaves hooks on the model: closures, which can't be pickled and are only
    # installed when a model is built. So we pickle class, configuration and tensors, and rebuild the model.
    def __getstate__(self) -> dict[str, Any]:
        tensors = [dict(self.model.named_parameters(remove_duplicate=False)), dict(self.model.named_buffers())]
        return {**self.__dict__, "_modules": {}, "_pickled": (type(self.model), self.model.config, tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, config, tensors = state.pop("_pickled")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        with torch.device("meta"):
            self.model = kind(config)
        for group, named in zip(("_parameters", "_buffers"), tensors, strict=True):
            for name, tensor in named.items():
                module, _, attribute = name.rpartition(".")
                getattr(self.model.get_submodule(module), group)[attribute] = tensor
        self.model.train(self.training)

    @cached_property
    def vocabulary(self) -> str:
        """A digest of the tokenizer: its tokens, and the ids of a probe text that reveals casing and special tokens."""
        probe = self.tokenizer("What's the Größe of the 2nd-largest STATE?")["input_ids"]
        return digest([sorted(self.tokenizer.get_vocab().items()), probe])

    def check_storable(self) -> None:
        """Raise an `InputError` if `_check_saved_model` would refuse what `save` writes."""
        with refusing(f"model '{self.base}' can't be kept in a checkpoint"):
            if not self.tokenizer.is_fast:
                raise InputError("its tokenizer has no tokenizer.json")
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()  # `tokenize` leaves its limit set
            backend.no_padding()
            check_kind(self.model.config.to_dict())
            check_tokenizer(json.loads(backend.to_str()), self.model.config.vocab_size)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as `AutoModel.from_pretrained` opens them."""
        self.check_storable()
        with undisturbed():
            self.model.save_pretrained(folder, max_shard_size="1TB")  # one file, see `_check_saved_model`
        self.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | {of: getattr(self.tokenizer, of) for of in LIMITS}
        write_json(folder / "tokenizer_config.json", settings | special_tokens(self.tokenizer.special_tokens_map))

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Token ids, cut at `max_length`."""
        if not texts:
            return Tokens([])
        cut = [text[: MAX_CHARACTERS * self.max_length] for text in texts]
        with refusing(f"the tokenizer of model '{self.base}' fails"):
            encoded = self.tokenizer(cut, truncation=True, max_length=self.max_length, return_attention_mask=False)
        return Tokens(encoded["input_ids"])

    def forward(self, tokens: Tokens) -> Tensor:
        """(N, D), pooled last hidden states."""
        ids, mask = self._padded(tokens)
        return self._pooled(self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """(N, D) of last hidden states (N, T, D)."""
        if self.pooling == "cls":
            return hidden[:, 0]
        weight = mask.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0)

    def _padded(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Ids and mask (N, T) on the model's device."""
        lengths = np.array([len(sequence) for sequence in tokens.ids], dtype=np.int64)
        mask = np.arange(max(1, lengths.max(initial=1))) < lengths[:, None]
        ids = np.full(mask.shape, self.tokenizer.pad_token_id or 0, dtype=np.int64)
        ids[mask] = np.fromiter(chain.from_iterable(tokens.ids), np.int64, lengths.sum())
        there = [torch.from_numpy(array).to(self.model.device, non_blocking=True) for array in (ids, mask)]
        return there[0], there[1].long()

    @torch.inference_mode()
    def read(self, texts: Sequence[str], batch_size: int = 64) -> Read:
        """Vectors of texts (N, D) and, from the same pass, of each text's tokens (T, D), without special ones.

        Token vectors come from three quarters of the way up, as in BERTScore (BERT: layer 9 of 12, DeBERTa: 18 of 24).
        """
        sequences = self.tokenize(texts).ids
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        layer = 3 * self.model.config.num_hidden_layers // 4
        pooled = np.zeros((len(texts), self.dim), dtype=np.float32)
        tokens: list[FloatArray] = [np.zeros((0, self.dim), dtype=np.float32)] * len(texts)
        order = sorted(range(len(texts)), key=lambda row: -len(sequences[row]))
        for start in track(range(0, len(order), batch_size), "reading questions"):
            rows = order[start : start + batch_size]
            ids, mask = self._padded(Tokens([sequences[row] for row in rows]))
            states = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            pooled[rows] = self._pooled(states.last_hidden_state, mask).float().cpu().numpy()
            for row, vectors in zip(rows, states.hidden_states[layer].float().cpu().numpy(), strict=True):
                kept = [at for at, token in enumerate(sequences[row]) if token not in special]
                tokens[row] = vectors[kept]
        return pooled, tokens


class TransformerEncoder(Encoder):
    """A `PooledTransformer` whose weights are all trained.

    With `normalize`, vectors are scaled to length 1, as sentence encoders do and the paper's BERT doesn't.
    """

    batch_size = 64
    arguments = ("pooling", "max_length", "normalize")

    def __init__(self, base: str, *, normalize: bool = False, **options: Any) -> None:
        super().__init__()
        self.text, self.normalize = PooledTransformer(base, **options), normalize
        self.dim, self.pooling, self.max_length = self.text.dim, self.text.pooling, self.text.max_length

    def featurize(self, items: Sequence[Item]) -> Tokens:
        """See `Encoder.featurize`."""
        return self.text.tokenize([item.text for item in items])

    def forward(self, features: Tokens) -> Tensor:
        """See `Encoder.forward`."""
        out: Tensor = self.text(features)
        return nn.functional.normalize(out, dim=-1) if self.normalize else out

    def order(self, features: Tokens) -> IntArray:
        """Longest first."""
        return np.argsort([-len(ids) for ids in features.ids], kind="stable")

    def reads(self) -> tuple[Any, ...]:
        """See `Encoder.reads`."""
        return (self.text.vocabulary, self.max_length)

    def settings(self) -> dict[str, Any]:
        """See `Encoder.settings`."""
        return super().settings() | {"vocabulary": self.text.vocabulary}

    def save(self, folder: Path) -> None:
        """Write encoder.json beside what `AutoModel.from_pretrained` opens."""
        self.text.save(folder)
        write_json(folder / "encoder.json", {"base": self.text.base, **self.settings()})

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """See `Encoder.load`."""
        arguments = read_json(folder / "encoder.json", ("base", "vocabulary"))
        base, vocabulary = arguments.pop("base"), arguments.pop("vocabulary")
        with refusing(f"{folder}", CheckpointError):
            encoder = cls(str(folder), **arguments, saved=True)
            encoder.encode([Item("?")])
        encoder.text.base = base
        check_digest(folder / "tokenizer.json", encoder.text.vocabulary, vocabulary)
        return encoder
