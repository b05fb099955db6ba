"""Functional programs: FunQL, COVR and others written as `f(a, g(b))`.

The grammar, over tokens separated by optional whitespace:

    program  = term
    term     = 'quoted value'  |  word+ ("[" [terms] "]")* ["(" [terms] ")"]
    terms    = term ("," term)*

- Several words in a row are a chain: `playing with` is playing → with. Brackets after them belong to the last word:
  `playing with ( x )` is playing → with → x.
- Arguments in square brackets come before those in round ones: `query_attr [ color ] ( x )` has the children color, x.
- Empty brackets add nothing: `scene ( )` is the leaf `scene`.
- A quoted value ('…' or "…") keeps its quotes in the label and is always a single argument: no brackets follow it and
  it joins no chain. Inside, a backslash or a doubled quote escapes. Inside a word, a quote is a letter like any other.
"""

from __future__ import annotations

import re

from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree

_QUOTED = r"""'[^'\\]*(?:(?:\\.|'')[^'\\]*)*'|"[^"\\]*(?:(?:\\.|"")[^"\\]*)*\""""
# The last alternative swallows the rest of the text, so that one unclosed quote costs one scan, not one per quote.
_TOKEN = re.compile(rf"""[^\s()\[\],'"][^\s()\[\],]*|[()\[\],]|{_QUOTED}|['"].*""", re.DOTALL)
_IS_QUOTED = re.compile(_QUOTED, re.DOTALL)


class FunctionalParser:
    """Parses FunQL, COVR and other programs of nested calls (see the module's grammar)."""

    about = About(on_one_line=True)

    def parse(self, text: str) -> Tree | None:
        """Return the program's tree, or None for what is not one program."""
        tokens: list[str] = _TOKEN.findall(text)
        if not tokens or (tokens[-1][0] in "'\"" and not _IS_QUOTED.fullmatch(tokens[-1])):
            return None
        return _parse(tokens)


def _parse(tokens: list[str]) -> Tree | None:
    done: list[Tree] = []  # the finished terms of the open bracket
    words: list[str] = []  # the words of the term being read
    term: Tree | None = None  # the term, once nothing but a comma or a closing bracket may follow
    head_args: list[Tree] | None = None  # the arguments of words[-1] after a closed square bracket
    outer: list[tuple[str, list[str], list[Tree], int]] = []  # opening bracket, words, terms, own arguments before it
    for lexeme in tokens:
        if lexeme in "([":
            if not words:
                return None
            before = head_args or []
            outer.append((lexeme, words, done, len(before)))
            done, words, head_args = before, [], None
        elif lexeme in ")],":
            if words:
                term = _chain(words, head_args or ())
                words, head_args = [], None
            if term is not None:
                done.append(term)
                term = None
            elif lexeme == "," or not outer or len(done) != outer[-1][3]:
                return None
            if lexeme == ",":
                if not outer:
                    return None
                # A comma promises one more term: the closing bracket must not find the list as it is now.
                opening, head, above, _ = outer[-1]
                outer[-1] = (opening, head, above, -1)
                continue
            if not outer:
                return None
            opening, words, above, _ = outer.pop()
            if (opening == "(") != (lexeme == ")"):
                return None
            if lexeme == ")":
                term = _chain(words, done)
                words = []
            else:
                head_args = done
            done = above
        elif term is not None or head_args is not None:
            return None
        elif lexeme[0] in "'\"":
            if words:
                return None
            term = Tree(lexeme)
        else:
            words.append(lexeme)
    if outer:
        return None
    return _chain(words, head_args or ()) if words else term


def _chain(words: list[str], args: list[Tree] | tuple[()]) -> Tree:
    tree = Tree(words[-1], tuple(args))
    if len(words) > 1:
        for word in words[-2::-1]:
            tree = Tree(word, (tree,))
    return tree
