"""SQL statements, read by sqlglot; `sql_tree` says what their trees look like.

Several statements are the children of `statements`; EXPLAIN and CALL have what they explain or call below them. In
Jinja, `{{ … }}` stands for a name or a value and is a leaf, as written. A block, or a macro call that stands for
neither (`{% if … %}`, `{{ config(…) }}` at the beginning), is a leaf beside the statements, which are read without it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree

try:
    from sqlglot import dialects as known
    from sqlglot import exp, tokens
    from sqlglot.dialects.dialect import Dialect, Dialects
except ImportError as error:
    raise MissingExtraError("sqlglot", "sql") from error

from langchain_rcr.programs.sql_tree import PLACEHOLDER, SqlExpander

logger = logging.getLogger(__name__)

# sqlglot recurses, with about 20 Python frames per bracket, and reads a token in about 15 µs; each [1] or .f() of
# `a[1][1].f()` takes about as long as everything before it.
_MAX_DEPTH = 32
_MAX_TOKENS = 30_000
# It searches an interval's string in quadratic time, 3 s for 5,000 digits.
_LONGEST_INTERVAL = 200
_MAX_JINJA = 500
_TOKEN = re.compile(r"""'[^']*'|"[^"]*"|\w+|\S""")
_NESTING = {**dict.fromkeys(("(", "[", "{", "case"), 1), **dict.fromkeys((")", "]", "}", "end"), -1)}
_PREFIXES = frozenset({"not", "-", "+", "~"})
_LINKS, _CLOSERS, _OPERATORS = frozenset("[.:"), frozenset(")]"), frozenset("+-*/%=<>|&,;")
# Older versions of sqlglot lack some.
_STATEMENT_NAMES = """
    Alter AlterSession Analyze Attach Block Cache Comment Commit DDL DML Declare Describe Detach Drop Execute Export Get
    Grant IfBlock Kill LoadData Pivot Pragma Put Query Refresh Revoke Rollback Set Show Summarize Transaction
    TruncateTable Uncache Undrop Use Values WhileBlock
"""
_STATEMENTS = tuple(getattr(exp, name) for name in _STATEMENT_NAMES.split() if hasattr(exp, name))
_REPLACE = re.compile(r"\A\s*replace(?=\s+into\b)", re.IGNORECASE)
_EXPLAINED = re.compile(
    r"\s*(query\s+plan|plan\s+for|analy[sz]e|verbose|extended|formatted|partitions|\([^()]*\))(?!\w)", re.IGNORECASE
)
# What isn't closed takes the rest of the text, to cost only one scan.
_JINJA = re.compile(
    r"""'[^']*'|"[^"]*"|--[^\n]*|/\*.*?(?:\*/|\Z)|(\{\{.*?\}\}|\{%.*?%\}|\{\#.*?\#\})|(\{[{%\#].*)""", re.DOTALL
)
_LEAF = re.compile(rf"{PLACEHOLDER}([0-9]{{1,3}})__")
_CLAUSES = "FROM|WHERE|AND|OR|ON|USING|JOIN|LEFT|RIGHT|INNER|FULL|CROSS|NATURAL|GROUP|HAVING|ORDER|LIMIT"
_CLAUSES += r"|(?:UNION|INTERSECT|EXCEPT)(?:(?:\s+ALL)?\s+\(?SELECT)?"
# Capitalised, such a word begins a sentence.
_CONTINUED = rf"(?:[ \t]++\S|[,)]|(?:{_CLAUSES}|{_CLAUSES.lower()})\b)"
_BLANK_LINE = re.compile(rf"\n[ \t\r]*\n(?!\s*{_CONTINUED})")
_FIRST_LINE = re.compile(rf".*(?:\s*\n{_CONTINUED}.*)*")
_VERBS = "SELECT|WITH|INSERT|UPDATE|DELETE|MERGE|REPLACE|CREATE|ALTER|DROP"
# In prose they are capitalised, or stand elsewhere.
_BEGINNING = re.compile(rf"(?:^[ \t(*>-]*|[:.]\**\s+|\b(?:is|be)\s|\s`)((?:{_VERBS}|{_VERBS.lower()})\s)", re.MULTILINE)
_END = re.compile(r";\s")
_PARAGRAPHS = 4
"""How many paragraphs at the end of a text are searched for statements; all before count as one."""


