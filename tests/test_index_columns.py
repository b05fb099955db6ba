"""Filters over columns: the plain `matches` of every row, whatever the values."""

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_rcr.filters import AllOf, AnyOf, Compare, Not, matches, parse_filter
from langchain_rcr.index.base import Row
from langchain_rcr.index.columns import Columns

FIELDS = ("a", "b")
plain = st.sampled_from(
    [None, True, False, 0, 1, 1.0, -0.0, 0.5, 2**53, 2.0**53, 2**53 + 1, 10**400, "", "a", "b", "1", "é"]
)
values = plain | st.sampled_from([math.nan, math.inf, -math.inf, [1], {}, (1,)]) | st.integers() | st.text(max_size=2)
examples = st.dictionaries(st.sampled_from(FIELDS), values)
ordered = plain | st.integers() | st.text(max_size=2)
compares = st.one_of(
    st.builds(Compare, st.sampled_from(FIELDS), st.sampled_from(["eq", "ne", "lt", "lte", "gt", "gte"]), ordered),
    st.builds(Compare, st.sampled_from(FIELDS), st.sampled_from(["in", "nin"]), st.lists(plain, max_size=3).map(tuple)),
    st.builds(Compare, st.sampled_from(FIELDS), st.just("exists"), st.booleans()),
)
filters = st.recursive(
    compares,
    lambda part: st.one_of(
        st.builds(AllOf, st.lists(part, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(part, max_size=3).map(tuple)),
        st.builds(Not, part),
    ),
    max_leaves=4,
)


def rows_of(many):
    return [Row(str(n), example, 0) for n, example in enumerate(many)]


def test_shape_and_values_by_hand():
    rows = rows_of([{"a": 1}, {"a": True}, {"a": "1"}, {}, {"a": 3}, {"a": [1]}])
    columns = Columns(rows)
    assert columns.passing(parse_filter({"a": 1.0}), 6).tolist() == [True, False, False, False, False, False]
    assert columns.passing(parse_filter({"a": True}), 6).tolist() == [False, True, False, False, False, False]
    assert columns.passing(parse_filter({"a": {"$gt": 0}}), 6).tolist() == [True, False, False, False, True, False]
    assert columns.passing(parse_filter({"a": {"$ne": 1}}), 6).tolist() == [False, True, True, True, True, True]
    assert columns.passing(parse_filter({"a": {"$exists": True}}), 3).tolist() == [True] * 3
    assert columns.passing(parse_filter({}), 2).dtype == bool


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(examples, max_size=12), st.lists(filters, min_size=1, max_size=4), st.data())
def test_equals_matches_row_by_row_also_while_the_rows_grow(many, conditions, data):
    rows = rows_of(many[: len(many) // 2])
    columns = Columns(rows)
    for condition in conditions:
        assert columns.passing(condition, len(rows)).tolist() == [matches(condition, row.example) for row in rows]
    rows.extend(rows_of(many)[len(rows) :])
    count = data.draw(st.integers(0, len(rows)))
    for condition in conditions:
        for n in (len(rows), count):
            assert columns.passing(condition, n).tolist() == [matches(condition, row.example) for row in rows[:n]]


def test_each_row_is_looked_at_once_a_field():
    class Counting(dict):
        looks = 0

        def __getitem__(self, key):
            Counting.looks += 1
            return super().__getitem__(key)

    rows = rows_of([Counting(a=n) for n in range(20)])
    columns = Columns(rows)
    for bound in range(10):
        columns.passing(parse_filter({"a": {"$lt": bound}}), 20)
    assert Counting.looks == 20
    rows.append(Row("x", Counting(a=3), 0))
    assert columns.passing(parse_filter({"a": 3}), 21).sum() == 2
    assert Counting.looks == 21


def test_from_many_threads_while_rows_are_appended():
    rows = rows_of([{"a": n % 7, "b": str(n)} for n in range(200)])
    columns, wrong, stop = Columns(rows), [], threading.Event()

    def read():
        while not stop.is_set():
            count = len(rows)
            for key, value in (("a", 3), ("b", "150")):
                got = columns.passing(Compare(key, "eq", value), count)
                if got.tolist() != [row.example[key] == value for row in rows[:count]]:
                    wrong.append(key)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for n in range(200, 400):
        rows.append(Row(str(n), {"a": n % 7, "b": str(n)}, 0))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("op", ["lt", "gte"])
def test_strings_compare_by_code_point(op):
    words = ["z", "é", "😀", "\ufb00", "Z", ""]
    got = Columns(rows_of([{"a": word} for word in words])).passing(Compare("a", op, "\ufb00"), len(words))
    assert got.tolist() == [(word < "\ufb00") is (op == "lt") for word in words]
    assert 0 < got.sum() < len(words)
