"""A cheap look at a text, before a parser that we don't control sees it."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|\w+|\S""")
_OPENING = frozenset({"(", "[", "{", "case"})
_CLOSING = frozenset({")", "]", "}", "end"})
_PREFIX = frozenset({"not", "-", "+", "~"})


def is_tractable(text: str, *, max_tokens: int, max_depth: int | None = None) -> bool:
    """Return whether a text has few enough tokens and is nested shallowly enough.

    Args:
        text: a program in any language that quotes with '…' or "…".
        max_tokens: how many words, quoted strings and signs it may have, roughly.
        max_depth: how deep brackets and CASE … END may nest, and how many prefix operators may follow each other.
    """
    if max_depth is None:
        return sum(1 for _ in _TOKEN.finditer(text)) <= max_tokens
    depth = prefixes = 0
    for count, match in enumerate(_TOKEN.finditer(text)):
        token = match[0].lower() if match.end() - match.start() < 5 else ""
        prefixes = prefixes + 1 if token in _PREFIX else 0
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING and depth:
            depth -= 1
        if count == max_tokens or depth > max_depth or prefixes > max_depth:
            return False
    return True
