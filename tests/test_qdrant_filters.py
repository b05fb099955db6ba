"""Metadata filters on Qdrant mean what `filters.matches` means, on the Python engine and on Qdrant's own."""

import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge")
from qdrant_server import QdrantServer

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.filters import AllOf, AnyOf, Compare, Not, matches, parse_filter
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.qdrant import QdrantIndex
from langchain_rcr.index.qdrant_filters import compile_filter, payload

NONE = [np.empty(0, dtype=np.int64)]
KEYS = ["a", "b.c", 'q"uo[0].te', "übung \U0001f600", "x_a", "x" * 300, "a[]", "*", "lone \ud800", "nul\0"]
VALUES = [
    None, True, False, 0, 1, 1.0, -0.0, 0.5, -1, 2, 1e-320, 1e300, 10**300, -1e300, 10**400, -(10**400),
    sys.float_info.max, 2**53, 2**53 + 1, float(2**53), 2**63 - 1, 2**63, 2**70, "", "0", "1", "true", "null",
    "a", "B", "b", "é", "\U0001f600", "\uffff", "lone \ud800", "z" * 10_000, "'; DROP TABLE points; --", '"', "\\", "%",
    "12345678123456781234567812345678",
    [], [1], {"a": 1}, ["a", "b"],
]  # fmt: skip
SCALARS = [value for value in VALUES if not isinstance(value, list | dict)] + [1e-9 + 1, 3, "c"]


def examples() -> list[dict]:
    """Each value at two keys, pairs at random, and each key somewhere."""
    rng = np.random.default_rng(3)
    found = [{}] + [{key: value} for value in VALUES for key in KEYS[:2]]
    found += [{key: VALUES[rng.integers(len(VALUES))] for key in KEYS} for _ in range(60)]
    found += [{key: VALUES[rng.integers(len(VALUES))]} for key in KEYS[2:] for _ in range(3)]
    return found


EXAMPLES = examples()
ROWS = [Row(str(at), one, at) for at, one in enumerate(EXAMPLES)]


@pytest.fixture(scope="module")
def server():
    with QdrantServer() as server:
        yield server


def let_through(index: QdrantIndex, where) -> tuple[int, list[str]]:
    """`size`, and the ids of everything that a search finds."""
    with index.read(where) as reader:
        keys, _ = reader.search(np.ones((1, 2), dtype=np.float32), len(ROWS), NONE)
        return reader.size, [row.id for row in reader.rows(keys[keys >= 0])]


def right(where) -> list[str]:
    return [row.id for row in ROWS if matches(where, row.example)]


comparisons = st.one_of(
    st.builds(Compare, st.sampled_from(KEYS), st.sampled_from(["eq", "ne"]), st.sampled_from(SCALARS)),
    st.builds(Compare, st.sampled_from(KEYS), st.sampled_from(["lt", "lte", "gt", "gte"]), st.sampled_from(SCALARS)),
    st.builds(
        Compare,
        st.sampled_from(KEYS),
        st.sampled_from(["in", "nin"]),
        st.lists(st.sampled_from(SCALARS), max_size=4).map(tuple),
    ),
    st.builds(Compare, st.sampled_from(KEYS), st.just("exists"), st.booleans()),
)
filters = st.recursive(
    comparisons,
    lambda parts: st.one_of(
        st.builds(AllOf, st.lists(parts, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(parts, max_size=3).map(tuple)),
        st.builds(Not, parts),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("engine", ["memory", "server"])
@settings(max_examples=50, deadline=None)
@example(where=Not(Compare("a", "lt", 2**53 + 1)))
@example(where=AllOf((Not(Compare("a", "gte", "b")), Not(Compare("b.c", "lte", -(10**400))))))
@example(where=AnyOf((Not(AnyOf(())), Compare("a", "eq", 1))))
@given(where=filters)
def test_exactly_what_matches_lets_through(engines, engine, where) -> None:
    wanted = right(where)
    assert let_through(engines[engine], where) == (len(wanted), wanted)


@pytest.fixture(scope="module")
def engines(server):
    matrix = np.ones((len(ROWS), 2), dtype=np.float32)
    made = {"memory": QdrantIndex(":memory:", "filters"), "server": QdrantIndex(server.url, "filters of all")}
    for index in made.values():
        index.bind("f", 2)
        index.add(ROWS, PoolVectors(matrix, matrix))
    yield made
    for index in made.values():
        index.close()


@pytest.mark.parametrize("engine", ["memory", "server"])
def test_every_comparison_of_every_value(engines, engine) -> None:
    operators = ["eq", "ne", "lt", "lte", "gt", "gte"]
    rng = np.random.default_rng(5)
    pairs = list(itertools.product(operators, SCALARS))
    for at in rng.permutation(len(pairs))[:40]:
        where = Compare(KEYS[0], *pairs[at])
        wanted = right(where)
        assert let_through(engines[engine], where) == (len(wanted), wanted), where


def test_examples_come_back_as_they_were(engines) -> None:
    for index in engines.values():
        with index.read() as reader:
            keys, _ = reader.search(np.ones((1, 2), dtype=np.float32), len(ROWS), NONE)
            rows = reader.rows(keys[0])
        assert [row.id for row in rows] == [row.id for row in ROWS]
        for row, back in zip(ROWS, rows, strict=True):
            assert json.dumps(back.example) == json.dumps(row.example)
            assert back.program == row.program


@pytest.mark.parametrize(
    ("spec", "exact"),
    [
        ({"db": "geo"}, True),
        ({"db": {"$in": ["geo", None, 1.0, True]}}, True),
        ({"$not": {"db": {"$exists": False}}}, True),
        ({"year": {"$gte": 2000}}, False),
        ({"$and": [{"db": {"$ne": 1}}, {"name": {"$lt": "b"}}]}, False),
    ],
)
def test_what_qdrant_can_say_exactly_is_not_checked_again(spec, exact) -> None:
    native, is_exact = compile_filter(parse_filter(spec))
    assert native is not None
    assert is_exact is exact


def test_a_field_that_no_example_has_is_named(engines) -> None:
    for index in engines.values():
        with pytest.raises(InputError, match=r"no example has a field 'nope' \(fields there: .*'b\.c'.*"):
            let_through(index, parse_filter({"nope": {"$ne": 1}}))
        assert let_through(index, Compare("nope", "exists", False))[0] == len(ROWS)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"a": float("nan")}, "field 'a'"),
        ({"a": {1, 2}}, "field 'a'"),
        ({"a": 10**5000}, "field 'a'"),
        ({"a": [{"b": {1: 2}}]}, "field 'a' contains a mapping with keys that are not strings"),
        ({1: "a"}, "the field name 1 is not a string"),
    ],
)
def test_what_json_cannot_keep_is_refused_by_name(example, says) -> None:
    with pytest.raises(PoolError, match=says):
        payload(Row("r", example, 1), 1, 1.0)
    with pytest.raises(PoolError, match="lone surrogate"):
        payload(Row("\ud800", {}, 1), 1, 1.0)
