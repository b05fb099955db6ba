"""Speculative decoding with guessed answers: what the model would write greedily, in far fewer passes.

A pass over prompt and guess gives the model's own choice at every place at once. Up to the first place where it
differs, the guess is what greedy decoding would have written; there its own token follows, and the rest of the guess
is tried again behind it, because a wrong name often leaves the rest as it was. The answer never depends on the guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Draft:
    """One answer in the making.

    Attributes:
        prompt: tokens of the prompt.
        guess: tokens that the answer may go on with; empty: none.
        written: tokens of the answer that are certain.
        done: whether the answer is complete.
    """

    prompt: list[int]
    guess: list[int]
    written: list[int] = field(default_factory=list)
    done: bool = False


@torch.inference_mode()
def verify(
    model: Any,
    drafts: Sequence[Draft],
    *,
    pad: int,
    end: Callable[[list[int], int], int | None],
    longest: int,
) -> None:
    """In one pass, let the model write what its answers share with the guesses, and one token of its own behind it.

    Args:
        model: a causal language model of transformers.
        drafts: the answers, updated in place; none is done.
        pad: a token for padding.
        end: (tokens of an answer, how many of them were looked at before) → how many it has at its end, None: it
            goes on.
        longest: tokens of an answer at most.
    """
    for draft in drafts:
        draft.guess = draft.guess[: longest - len(draft.written)]
    for draft, choices in zip(drafts, _choices(model, drafts, pad), strict=True):
        guess, before = draft.guess, len(draft.written)
        agreed = next(
            (n for n, (own, other) in enumerate(zip(choices, guess, strict=False)) if own != other), len(guess)
        )
        draft.written += choices[: agreed + 1]
        draft.guess = guess[agreed + 1 :]
        length = end(draft.written, before)
        if length is not None or len(draft.written) >= longest:
            draft.written = draft.written[: min(longest, length or longest)]
            draft.done = True


def _choices(model: Any, drafts: Sequence[Draft], pad: int) -> list[list[int]]:
    """The likeliest token after what is written and after each token of the guess, for each draft."""
    known = [draft.prompt + draft.written for draft in drafts]
    left, right = max(map(len, known)), max(len(draft.guess) for draft in drafts)
    ids = torch.full((len(drafts), left + right), pad)
    mask = torch.zeros(len(drafts), left + right, dtype=torch.long)
    for row, (draft, text) in enumerate(zip(drafts, known, strict=True)):
        start, stop = left - len(text), left + len(draft.guess)
        ids[row, start:stop] = torch.tensor(text + draft.guess)
        mask[row, start:stop] = 1
    logits = model(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0).to(model.device),
        logits_to_keep=right + 1,
        use_cache=False,
    ).logits
    chosen = logits.argmax(-1).tolist()
    return [row[: len(draft.guess) + 1] for row, draft in zip(chosen, drafts, strict=True)]
