"""Which program languages there are. A parser's module is imported when its language is first used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import cache
from typing import Protocol, runtime_checkable

from rcr_trainer.errors import ConfigError
from rcr_trainer.programs.tree import Tree

_PARSERS = {
    "functional": ("rcr_trainer.programs.functional", "FunctionalParser"),
    "json": ("rcr_trainer.programs.json_", "JsonParser"),
    "python": ("rcr_trainer.programs.python_", "PythonParser"),
    "sexpr": ("rcr_trainer.programs.sexpr", "SExpressionParser"),
    "sql": ("rcr_trainer.programs.sql", "SqlParser"),
}

LANGUAGES = tuple(_PARSERS)
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
        ConfigError: the language or dialect is unknown; the message suggests the nearest one.
        MissingExtraError: SQL without sqlglot.
    """
    name, _, dialect = language.partition(":")
    if name not in _PARSERS or (dialect and name != "sql"):
        raise ConfigError(f"language: {unknown(language, LANGUAGES)}")
    module, parser = _PARSERS[name]
    made: ProgramParser = getattr(importlib.import_module(module), parser)(*[dialect] if dialect else [])
    return made


def parse(text: str, language: str = "functional") -> Tree | None:
    """Return the tree of a program, or None for what is not a program (see `get_parser` for languages, errors)."""
    return get_parser(language).parse(text)


def unknown(name: str, known: Iterable[str]) -> str:
    """Return what to say of an unknown name: the nearest known one, and all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name.lower(), choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {name!r}; {hint}known: {', '.join(choices)}"
