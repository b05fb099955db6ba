"""A pool in PostgreSQL: what its rows, its name and its options may be, and what is refused."""

import functools

import numpy as np
import pytest
from plain_reader import reading

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.filters import parse_filter

pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector import PgVectorIndex

DIM = 8
NOTHING = np.empty(0, dtype=np.int64)


def rows_of_two():
    vectors = PoolVectors(*np.random.default_rng(0).normal(size=(2, 2, DIM)).astype(np.float32))
    return [Row(f"id {n}", {"source": f"q {n}", "target": f"p {n}"}, n) for n in range(2)], vectors


@pytest.fixture
def two(new):
    """An index of two rows, and their vectors."""
    index, (rows, vectors) = new(), rows_of_two()
    index.bind("f", DIM)
    index.add(rows, vectors)
    return index, vectors


@pytest.mark.slow
def test_what_a_row_may_hold(two):
    """SQL, a megabyte, unusual numbers: all come back equal, and the types JSON has come back as they were."""
    index, vectors = two
    nasty = "'; DROP TABLE rcr_pools; -- $1 %s %(x)s {} \\ \" \u2028 \U0001f600 \x01"
    example = {
        nasty: nasty,
        "": "",
        "long": "x" * 1_000_000,
        "random": "".join(map(chr, np.random.default_rng(0).integers(32, 126, 1_000_000))),
        "numbers": [0, -1, 1.0, 0.1, 1e-300, 5e-324, 1e300, 2**53 + 1, 10**40, 1.2345678901234567e30, -0.0],
        "nested": {"a": [None, True, {"b": []}]},
        "tuple": (1, 2),
    }
    ids = [nasty, "i" * 1_000_000]
    index.add([Row(one, example, -(2**63)) for one in ids], vectors)
    assert index.known([*ids, "id 0"]) == {*ids, "id 0"}
    with reading(index, parse_filter({nasty: nasty})) as reader:
        keys, _ = reader.search(np.ones((1, DIM), dtype=np.float32), 2, [NOTHING])
        found = reader.rows(np.sort(keys[0]))
    assert [row.id for row in found] == ids
    assert found[0].example == example | {"tuple": [1, 2]}
    assert found[0].program == -(2**63)
    assert [type(one) for one in found[0].example["numbers"][:4]] == [int, int, float, float]
    with reading(index, parse_filter({"long": {"$gte": "x" * 999_999}})) as reader:
        assert reader.size == 2
    with pytest.raises(PoolError) as caught:
        index.add([Row(ids[1], {}, 0)], PoolVectors(vectors.candidate[:1], vectors.context[:1]))
    assert len(str(caught.value)) < 200
    assert index.delete(ids) == 2


@pytest.mark.slow
def test_pools_with_unusual_names(new):
    for name in ("a'; DROP TABLE rcr_pools; --", '"$1 %s', "ü\U0001f600" * 60):
        index = new(name)
        index.bind("f", DIM)
        index.add(*rows_of_two())
        assert new(name).count() == 2


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"a": "x\0y"}, "example 'n': field 'a' contains a NUL character"),
        ({"a": {"b": ["\ud800"]}}, "field 'a' contains a lone surrogate"),
        ({"a\0": 1}, r"field 'a\\x00' contains a NUL character"),
        ({"a": float("nan")}, "field 'a' contains nan"),
        ({"a": {1: 2}}, "field 'a' contains a mapping with keys that are not strings"),
        ({"a": {1, 2}}, "field 'a' contains <class 'set'>"),
        ({"a": 10**5000}, "field 'a' contains a whole number of thousands of digits"),
        ({1: "a"}, "field 1 has a name that is not a string"),
        ({"a": functools.reduce(lambda inner, _: [inner], range(5000), [])}, "field 'a' is nested too deeply"),
    ],
)
def test_what_postgresql_can_not_keep_is_named(two, example, message):
    index, _ = two
    vectors = PoolVectors(*np.ones((2, 1, DIM), dtype=np.float32))
    with pytest.raises(PoolError, match=message):
        index.add([Row("n", example, 0)], vectors)
    with pytest.raises(PoolError, match="NUL character or a lone surrogate"):
        index.add([Row("n\0", {}, 0)], vectors)
    assert index.count() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": ""}, "pool must be a name of 1 to 200"),
        ({"pool": "x" * 1_000_000}, "pool must be a name"),
        ({"pool": "a\0"}, "pool must be a name"),
        ({"schema": "s" * 64}, "schema must be a name of 1 to 63 bytes"),
        ({"schema": "50%"}, "schema must be a name"),
        ({"kind": "ivf"}, "kind must be 'exact' or 'hnsw', not 'ivf'"),
        ({"m": 1}, "m must be a whole number from 2 to 100"),
        ({"ef_construction": 20}, "ef_construction must be a whole number from 32 to 1000"),
        ({"ef_search": 1001}, "ef_search must be"),
        ({"max_connections": 0}, "max_connections must be a whole number from 1 to 10000"),
        ({"read_timeout_s": 0}, "read_timeout_s must be a positive number of seconds"),
        ({"wait_timeout_s": "30"}, "wait_timeout_s must be a positive number of seconds, not '30'"),
        ({"url": "postgresql//user:secret@host"}, "url is not an address"),
        ({"url": None}, "url is not an address"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(InputError, match=message) as caught:
        PgVectorIndex(**{"url": "postgresql://localhost"} | options)
    assert "secret" not in str(caught.value)
