from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from rcr_trainer.data.coverage import structure_matrices

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec, Tree, anonymize, parse

COVR = "count ( with_relation ( filter ( black , find ( mouse ) ) , playing with , find ( dog ) ) )"


def shown(text: str) -> str:
    tree = parse(text, "functional")
    assert tree is not None
    return str(anonymize(tree))


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


def test_anonymize_twice_changes_nothing_more() -> None:
    tree = parse("f('a', 3, _, playing with, round)")
    assert tree is not None
    once = anonymize(tree)
    assert anonymize(once) == once


@pytest.mark.slow
def test_anonymize_does_not_recurse() -> None:
    tree = Tree("'x'")
    for _ in range(50_000):
        tree = Tree("f", (tree,))
    assert str(anonymize(tree)).count("ANON_STRING") == 1


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


def test_values_are_the_strings_and_numbers_as_they_are_written() -> None:
    assert ProgramSpec().values("f('a', \"b\", -1.5, x, _, 3(y))") == {"'a'", '"b"', "-1.5"}
    assert ProgramSpec("tokens").values("top 3 in 'a'") == {"3", "'a'"}
    assert ProgramSpec().values("f((") == set()


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
        ({"max_size": 0}, "max_size: must be from 1 to 8, got 0"),
    ],
)
def test_spec_refuses_bad_fields(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ProgramSpec(**fields)  # type: ignore[arg-type]


def test_what_an_earlier_version_wrote_is_read() -> None:
    spec = ProgramSpec("sql", anonymize="names", max_size=3)
    assert spec.to_json() == {"language": "sql", "anonymize": "names", "covr_classes": False, "max_size": 3}
    assert ProgramSpec.from_json(spec.to_json()) == spec
    with pytest.raises(InputError, match=r"covr_classes: .* train again"):
        ProgramSpec.from_json({**spec.to_json(), "covr_classes": True})


def test_matrices_by_hand() -> None:
    left, right = structure_matrices(ProgramSpec(max_size=1), ["f(x)", "((", "f(x, y)"], ["y", "f(x)"])
    # columns: f, x, y
    assert left.toarray().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert right.toarray().tolist() == [[0, 0, 1], [1, 1, 0]]


def test_matrices_equal_the_sets() -> None:
    spec = ProgramSpec()
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


def test_a_program_is_parsed_once_for_its_key_and_its_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def parsed(language: str, shape: bool, text: str) -> Tree | None:
        read.append(text)
        return parse(text, language)

    monkeypatch.setattr("langchain_rcr.programs.spec._parsed", parsed)
    spec, programs = ProgramSpec(), [f"count(once(only{n}))" for n in range(9)]
    assert [len(spec.structures(text)) for text in programs] == [9] * 9
    assert [spec.key(text) for text in programs] == programs
    assert read == programs
