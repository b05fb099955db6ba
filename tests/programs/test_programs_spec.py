from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from rcr_trainer.data.coverage import structure_matrices

from langchain_rcr.errors import InputError
from langchain_rcr.programs import COVR_CLASSES, ProgramSpec, Tree, anonymize, parse

COVR = "count ( with_relation ( filter ( black , find ( mouse ) ) , playing with , find ( dog ) ) )"


def shown(text: str, classes: dict[str, str] | None = None, language: str = "functional") -> str:
    tree = parse(text, language)
    assert tree is not None
    return str(anonymize(tree, classes))


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("answer(city(loc_2(stateid('virginia'))))", "answer(city(loc_2(stateid(ANON_STRING))))"),
        ('cityid("new york", _)', "cityid(ANON_STRING, ANON_VALUE)"),
        ("f(3, -1.5, .5, 2e-3, 3L)", "f(ANON_NUMBER, ANON_NUMBER, ANON_NUMBER, ANON_NUMBER, ANON_NUMBER)"),
        ("f(loc_2, x3, -, e5, a'b)", "f(loc_2, x3, -, e5, a'b)"),
        ("top 3", "top(ANON_NUMBER)"),
        ("_(x, 3(y))", "_(x, 3(y))"),
        ("state(all)", "state(all)"),
    ],
)
def test_anonymize_values(text: str, after: str) -> None:
    assert shown(text) == after


def test_anonymize_covr_as_in_the_papers_appendix() -> None:
    paper = (
        "count ( with_relation ( filter ( ANON_TYPE_VALUE , find ( ANON_ENTITY ) ) , ANON_RELATION , "
        "find ( ANON_ENTITY ) ) )"
    )
    tree = parse(COVR)
    assert tree is not None
    assert anonymize(tree, COVR_CLASSES) == parse(paper)
    assert anonymize(tree) == tree


def test_anonymize_collapses_only_a_whole_chain() -> None:
    classes = {"playing with": "R", "with": "W", "a b c": "ABC"}
    assert shown("f(playing with, playing, with, playing (with, x))", classes) == "f(R, playing, W, playing(W, x))"
    assert shown("a b c", classes) == "ABC"
    assert shown("x a b c", classes) == "x(ABC)"
    assert shown("a b c d", classes) == "a(b(c(d)))"


def test_anonymize_names_attributes_consistently() -> None:
    color, shape = "query_attr [ color ] ( find ( cat ) )", "query_attr [ shape ] ( find ( dog ) )"
    spec = ProgramSpec(covr_classes=True)
    assert spec.key(color) == spec.key(shape) == "query_attr(ANON_TYPE, find(ANON_ENTITY))"


def test_anonymize_twice_changes_nothing_more() -> None:
    tree = parse("f('a', 3, _, playing with, round)")
    assert tree is not None
    once = anonymize(tree, COVR_CLASSES)
    assert anonymize(once, COVR_CLASSES) == once


@pytest.mark.slow
def test_anonymize_does_not_recurse() -> None:
    tree = Tree("'x'")
    for _ in range(50_000):
        tree = Tree("f", (tree,))
    assert str(anonymize(tree, COVR_CLASSES)).count("ANON_STRING") == 1


def test_spec_tree_structures_and_key() -> None:
    spec = ProgramSpec()
    assert spec.tree("f('a')") == Tree("f", (Tree("ANON_STRING"),))
    assert spec.structures("f('a')") == {
        "f",
        "ANON_STRING",
        "f -> ANON_STRING",
        "<root> -> f",
        "<root> -> f -> ANON_STRING",
    }
    assert spec.key("f ( 'a' )") == spec.key('f("b")') == "f(ANON_STRING)"
    plain = ProgramSpec(anonymize=False, max_size=1)
    assert plain.structures("f('a')") == {"f", "'a'"}
    assert plain.key("f ( 'a' )") != plain.key("f('b')")


def test_spec_of_what_does_not_parse() -> None:
    spec = ProgramSpec()
    assert spec.tree("f((") is None
    assert spec.structures("f((") == frozenset()
    assert spec.key(" f((  x\n") == "f(( x"


def test_spec_reads_other_languages() -> None:
    spec = ProgramSpec("sql:sqlite")
    assert spec.key("SELECT a FROM t WHERE b = 'x'") == spec.key("select a from T where b='y' ;")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"language": "sqll"}, "did you mean 'sql'"),
        ({"max_size": 0}, "max_size: must be at least 1, got 0"),
        ({"anonymize": False, "covr_classes": True}, "covr_classes: needs anonymize"),
    ],
)
def test_spec_refuses_bad_fields(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ProgramSpec(**fields)  # type: ignore[arg-type]


def test_matrices_by_hand() -> None:
    left, right = structure_matrices(ProgramSpec(max_size=1), ["f(x)", "((", "f(x, y)"], ["y", "f(x)"])
    # columns: f, x, y
    assert left.toarray().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert right.toarray().tolist() == [[0, 0, 1], [1, 1, 0]]


def test_matrices_equal_the_sets() -> None:
    spec = ProgramSpec(covr_classes=True)
    lists = [[COVR, "f(a, b(c), 3)", "scene ( )", COVR], [], ["f(b)", "f(a, b(c), 4)"]]
    matrices = structure_matrices(spec, *lists)
    names = sorted(set().union(*(spec.structures(text) for texts in lists for text in texts)))
    for texts, matrix in zip(lists, matrices, strict=True):
        assert isinstance(matrix, scipy.sparse.csr_array)
        assert matrix.dtype == np.float32
        assert matrix.shape == (len(texts), len(names))
        for row, text in enumerate(texts):
            columns = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
            assert [names[column] for column in columns] == sorted(spec.structures(text))
        assert (matrix.data == 1).all()
        matrix.check_format(full_check=True)


def test_matrix_product_counts_shared_structures() -> None:
    spec = ProgramSpec()
    texts = ["f(a, b)", "f(a)", "g(a, b)"]
    (matrix,) = structure_matrices(spec, texts)
    shared = (matrix @ matrix.T).toarray()
    found = [spec.structures(text) for text in texts]
    assert shared.tolist() == [[len(x & y) for y in found] for x in found]


def test_no_lists_no_matrices() -> None:
    assert structure_matrices(ProgramSpec()) == []


def test_each_program_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def structures(self: ProgramSpec, text: str) -> frozenset[str]:
        seen.append(text)
        return frozenset({text})

    monkeypatch.setattr(ProgramSpec, "structures", structures)
    structure_matrices(ProgramSpec(), ["a", "b", "a"], ["b", "c"])
    assert sorted(seen) == ["a", "b", "c"]
