"""Greedy decoding of several answers at once, each from the keys and values of its own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from transformers import StoppingCriteria
from transformers.cache_utils import Cache, DynamicLayer

from langchain_rcr.answers import cut

Known: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of a text in each layer, (heads, tokens, width)."""

_KEPT = 0.75
"""When no more than this share of a batch is still being written, the rest leaves it, at the price of a copy."""


class Ends:
    """Where answers end: at a stop sequence behind something else than blanks and thoughts, or an end of sequence.

    Attributes:
        stop: stop sequences.
        tokens: that end a sequence.
        pad: a token for padding.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], ends: int | list[int] | None) -> None:
        ends = ends if ends is not None else tokenizer.eos_token_id
        self.stop = stop
        self.tokens = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (self.tokens or [0])[0]
        self._tokenizer = tokenizer
        self._last = {sequence[-1] for sequence in stop if sequence}
        self._texts: dict[int, str] = {}

    def at_end(self, tokens: list[int]) -> bool:
        """Whether the last of an answer's tokens ends it."""
        token = tokens[-1]
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        # Decoding whole answers at every step would cost more than a small model does.
        return token in self.tokens or (
            not self._last.isdisjoint(self._texts[token])
            and cut(self._tokenizer.decode(tokens, skip_special_tokens=True), self.stop)[1]
        )


class Answer:
    """An answer that is being written.

    Attributes:
        tokens: of the answer so far.
        stopped: whether it has come to its end.
        ended: whether nothing more is to be written: it has stopped, or is as long as it may be.
        longest: most tokens that it may have.
    """

    def __init__(self, ends: Ends, longest: int) -> None:
        self.tokens: list[int] = []
        self.stopped = self.ended = False
        self.longest = longest
        self._ends = ends

    def add(self, token: int) -> None:
        """Write a token, unless the answer has ended."""
        if not self.ended:
            self.tokens.append(token)
            self.stopped = self._ends.at_end(self.tokens)
            self.ended = self.stopped or len(self.tokens) == self.longest


class Stop(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Writes what transformers generates into answers, and ends each row by itself."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Which rows have ended (B,), once their last tokens (B, T)[:, −1] are written."""
        for answer, token in zip(self._answers, input_ids[:, -1].tolist(), strict=True):
            answer.add(token)
        return torch.tensor([answer.ended for answer in self._answers], device=input_ids.device)


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of a batch in tensors with room for more: transformers' own copies all at every token.

    Args:
        texts: keys and values of each row; they come to stand at the right of the longest.
        room: further tokens there is room for.
    """

    def __init__(self, texts: Sequence[tuple[torch.Tensor, torch.Tensor]], room: int) -> None:
        super().__init__()
        longest = max(keys.shape[-2] for keys, _ in texts)
        self._held = [own.new_zeros(len(texts), own.shape[0], longest + room, own.shape[-1]) for own in texts[0]]
        for row, text in enumerate(texts):
            for held, own in zip(self._held, text, strict=True):
                held[row, :, longest - own.shape[-2] : longest] = own
        self.dtype, self.device, self.is_initialized = self._held[0].dtype, self._held[0].device, True
        self._show(longest)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind what is there; all keys and values, as views."""
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        return self._show(end)

    def keep(self, rows: torch.Tensor) -> None:
        """Let the other rows go."""
        self._held = [held.index_select(0, rows) for held in self._held]
        self._show(self.keys.shape[-2])

    def _show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (held[:, :, :length] for held in self._held)
        return self.keys, self.values


def go_on(model: Any, answers: Sequence[Answer], known: Sequence[Known]) -> None:
    """Write answers to their ends, together.

    Args:
        model: of transformers, with a cache whose layers are all `DynamicLayer`.
        answers: each with at least one token.
        known: keys and values of each prompt and of all tokens of its answer but the last.
    """
    device, longest = model.device, max(own[0][0].shape[-2] for own in known)
    room = max(answer.longest - len(answer.tokens) for answer in answers)
    layers = [_Layer(texts, room) for texts in zip(*known, strict=True)]
    past = Cache(layers=layers)
    mask = torch.ones(len(known), longest + room, dtype=torch.long, device=device)
    for row, own in enumerate(known):
        mask[row, : longest - own[0][0].shape[-2]] = 0
    left, width = list(answers), longest
    while left:
        width += 1
        seen = mask[:, :width]
        logits = model(
            input_ids=torch.tensor([[answer.tokens[-1]] for answer in left], device=device),
            attention_mask=seen,
            position_ids=seen.sum(-1, keepdim=True) - 1,
            past_key_values=past,
            use_cache=True,
        ).logits[:, -1]
        for answer, token in zip(left, logits.argmax(-1).tolist(), strict=True):
            answer.add(token)
        rows = [row for row, answer in enumerate(left) if not answer.ended]
        if len(rows) <= _KEPT * len(left):
            kept = torch.tensor(rows, dtype=torch.long, device=device)
            left, mask = [left[row] for row in rows], mask[kept]
            for layer in layers:
                layer.keep(kept)
