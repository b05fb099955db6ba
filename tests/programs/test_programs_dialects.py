"""Statements of every dialect that sqlglot reads: each is read, and means the same however sqlglot writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlglot
from sqlglot.dialects.dialect import Dialect

from langchain_rcr.programs import ProgramSpec, parse
from langchain_rcr.programs.sql import SqlParser

BLOCKS = Path(__file__).with_name("statements.sql").read_text("utf-8").strip().split("\n\n")
STATEMENTS = [(head.removeprefix("#").strip(), text) for head, text in (block.split("\n", 1) for block in BLOCKS)]
"""(dialect, statement): blocks of a line that names the dialect and the statement, with a blank line between them."""
UNREAD = ("INSERT OR REPLACE INTO cache VALUES (?1", "UNLOAD (", "OPTIMIZE events", "FROM src INSERT OVERWRITE")
"""How those begin that sqlglot itself doesn't read."""
REWRITTEN = ("SELECT id, v:address.city::string", "SELECT countIf(status = 500)")
"""How those begin that sqlglot writes with other types or functions."""
NOT_WRITTEN = ("prql", "dax")
"""Dialects that sqlglot reads only."""
IS_OLD = tuple(int(part) for part in sqlglot.__version__.split(".")[:2]) < (30, 25)
of_today = pytest.mark.skipif(IS_OLD, reason="this sqlglot has fewer dialects, and reads some statements otherwise")


def language(dialect: str) -> str:
    return f"sql:{dialect}" if dialect else "sql"


@of_today
def test_there_are_statements_of_every_dialect() -> None:
    assert len(STATEMENTS) > 200
    assert {dialect for dialect, _ in STATEMENTS} == {*SqlParser.dialects, ""}
    assert len({*STATEMENTS}) == len(STATEMENTS)


@of_today
@pytest.mark.parametrize(("dialect", "text"), STATEMENTS)
def test_a_statement_means_the_same_however_it_is_written(dialect: str, text: str) -> None:
    spec, exact = ProgramSpec(language(dialect)), ProgramSpec(language(dialect), anonymize=False)
    assert (spec.tree(text) is None) == text.startswith(UNREAD)
    if text.startswith(UNREAD):
        return
    assert spec.structures(text)
    assert ProgramSpec(language(dialect), anonymize="names").tree(text) is not None
    said = exact.key(text)
    assert exact.key(f"{text}\n -- a comment") == exact.key(f"/* a comment */\n{text}") == said
    if dialect in NOT_WRITTEN or text.startswith(REWRITTEN) or "{{" in text or "{%" in text:
        return
    reader = Dialect.get_or_raise(dialect)
    for pretty in (False, True):
        statements = [each.sql(dialect=reader, pretty=pretty) for each in reader.parse(text) if each]
        assert exact.key(";\n".join(statements)) == said


@of_today
@pytest.mark.parametrize(
    ("dialect", "text", "tree"),
    [
        ("bigquery", r"select r'^A' = '^A'", "select(eq('^A', '^A'))"),
        ("mysql", "select N'y', x'41', b'01'", "select('y', hexstring('41'), bitstring('01'))"),
        ("postgres", "select $$a$$", "select('a')"),
        ("duckdb", "pivot t on a using sum(b) group by c", "pivot(a, sum(b), group(c), this(t))"),
        ("singlestore", "select a from t", "select(t.a, from(t))"),
    ],
)
def test_trees_by_hand(dialect: str, text: str, tree: str) -> None:
    assert str(parse(text, language(dialect))) == tree


def test_values_of_every_notation_are_anonymised() -> None:
    for dialect, text in (("bigquery", "r'a'"), ("mysql", "N'a'"), ("mysql", "x'41'"), ("postgres", "$$a$$")):
        assert "ANON_STRING" in ProgramSpec(language(dialect)).key(f"select * from t where a = {text}")
