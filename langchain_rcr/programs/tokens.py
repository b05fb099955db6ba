"""Any text as a chain of tokens: for programs in a language that has no parser of its own.

Each token is the only child of the one before it. So the chain's local structures are the text's n-grams of up to
`max_size` tokens, and those at its beginning also after `<root>`. The tokens:

- a quoted string ('…' or "…") with its quotes; inside, a backslash or a doubled quote escapes. A quote right after a
  letter or digit is an apostrophe. After a quote that is never closed there are no more strings;
- a number, such as 12, 0.5 or 1e-3, without a sign;
- a word: letters with their accents, digits and underscores;
- any other character by itself, except white space, which only separates.

Time and memory are linear in the length of the text.
"""

from __future__ import annotations

import re

from langchain_rcr.basics.items import NAME
from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree, chain

_QUOTED = r"""(?<!\w)(?:'[^'\\]*(?:(?:\\.|'')[^'\\]*)*'|"[^"\\]*(?:(?:\\.|"")[^"\\]*)*")"""
# Possessive, to avoid backtracking over digits that turn out to begin a word.
_PLAIN = rf"[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?!\w)|{NAME}|[^\w\s]"
# The second alternative takes the rest of the text, so that an unclosed quote costs one scan, not one per quote.
_TOKEN = re.compile(rf"""{_QUOTED}|(?<!\w)['"].*|{_PLAIN}""", re.DOTALL)
_IS_QUOTED = re.compile(_QUOTED, re.DOTALL)
_WITHOUT_STRINGS = re.compile(_PLAIN)


class TokensParser:
    """Reads any text that isn't blank (see the module's rules)."""

    about = About(like_prose=True, inner_values=True)

    def parse(self, text: str) -> Tree | None:
        """Return the chain of the text's tokens, or None for a blank text."""
        tokens: list[str] = _TOKEN.findall(text)
        if not tokens:
            return None
        if tokens[-1][0] in "'\"" and not _IS_QUOTED.fullmatch(tokens[-1]):
            tokens[-1:] = _WITHOUT_STRINGS.findall(tokens[-1])
        return chain(tokens)
