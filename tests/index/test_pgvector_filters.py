"""Metadata filters in SQL mean what `filters.matches` means; examples and vectors come back as they went."""

import json
import math
from enum import Enum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.filters import AllOf, AnyOf, Compare, Not, matches, parse_filter

psycopg = pytest.importorskip("psycopg")
from langchain_rcr.index.pgvector.jsonb import storable, to_json, to_sql  # noqa: E402

pytestmark = pytest.mark.slow

SETTINGS = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Few, so that equal ones meet; in the order of code points, "Z" < "a" < "ä" < "\ud7ff" < "\ue000" < "\U00010000".
TEXTS = st.sampled_from(
    ["", "a", "Z", "aa", "ä", "\ud7ff", "\ue000", "\U00010000", "'", '"', "$1", "%s", "\\", "a\x01", "1"]
)
SMALL = [0, 1, -1, 1.0, -0.0, 0.1, 0.30000000000000004, 1.5, 5e-324]
LARGE = [2**53, 2**53 + 1, 2.0**53, 10**22, 1e22, 1e23, 10**23, int(1e23), 1.2345678901234567e30]
HUGE = [int(1.2345678901234567e30), 1.7976931348623157e308, 10**400, -(10**400)]
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = TEXTS | st.sampled_from([*SMALL, *LARGE, *HUGE]) | st.none() | st.booleans() | st.integers() | FLOATS
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(TEXTS, SCALARS, max_size=1))
KEYS = st.sampled_from(["a", "b", "'; --", "%s", "", "ä"])
EXAMPLES = st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=8)
COMPARISONS = st.one_of(
    st.builds(Compare, KEYS, st.sampled_from(["eq", "ne", "lt", "lte", "gt", "gte", "contains"]), SCALARS),
    st.builds(Compare, KEYS, st.sampled_from(["in", "nin"]), st.lists(SCALARS, max_size=3).map(tuple)),
    st.builds(Compare, KEYS, st.just("exists"), st.booleans()),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda part: st.one_of(
        st.builds(Not, part),
        st.builds(AllOf, st.lists(part, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(part, max_size=3).map(tuple)),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def connection(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def passing(connection, condition, examples):
    """Which examples pass in PostgreSQL."""
    values = {"texts": [to_json(example, "x") for example in examples]}
    test = to_sql(condition, values)
    query = f"SELECT {test} FROM unnest(%(texts)s::jsonb[]) WITH ORDINALITY e (example, n) ORDER BY n"
    return [value for (value,) in connection.execute(query, values).fetchall()]


@SETTINGS
@given(condition=FILTERS, examples=EXAMPLES)
def test_the_sql_means_what_matches_means(connection, condition, examples):
    assert passing(connection, condition, examples) == [matches(condition, example) for example in examples]


@pytest.mark.parametrize("op", ["lt", "lte", "gt", "gte"])
@pytest.mark.parametrize("value", ["a", "\ud7ff", "ä", "Z", 1, 2**53, 2.0**53, 1e23])
def test_order_of_texts_and_numbers(connection, op, value):
    """Pairs around each limit, which random ones would seldom meet."""
    fields = ["a", "a\x01", "Z", "ab", "\ud7ff", "\ud7ffz", "\ue000", "\ud7ff\ue000", "\U00010000", "", "z", "\x01"]
    fields += [0, 1, 1.0, True, None, [], 2**53 - 1, 2**53, 2**53 + 1, 1e23, 10**23, int(1e23), 0.1]
    examples = [{"k": field} for field in fields]
    condition = Compare("k", op, value)
    assert passing(connection, condition, examples) == [matches(condition, example) for example in examples]


def test_equal_means_equal_as_in_json(connection):
    examples = [{"k": 1}, {"k": 1.0}, {"k": True}, {"k": "1"}, {"k": None}, {}, {"k": [1]}, {"k": {"a": 1}}]
    for spec, expected in (
        ({"k": 1}, [1, 1, 0, 0, 0, 0, 0, 0]),
        ({"k": {"$ne": 1}}, [0, 0, 1, 1, 1, 1, 1, 1]),
        ({"k": True}, [0, 0, 1, 0, 0, 0, 0, 0]),
        ({"k": None}, [0, 0, 0, 0, 1, 0, 0, 0]),
        ({"k": {"$in": [None, "1", 1]}}, [1, 1, 0, 1, 1, 0, 0, 0]),
        ({"k": {"$nin": []}}, [1] * 8),
        ({"k": {"$exists": False}}, [0, 0, 0, 0, 0, 1, 0, 0]),
    ):
        condition = parse_filter(spec)
        assert passing(connection, condition, examples) == [bool(one) for one in expected]
        assert [matches(condition, example) for example in examples] == [bool(one) for one in expected]


@SETTINGS
@given(value=st.recursive(SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(TEXTS, one, max_size=3)))
def test_examples_come_back_equal(connection, value):
    text = to_json({"k": value}, "x")
    ((back,),) = connection.execute("SELECT (%s::jsonb)::text", [text]).fetchall()
    assert json.loads(back) == {"k": value}


def test_texts_of_a_class_are_kept_as_they_compare():
    class Colour(str, Enum):  # noqa: UP042 - prints its name, unlike a StrEnum
        RED = "red"

    example = {"k": Colour.RED, "of": [{Colour.RED: Colour.RED}]}
    assert json.loads(to_json(example, "x")) == json.loads(json.dumps(example)) == example


def test_a_value_that_is_none_is_refused():
    for value in (math.nan, math.inf, [1], {"a": 1}, b"x", 10**5000, "a\0", "\ud800"):
        for op in ("eq", "gte"):
            with pytest.raises(InputError, match="filter: a value"):
                to_sql(Compare("k", op, value), {})
    with pytest.raises(InputError, match=r"filter: the field 'a\\x00' contains a NUL"):
        to_sql(Compare("a\0", "exists", True), {})


@given(text=st.text(st.characters(exclude_categories=())))
def test_storable_texts(text):
    assert storable(text) == ("\0" not in text and not any(0xD800 <= ord(one) <= 0xDFFF for one in text))


def test_numbers_that_json_has_not():
    with pytest.raises(PoolError, match="'k' contains inf"):
        to_json({"k": math.inf}, "x")
