"""Functional programs: FunQL, COVR and others written as `f(a, g(b))`.

The grammar, over tokens separated by optional whitespace:

    program  = term
    term     = 'quoted value'  |  word+ ("[" [terms] "]")* ["(" [terms] ")"]
    terms    = term ("," term)*

- Words in a row form a chain, and brackets belong to the last one: `playing with ( x )` is playing → with → x.
- Arguments in square brackets come before those in round ones: `query_attr [ color ] ( x )` has the children color, x.
- Empty brackets add nothing: `scene ( )` is the leaf `scene`.
- A quoted value ('…' or "…") keeps its quotes in the label and is always a single argument: no brackets follow it and
  it joins no chain. Inside, a backslash or a doubled quote escapes. Inside a word, a quote is an ordinary letter.
"""

from __future__ import annotations

import re

from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree, chain

_QUOTED = r"""'[^'\\]*(?:(?:\\.|'')[^'\\]*)*'|"[^"\\]*(?:(?:\\.|"")[^"\\]*)*\""""
# The last alternative consumes the rest of the text, so that one unclosed quote costs one scan, not one per quote.
_TOKEN = re.compile(rf"""[^\s()\[\],'"][^\s()\[\],]*|[()\[\],]|{_QUOTED}|['"].*""", re.DOTALL)
_IS_QUOTED = re.compile(_QUOTED, re.DOTALL)
_KINDS = {"'": "q", '"': "q", **{bracket: bracket for bracket in "()[],"}}
_NO_PROGRAM = re.compile(r"^[^wq]|[(\[,][(\[,]|,[)\]]|,$|[)\]][wq]|\)[(\[]|q[^,)\]]|wq")
"""Neighbours that the grammar rules out; w is a word, q a quoted value."""


class FunctionalParser:
    """Parses FunQL, COVR and other programs of nested calls (see the module's grammar)."""

    about = About(on_one_line=True)

    def parse(self, text: str) -> Tree | None:
        """Return the program's tree, or None for what is not one program."""
        tokens: list[str] = _TOKEN.findall(text)
        if not tokens or (tokens[-1][0] in "'\"" and not _IS_QUOTED.fullmatch(tokens[-1])):
            return None
        kinds = "".join([_KINDS.get(lexeme[0], "w") for lexeme in tokens])
        return None if _NO_PROGRAM.search(kinds) else _parse(tokens)


def _parse(tokens: list[str]) -> Tree | None:
    terms: list[Tree] = []  # the finished terms of the open bracket
    words: list[str] = []  # the words of the term being read
    args: list[Tree] = []  # the arguments of words[-1] in closed square brackets
    outer: list[tuple[str, list[Tree], list[str], list[Tree]]] = []  # opening brackets, and what precedes them
    for lexeme in [*tokens, ","]:
        if lexeme in "([":
            outer.append((lexeme, terms, words, args))
            terms, words, args = [], [], []
        elif lexeme in ")],":
            if words:
                terms.append(chain(words, args))
                words, args = [], []
            if lexeme != ",":
                inside = terms
                opening, terms, words, args = outer.pop() if outer else ("", [], [], [])
                if opening + lexeme not in ("()", "[]"):
                    return None
                args = args + inside
            if lexeme == ")":
                terms.append(chain(words, args))
                words, args = [], []
        elif lexeme[0] in "'\"":
            terms.append(Tree(lexeme))
        else:
            words.append(lexeme)
    return terms[0] if not outer and len(terms) == 1 else None
