from __future__ import annotations

import pytest
from fuzzing import LONGEST, Fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_rcr.programs import LANGUAGES, ProgramSpec, Tree, anonymize, get_parser, local_structures

QUICK = settings(max_examples=150, deadline=None, database=None, derandomize=True)

# Pieces that real programs are made of, so that random texts get past the first token.
PIECES = (
    *"()[]{}'\",:;.=+-*<>_#\\\n ",
    *("f", "g(", "a", "b", "1", "2.5", "'x'", '"y"', "playing with", "[ color ]", "$0", "#(Number", ":key"),
    *("select", "from", "where", "t", "u", "and", "or", "not", "in", "is", "null", "as", "join", "on", "union", "with"),
    *("group by", "order by", "count(", "case", "when", "then", "end", "select a from t", "t.a", "cast(", "values"),
    *('"name"', '"arguments"', "true", "null", "lambda", "for", "if", "else", "def", "yield", "await", "f'{", "**"),
)
TEXTS = st.one_of(
    st.text(),
    st.text(st.characters()),
    st.lists(st.sampled_from(PIECES), max_size=25).map(" ".join),
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=12).map(lambda pieces: "select a from t where " + " ".join(pieces)),
)
TREES = st.recursive(
    st.text(max_size=5).map(Tree),
    lambda below: st.builds(lambda label, children: Tree(label, tuple(children)), st.text(max_size=5), st.lists(below)),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("language", [*LANGUAGES, "sql:postgres"])
@QUICK
@given(text=TEXTS)
def test_no_text_makes_a_parser_raise(language: str, text: str) -> None:
    parser = get_parser(language)
    tree = parser.parse(text)
    if tree is None:
        return
    assert tree == parser.parse(text)
    assert local_structures(anonymize(tree))
    assert ProgramSpec(language).key(text) == str(anonymize(tree, everywhere=language == "tokens"))


@pytest.mark.slow
@pytest.mark.parametrize("language", [*LANGUAGES, "sql:postgres", "sql:sqlite", "sql:tsql"])
def test_no_program_by_grammar_makes_a_parser_raise(language: str) -> None:
    parser, parsed = get_parser(language), 0
    for seed in range(60):
        tree = parser.parse(Fuzz(seed).program(language))
        parsed += tree is not None
        if tree is not None:
            assert local_structures(anonymize(tree))
    assert parsed >= 20


@pytest.mark.parametrize("language", [*LANGUAGES, "sql:postgres", "sql:sqlite", "sql:bigquery"])
@pytest.mark.parametrize(
    "literal",
    ["0x" + "f" * LONGEST, "-0x" + "f" * LONGEST, "0o" + "7" * LONGEST, "9" * LONGEST, "1e" + "9" * LONGEST],
    ids=["hex", "negative", "octal", "decimal", "exponent"],
)
def test_no_literal_is_too_long_for_a_parser(language: str, literal: str) -> None:
    """Python converts integers of up to 4,300 digits."""
    for text in (f"f({literal})", f"x[{literal}]", f"select a[{literal}] from t where f({literal}) > {literal}"):
        tree = get_parser(language).parse(text)
        if tree is not None:
            assert ProgramSpec(language).key(text) == str(anonymize(tree, everywhere=language == "tokens"))


@pytest.mark.parametrize("text", ["interval '" + "9" * 400_000 + "' day", "cast('" + "9" * 400_000 + "x' as int)"])
def test_a_long_literal_takes_no_quadratic_time(text: str) -> None:
    for language in LANGUAGES:  # minutes each, if it did
        if (tree := get_parser(language).parse(f"select {text}")) is not None:
            anonymize(tree)


@pytest.mark.slow
@QUICK
@given(left=TREES, right=TREES)
def test_canonical_text_is_equal_for_equal_trees_only(left: Tree, right: Tree) -> None:
    assert (str(left) == str(right)) == (left == right)


@pytest.mark.slow
@QUICK
@given(tree=st.text(min_size=1, max_size=8).map(Tree) | TREES)
def test_structures_rebuild_the_labels(tree: Tree) -> None:
    def unescape(name: str) -> str:
        return name.replace("\\<root>", "<root>").replace("-\\>", "->").replace("\\\\", "\\")

    names = {unescape(name) for name in local_structures(tree, 1)}
    if not any("\\" in node.label for node in tree.walk()):
        assert names == {node.label for node in tree.walk()}
