"""The registry of program languages. A parser's module is imported when its language is first used."""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs.tree import Tree

PARSERS = {
    "sql": "langchain_rcr.programs.sql:SqlParser",
    "json": "langchain_rcr.programs.json_:JsonParser",
    "functional": "langchain_rcr.programs.functional:FunctionalParser",
    "sexpr": "langchain_rcr.programs.sexpr:SExpressionParser",
    "python": "langchain_rcr.programs.python_:PythonParser",
    "set": "langchain_rcr.programs.json_:SetParser",
    "tokens": "langchain_rcr.programs.tokens:TokensParser",
}
"""Language → module:class of its parser. If several read equally many programs, the first is taken: functional also
reads simple SQL and JSON, and python most functional programs."""

TOKENS = "tokens"
"""The language that reads any text: a chain of tokens, whose local structures are n-grams."""

LANGUAGES = PARSERS.keys()
"""The known languages; `sql` may name a dialect of sqlglot, as in `sql:postgres`."""


@runtime_checkable
class ProgramParser(Protocol):
    """Parses one program language. An attribute `about` says how the language differs from the defaults."""

    def parse(self, text: str) -> Tree | None:
        """Return the program's tree, or None for what is not a program; never raises, whatever the text."""
        ...


@dataclass(frozen=True)
class About:
    """What must be known about a language besides how to parse it."""

    extra: str = ""  # this distribution's extra that the parser needs
    on_one_line: bool = False  # programs have one line each
    like_prose: bool = False  # a program may begin with any words and a colon
    inner_values: bool = False  # nodes with children may be values too
    is_json: bool = False  # programs are JSON, which is only a wrapper around those of other languages
    fences: tuple[str, ...] = ()  # substrings of the tags of Markdown fences around programs; none: any tag will do
    in_prose: Callable[[str], Iterable[str]] = lambda text: ()  # finds programs amid prose, the likeliest first
    first_line: re.Pattern[str] = re.compile(".*")  # matches the first line of a text and lines that continue a program
    is_ordered: Callable[[Tree], bool] = lambda tree: False  # tells whether a program's rows have an order


@cache
def get_parser(language: str = "functional") -> ProgramParser:
    """Return the parser of a language.

    Args:
        language: one of LANGUAGES; `:` and a dialect may follow one that has dialects, as in `sql:postgres`.

    Raises:
        InputError: the language or dialect is unknown; the message suggests the nearest one.
        MissingExtraError: SQL without sqlglot.
    """
    name, _, dialect = language.partition(":")
    made = pkgutil.resolve_name(PARSERS[name]) if name in PARSERS else None
    if made is None or (dialect and not hasattr(made, "dialects")):
        if not dialect and name.lower() not in PARSERS and (meant := _with_dialect(name)) is not None:
            raise InputError(f"language: unknown {language!r}; did you mean {meant!r}?")
        raise InputError(f"language: {unknown(language, LANGUAGES)}")
    parser: ProgramParser = made(dialect) if dialect else made()
    return parser


def _with_dialect(name: str) -> str | None:
    """The language of which this is, or resembles, a dialect, as in `sql:sqlite`; None: none."""
    for language, where in PARSERS.items():
        with suppress(MissingExtraError):
            dialects = getattr(pkgutil.resolve_name(where), "dialects", ())
            if found := difflib.get_close_matches(name.lower(), dialects, 1, 0.8):
                return f"{language}:{found[0]}"
    return None


def about(language: str | None) -> About:
    """Return what is known about a language; None: an unknown one, with the user's own parser."""
    if language is None:
        return About(like_prose=True)
    found: About = getattr(get_parser(language), "about", About())
    return found


def parse(text: str, language: str = "functional") -> Tree | None:
    """Return the tree of a program, or None for what is not a program (see `get_parser` for languages, errors)."""
    return get_parser(language).parse(text)
