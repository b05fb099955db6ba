"""The registry of program languages. A parser's module is imported when its language is first used."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Protocol, runtime_checkable

from langchain_rcr.errors import InputError
from langchain_rcr.programs.tree import Tree

PARSERS = {
    "functional": "langchain_rcr.programs.functional:FunctionalParser",
    "json": "langchain_rcr.programs.json_:JsonParser",
    "python": "langchain_rcr.programs.python_:PythonParser",
    "sexpr": "langchain_rcr.programs.sexpr:SExpressionParser",
    "sql": "langchain_rcr.programs.sql:SqlParser",
    "tokens": "langchain_rcr.programs.tokens:TokensParser",
}
"""Language → module:class of its parser."""

TOKENS = "tokens"
"""The language of any text: a chain of tokens, whose local structures are n-grams."""

LANGUAGES = PARSERS.keys()
"""The known languages; `sql` may name a dialect of sqlglot, as in `sql:postgres`."""


@runtime_checkable
class ProgramParser(Protocol):
    """Reads one program language."""

    def parse(self, text: str) -> Tree | None:
        """Return the program's tree, or None for what is not a program; no text makes it raise."""
        ...


@cache
def get_parser(language: str = "functional") -> ProgramParser:
    """Return the parser of a language.

    Args:
        language: one of LANGUAGES, or `sql:` and the name of a dialect of sqlglot.

    Raises:
        InputError: the language or dialect is unknown; the message suggests the nearest one.
        MissingExtraError: SQL without sqlglot.
    """
    name, _, dialect = language.partition(":")
    if name not in PARSERS or (dialect and name != "sql"):
        raise InputError(f"language: {unknown(language, LANGUAGES)}")
    made: ProgramParser = pkgutil.resolve_name(PARSERS[name])(*[dialect] if dialect else [])
    return made


def parse(text: str, language: str = "functional") -> Tree | None:
    """Return the tree of a program, or None for what is not a program (see `get_parser` for languages, errors)."""
    return get_parser(language).parse(text)


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the nearest known one, and all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name.lower(), choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {name!r}; {hint}known: {', '.join(choices)}"
