"""SQL queries and data changes, read by sqlglot; `sql_tree` says what their trees look like."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs.languages import unknown
from langchain_rcr.programs.tree import Tree

try:
    from sqlglot import exp
    from sqlglot.dialects.dialect import Dialect, Dialects
except ImportError as error:
    raise MissingExtraError("sqlglot", "sql") from error

from langchain_rcr.programs.sql_tree import SqlExpander

# sqlglot descends recursively, some 20 Python frames a bracket, and reads a token in about 15 µs.
_MAX_DEPTH = 32
_MAX_TOKENS = 30_000
# In a query with INTERVAL it searches strings in quadratic time, 3 s for 5,000 digits.
_LONGEST_INTERVAL = 200
_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|\w+|\S""")
_NESTING = {**dict.fromkeys(("(", "[", "{", "case"), 1), **dict.fromkeys((")", "]", "}", "end"), -1)}
_PREFIXES = frozenset({"not", "-", "+", "~"})


class SqlParser:
    """Parses one SQL statement.

    Args:
        dialect: the name of one of sqlglot's dialects; empty for its own tolerant mix.

    Raises:
        InputError: sqlglot knows no such dialect.
    """

    def __init__(self, dialect: str = "") -> None:
        known = {member.value for member in Dialects}
        if dialect not in known:
            raise InputError(f"language: sql dialect: {unknown(dialect, known - {''})}")
        self._dialect = Dialect.get_or_raise(dialect)
        self._double_quotes_are_strings = dialect in ("", "sqlite")

    def parse(self, text: str) -> Tree | None:
        """Return the statement's tree; None for what is not one query or data change, or is too long or deep."""
        return self._tree(text, names=True)

    def shape(self, text: str) -> Tree | None:
        """`parse`, with constants for the names of tables and columns."""
        return self._tree(text, names=False)

    def _tree(self, text: str, *, names: bool) -> Tree | None:
        if not _is_tractable(text):
            return None
        statement = self._statement(text)
        if statement is None:
            return None
        expander = SqlExpander(self._dialect, self._double_quotes_are_strings, names=names)
        try:
            return expander.tree(statement)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            # A syntax tree that only odd input has, or a caller that left less stack than _MAX_DEPTH allows for.
            return None

    def _statement(self, text: str) -> Any:
        _quiet.active = True
        try:
            # A comment behind the semicolon is a statement to sqlglot, of the kind Semicolon.
            statements = [each for each in self._dialect.parse(text) if each and each.key != "semicolon"]
        except Exception:  # on odd input sqlglot raises exceptions of any kind, such as RecursionError
            return None
        finally:
            _quiet.active = False
        if len(statements) != 1 or not isinstance(statements[0], (exp.Query, exp.DML, exp.DDL)):
            return None
        # `select` alone, which sqlglot accepts
        return statements[0] if any(statements[0].args.values()) else None


def _is_tractable(text: str) -> bool:
    """Whether brackets, CASE … END and prefix operators nest shallowly enough for sqlglot, in few enough tokens."""
    depth = prefixes = 0
    longest = _LONGEST_INTERVAL if "interval" in text.lower() else len(text)
    for count, match in enumerate(_TOKEN.finditer(text)):
        length = match.end() - match.start()
        token = match[0].lower() if length < 5 else ""
        prefixes = prefixes + 1 if token in _PREFIXES else 0
        depth = max(0, depth + _NESTING.get(token, 0))
        if count == _MAX_TOKENS or max(depth, prefixes) > _MAX_DEPTH or length > longest:
            return False
    return True


class _Quiet(threading.local, logging.Filter):
    """Drops what sqlglot logs in this thread while it parses text that may not be SQL."""

    active = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.active


_quiet = _Quiet()
logging.getLogger("sqlglot").addFilter(_quiet)
