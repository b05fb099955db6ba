"""Rules for a set of picks: different programs, room in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, SupportsInt

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import Row

TOKENIZERS = "a LangChain model, a tokenizer with encode, or a function from a text to its tokens or their number"
"""What `token_counter` takes, in words."""


class DifferentPrograms:
    """No two picks with the same program (`ProgramSpec.key`), while others are left."""

    soft = True

    def allows(self, picked: Sequence[Row], candidate: Row) -> bool:
        """Whether no pick has the candidate's program."""
        return all(row.program != candidate.program for row in picked)


class TokenBudget:
    """The picks' texts, each with a line break, fit whole into `max_tokens`. What doesn't fit is skipped."""

    soft = False

    def __init__(self, max_tokens: int, count: Callable[[str], int], text: Callable[[dict[str, Any]], str]) -> None:
        self._max, self._count, self._text = max_tokens, count, text
        self._tokens: dict[str, int] = {}

    def allows(self, picked: Sequence[Row], candidate: Row) -> bool:
        """Whether the candidate still fits."""
        return sum(map(self._of, (*picked, candidate))) <= self._max

    def _of(self, row: Row) -> int:
        if row.id not in self._tokens:
            self._tokens[row.id] = self._count(self._text(row.example) + "\n")
        return self._tokens[row.id]


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts the tokens of a text; for what it takes see `TOKENIZERS`.

    Tokens may be a sequence or an array. The tokenizer, or later what it returns, may be an `InputError`.
    """
    named = (getattr(tokenizer, name, None) for name in ("get_num_tokens", "encode"))
    function = next((one for one in (*named, tokenizer) if callable(one)), None)
    if function is None or isinstance(tokenizer, str):
        raise InputError(f"tokenizer must be {TOKENIZERS}, not {type(tokenizer).__name__}")

    def count(text: str) -> int:
        tokens = function(text)
        dimensions = getattr(tokens, "ndim", None)
        # A mapping, which transformers' tokenizers return when called, has entries that aren't tokens.
        if isinstance(tokens, Sized) and dimensions in (None, 1) and not isinstance(tokens, str | bytes | Mapping):
            return len(tokens)
        try:
            if isinstance(tokens, SupportsInt) and not dimensions:
                return int(tokens)
        except (ValueError, OverflowError):  # not a number, or infinitely many
            pass
        raise InputError(f"tokenizer must return tokens or their number, not {type(tokens).__name__} ({tokens!r:.80})")

    return count
