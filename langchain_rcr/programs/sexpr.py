"""S-expressions: Lispress, lambda calculus.

A list is a node: its head, if an atom, is the label and the rest are the children, in order. A list that is empty or
begins with a list or a string gets the label `<list>` and keeps all its elements as children. Lispress's reader macro
`#( … )` is read as a plain list, a quoted list `'( … )` as `(quote ( … ))`. A string ("…", backslash escapes) keeps its
quotes; `:output` is an ordinary atom. A comment runs from a `;` that doesn't continue an atom to the line's end.
"""

from __future__ import annotations

import re
from itertools import pairwise

from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree

LIST = "<list>"

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
# The last alternative consumes the rest of the text, so that an unclosed string costs one scan, not one per quote.
_TOKEN = re.compile(rf"""'?#?\(|\)|;[^\n]*|[^\s()"]+|{_STRING}|".*""", re.DOTALL)
_IS_STRING = re.compile(_STRING, re.DOTALL)


class SExpressionParser:
    """Parses one s-expression (see the module's rules)."""

    about = About(on_one_line=True)

    def parse(self, text: str) -> Tree | None:
        """Return the expression's tree, or None for what is not one expression."""
        tokens: list[str] = [token for token in _TOKEN.findall(text) if token[0] != ";"]
        if not tokens or (tokens[-1][0] == '"' and not _IS_STRING.fullmatch(tokens[-1])):
            return None
        opened: list[tuple[str, str, int]] = []  # open lists: the bracket, the head, and where the elements begin
        elements: list[Tree] = []
        for before, lexeme in pairwise(["", *tokens]):
            if lexeme[-1] == "(":
                opened.append((lexeme, LIST, len(elements)))
            elif lexeme == ")":
                if not opened:
                    return None
                bracket, head, start = opened.pop()
                tree = Tree(head, tuple(elements[start:]))
                elements[start:] = [Tree("quote", (tree,)) if bracket[0] == "'" else tree]
            elif before[-1:] == "(" and lexeme[0] != '"':
                opened[-1] = (before, lexeme, len(elements))
            else:
                elements.append(Tree(lexeme))
        return elements[0] if not opened and len(elements) == 1 else None