class _Mixed(Dialect):  # type: ignore[misc]
    """sqlglot's own mix of dialects, and names in backticks, as MySQL and BigQuery have them."""

    class Tokenizer(tokens.Tokenizer):  # type: ignore[misc]
        IDENTIFIERS: ClassVar = ['"', "`"]


class SqlParser:
    """Parses SQL statements.

    Args:
        dialect: the name of one of sqlglot's dialects; empty for its own tolerant mix.

    Raises:
        InputError: sqlglot knows no such dialect.
    """

    # Newer dialects are only in `DIALECTS`, which older versions of sqlglot lack.
    dialects = tuple(
        sorted({member.value for member in Dialects} - {""} | {*map(str.lower, getattr(known, "DIALECTS", ()))})
    )

    def __init__(self, dialect: str = "") -> None:
        if dialect not in ("", *self.dialects):
            raise InputError(f"language: sql dialect: {unknown(dialect, self.dialects)}")
        self._dialect = Dialect.get_or_raise(dialect) if dialect else _Mixed()
        self._double_quotes_are_strings = dialect in ("", "sqlite")
        fences = ("sql", "postgres", dialect) if dialect else ("sql", "postgres")
        self.about = About("sql", fences=fences, in_prose=_statements_in, first_line=_FIRST_LINE, is_ordered=_has_order)

    def parse(self, text: str) -> Tree | None:
        """Return the tree of one or several statements; None if it is neither, or too long or deep."""
        return self._tree(text, names=True)

    def shape(self, text: str) -> Tree | None:
        """`parse`, with constants in place of the names of tables and columns."""
        return self._tree(text, names=False)

    def _tree(self, text: str, *, names: bool) -> Tree | None:
        try:
            sql, leaves, blocks = _without_jinja(text)
            if not _is_tractable(sql):
                return None
            statements = self._statements(sql)
            if not statements:
                return None
            expander = SqlExpander(self._dialect, self._double_quotes_are_strings, names=names)
            tree = _with_jinja(expander.tree(("statements", statements)), leaves, blocks, names)
            return tree if len(tree.children) > 1 else tree.children[0]
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            # Unclosed Jinja, an odd syntax tree from odd input, or a caller that left less stack than _MAX_DEPTH needs.
            return None

    def _statements(self, text: str) -> list[Any]:
        """The statements of a text, as `SqlExpander.tree` takes them; none if one of them can't be read."""
        found = [self._statement(each) for each in self._parsed(_REPLACE.sub("insert or replace", text, count=1))]
        return [] if None in found else found

    def _statement(self, node: Any) -> Any:
        if node.key == "command":  # which sqlglot doesn't read
            word = str(node.this).lower()
            rest = getattr(node.expression, "name", node.expression)
            if word == "explain":
                return self._explained(rest)
            if word == "replace":
                statements = self._statements(f"replace {rest}") if _REPLACE.match(f"replace {rest}") else []
                return statements[0] if len(statements) == 1 else None
            called = self._parsed(f"select {rest}") if word == "call" else []
            functions = called[0].args.get("expressions") or [] if len(called) == 1 else []
            return ("call", functions) if len(functions) == 1 and isinstance(functions[0], exp.Func) else None
        # a bare `select`, which sqlglot accepts, isn't a statement
        return node if isinstance(node, _STATEMENTS) and any(node.args.values()) else None

    def _explained(self, text: str) -> Any:
        words: list[Any] = []
        while word := _EXPLAINED.match(text):
            words.append((" ".join(word[1].lower().split()), []))
            text = text[word.end() :]
        statements = self._statements(text)
        return ("explain", [*words, *statements]) if statements else None

    def _parsed(self, text: str) -> list[Any]:
        _quiet.active = True
        try:
            # To sqlglot, a comment after the semicolon is a statement of the kind Semicolon.
            return [each for each in self._dialect.parse(text) if each and each.key != "semicolon"]
        except Exception:  # on odd input sqlglot raises any kind of exception, such as RecursionError
            return []
        finally:
            _quiet.active = False


