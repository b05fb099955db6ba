"""Contextual vectors of every token of a text, for selectors that compare tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.schema import DEFAULT_BASE

if TYPE_CHECKING:
    from langchain_rcr.families.transformer import PooledTransformer


class TokenVectors(NamedTuple):
    """The tokens of n texts, P in all, text after text.

    Args:
        lengths: (n,) int, tokens of each text.
        ids: (P,) int, which token of the vocabulary each one is.
        vectors: (P, D) floats, of any length: the tokens' vectors in their context.
    """

    lengths: np.ndarray
    ids: np.ndarray
    vectors: np.ndarray


EmbedTokens: TypeAlias = Callable[[Sequence[str]], TokenVectors]
"""Embeds every token of the texts given."""


class TransformerTokens:
    """Contextual token vectors of a frozen transformer, loaded when first asked; special tokens are left out.

    Args:
        base: hub name, local folder or `package:NAME`.
        max_length: tokens read of a text.
        layer: whose output is taken, from 0, the embeddings, to the last; None: three quarters of the way up, where
            BERTScore reads BERT and DeBERTa (9 of 12 layers, 18 of 24).
        batch_size: texts in a forward pass.

    Raises:
        InputError: when first asked: the model can't be loaded, or has no such layer.
    """

    def __init__(
        self, base: str = DEFAULT_BASE, *, max_length: int = 256, layer: int | None = None, batch_size: int = 64
    ) -> None:
        self.base, self.max_length, self.layer, self.batch_size = base, max_length, layer, batch_size

    @cached_property
    def _text(self) -> PooledTransformer:
        from langchain_rcr.families.transformer import PooledTransformer

        text = PooledTransformer(self.base, max_length=self.max_length).eval().requires_grad_(False)
        layers = text.model.config.num_hidden_layers
        if self.layer is not None and not 0 <= self.layer <= layers:
            raise InputError(f"layer is {self.layer}, but {self.base} has {layers} layers")
        return text

    def __call__(self, texts: Sequence[str]) -> TokenVectors:
        """Token ids and vectors, D the model's width."""
        import torch

        sequences = self._text.tokenize(texts).ids
        tokenizer = self._text.tokenizer
        special = np.array(sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}))
        kept = [np.flatnonzero(~np.isin(sequence, special)) for sequence in sequences]
        vectors: list[np.ndarray] = [np.empty((0, self._text.dim), dtype=np.float32)] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(sequences[i]))  # texts of a length together: no padding
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            with torch.inference_mode():
                hidden = self._hidden([sequences[i] for i in batch]).float().cpu().numpy()
            for i, rows in zip(batch, hidden, strict=True):
                vectors[i] = rows[kept[i]]
        ids = [np.asarray(sequence, dtype=np.int64)[rows] for sequence, rows in zip(sequences, kept, strict=True)]
        return TokenVectors(
            lengths=np.array([len(rows) for rows in kept], dtype=np.int64),
            ids=np.concatenate([np.empty(0, dtype=np.int64), *ids]),
            vectors=np.concatenate([np.empty((0, self._text.dim), dtype=np.float32), *vectors]),
        )

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Any:
        """The layer's output (b, longest, D) of one batch."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        model = self._text.model
        layer = 3 * model.config.num_hidden_layers // 4 if self.layer is None else self.layer
        ids = pad_sequence(
            [torch.tensor(sequence, dtype=torch.long) for sequence in sequences],
            batch_first=True,
            padding_value=self._text.tokenizer.pad_token_id or 0,
        )
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        out = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), output_hidden_states=True)
        return out.hidden_states[layer]
