"""Whether picks fit into a prompt, by their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, SupportsInt

from langchain_rcr.errors import InputError
from langchain_rcr.index.base import Row

TOKENIZERS = "a LangChain model, a tokenizer with encode, or a function from a text to its tokens or their number"
"""What `token_counter` takes, in words."""


def token_budget(
    max_tokens: int, tokenizer: Any, text: Callable[[dict[str, Any]], str]
) -> Callable[[Sequence[Row]], bool]:
    """A function that says whether examples' texts, each with a line break, fit whole into `max_tokens`."""
    count, tokens = token_counter(tokenizer), dict[str, int]()

    def fits(rows: Sequence[Row]) -> bool:
        for row in rows:
            if row.id not in tokens:
                tokens[row.id] = count(text(row.example) + "\n")
        return sum(tokens[row.id] for row in rows) <= max_tokens

    return fits


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