def _without_jinja(text: str) -> tuple[str, list[str], list[str]]:
    """A text with a name in place of each `{{ … }}`, what these names stand for, and the blocks that were left out."""
    if not ("{{" in text or "{%" in text or "{#" in text):
        return text, [], []
    parts: list[str] = []
    leaves: list[str] = []
    blocks: list[str] = []
    at, begins = 0, True  # only blanks, comments and blocks so far
    for match in _JINJA.finditer(text):
        if match[2]:
            raise ValueError("Jinja that isn't closed")
        before, block, at = text[at : match.start()], match[1], match.end()
        parts += [before, match[0] if block is None else " "]
        begins = begins and not before.strip() and match[0][0] not in "'\""
        if block is None:
            continue
        said = " ".join(block.split())
        if block[1] == "{" and not begins:
            parts[-1] = f"{PLACEHOLDER}{len(leaves)}__"
            leaves.append(said)
        elif block[1] != "#":
            blocks.append(said)
    if max(len(leaves), len(blocks)) > _MAX_JINJA:
        raise ValueError("too much Jinja")
    return "".join([*parts, text[at:]]), leaves, blocks


def _with_jinja(tree: Tree, leaves: Sequence[str], blocks: Sequence[str], names: bool) -> Tree:
    """The tree of `statements` with the names replaced, and beside them what was left out or isn't in them."""
    if not leaves and not blocks:
        return tree
    seen: set[int] = set()

    def leaf(match: re.Match[str]) -> str:
        number = int(match[1])
        seen.add(number)
        return leaves[number] if number < len(leaves) else match[0]

    tree = tree.fold(lambda label, below: Tree(_LEAF.sub(leaf, label), tuple(below)))
    others = [text for number, text in enumerate(leaves) if names and number not in seen]
    return Tree(tree.label, (*map(Tree, blocks), *tree.children, *map(Tree, others)))


def _is_tractable(text: str) -> bool:
    """Whether sqlglot reads a text in time linear in its tokens, and there are few enough; logs it if not."""
    depth = prefixes = work = interval = 0
    begins = [0] * (_MAX_DEPTH + 2)  # where the operand begins, at each depth
    last = refused = ""
    strings_are_short = "generate_series" in text.lower()  # its last argument may be an interval without the keyword
    for count, match in enumerate(_TOKEN.finditer(text)):
        length = match.end() - match.start()
        token = match[0].lower() if length < 9 else match[0][0]
        prefixes = prefixes + 1 if token in _PREFIXES else 0
        step = _NESTING.get(token)
        if token in _LINKS and last in _CLOSERS:
            work += count - begins[depth]
        elif token in _OPERATORS:
            begins[depth] = count
        if step is not None:
            depth = max(0, depth + step)
            begins[depth] = count if step > 0 else begins[depth]
        # INTERVAL '1' DAY '2' HOUR …: 2 before a string, 1 before its unit.
        if length > _LONGEST_INTERVAL and (interval == 2 or strings_are_short):
            refused = f"an interval of {length:,} characters"
        if token != "+":  # noqa: S105
            interval = 2 if interval == 1 or token == "interval" else interval == 2 and not token[:1].isalpha()  # noqa: S105
        if max(depth, prefixes) > _MAX_DEPTH:
            refused = f"nested more than {_MAX_DEPTH} deep"
        elif count + work > _MAX_TOKENS:
            refused = f"more than {_MAX_TOKENS:,} tokens, each [1] or .f() of a chain counting all before it"
        if refused:
            logger.warning("SQL of %d characters is not read: %s", len(text), refused)
            return False
        last = token
    return True


def _statements_in(text: str) -> Iterator[str]:
    """The statements amid prose, the last first, each as long as possible."""
    ends = [*(match.start() for match in _BLANK_LINE.finditer(text)), len(text)][-_PARAGRAPHS:]
    starts = []
    for begin, end in zip([0, *ends], ends, strict=False):
        found = _BEGINNING.search(text, begin, end)
        # Within brackets it is part of a program that doesn't parse.
        if found and text.count("(", 0, found.start(1)) == text.count(")", 0, found.start(1)):
            starts.append(found.start(1))
    for end in reversed(ends):
        for start in starts:
            if start < end:
                yield from (text[start:end], _END.split(text[start:end], maxsplit=1)[0])
    for start in reversed(starts):
        yield text[start:].split("`", 1)[0] if text[:start].endswith("`") else _FIRST_LINE.match(text, start)[0]  # type: ignore[index]


def _has_order(tree: Tree) -> bool:
    return any(child.label == "order" and child.children for child in tree.children)


class _Quiet(threading.local, logging.Filter):
    """Drops what sqlglot logs in this thread while it parses text that may not be SQL."""

    active = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.active


_quiet = _Quiet()
logging.getLogger("sqlglot").addFilter(_quiet)
