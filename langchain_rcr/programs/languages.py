"""The registry of program languages. A parser's module is imported when its language is first used."""

from __future__ import annotations

import difflib
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs.tree import Tree, chain

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

SAMPLE = 200
"""Rows from which language and fields are guessed."""

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


def guess_language(programs: Sequence[str]) -> tuple[str, str]:
    """The language that most programs parse as, and, in words, how many as each.

    It is `tokens` if fewer than half parse. Texts that are read as mere words, such as a shell's commands as functional
    programs, say nothing of their language.
    """
    sample = programs[:: max(1, len(programs) // SAMPLE)]
    languages = [*(name for name in LANGUAGES if name != TOKENS), "sql:tsql"]  # plain sql reads [name] as a list
    if not find_spec("sqlglot"):
        languages = [name for name in languages if not name.startswith("sql")]
    read = {name: [(text, tree) for text in sample if (tree := parse(text, name)) is not None] for name in languages}
    # A dialect must read twice as many, as most read a few that others don't.
    best, *others = sorted(languages, key=lambda name: -len(read[name]) / (2 if ":" in name else 1))
    told = "".join(f", {len(read[name])} as {name}" for name in others if read[name] and not name.startswith(best))
    words = sum(tree == chain(text.split()) for text, tree in read[best])
    merely = f" ({words} as mere words)" if words else ""
    said = f"{len(read[best])} of {len(sample)} programs parse as {best}{merely}{told}"
    said = said if read[best] else f"none of {len(sample)} programs parses in another language"
    structured = len(read[best]) - words
    return best if structured and 2 * structured >= len(sample) - words else TOKENS, said
