from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_rcr.programs import COVR_CLASSES, LANGUAGES, ProgramSpec, Tree, anonymize, get_parser, local_structures

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
    assert local_structures(anonymize(tree, COVR_CLASSES))
    assert ProgramSpec(language).key(text) == str(anonymize(tree, everywhere=language == "tokens"))


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
