"""Metadata filters: how they are written, what they mean, what they refuse."""

import math

import numpy as np
import pytest

from langchain_rcr.errors import InputError
from langchain_rcr.index import filters
from langchain_rcr.index.filters import (
    AllOf,
    AnyOf,
    Compare,
    Not,
    fields_of,
    joined,
    matches,
    parse_filter,
    pins,
    unknown_field,
)

ROW = {"db": "geo", "year": 2005, "ok": True, "none": None, "tags": ["a"], "share": 0.5, "nan": math.nan}


def deep(times, within=lambda spec: {"$not": spec}):
    """A filter in a filter in a filter."""
    spec = {"a": 1}
    for _ in range(times):
        spec = within(spec)
    return spec


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ({"db": "geo"}, Compare("db", "eq", "geo")),
        ({"db": None}, Compare("db", "eq", None)),
        ({}, AllOf(())),
        (
            {"year": {"$gte": 2000, "$lt": 2010}},
            AllOf((Compare("year", "gte", 2000), Compare("year", "lt", 2010))),
        ),
        ({"a": 1, "b": {"$ne": 2}}, AllOf((Compare("a", "eq", 1), Compare("b", "ne", 2)))),
        (
            {"$or": [{"a": 1}, {"$not": {"b": {"$in": [1, "x"]}}}]},
            AnyOf((Compare("a", "eq", 1), Not(Compare("b", "in", (1, "x"))))),
        ),
        ({"$and": [{"a": {"$exists": False}}]}, AllOf((Compare("a", "exists", False),))),
        ({"a": {"$nin": (1,)}}, Compare("a", "nin", (1,))),
    ],
)
def test_filters_are_read(spec, parsed):
    assert parse_filter(spec) == parsed


@pytest.mark.parametrize(
    ("spec", "passes"),
    [
        ({}, True),
        ({"db": "geo"}, True),
        ({"db": "Geo"}, False),
        ({"year": 2005.0}, True),
        ({"ok": 1}, False),
        ({"ok": True}, True),
        ({"year": {"$ne": "2005"}}, True),
        ({"none": None}, True),
        ({"absent": None}, False),
        ({"absent": {"$ne": 3}}, True),
        ({"absent": {"$nin": [3]}}, True),
        ({"absent": {"$lt": 3}}, False),
        ({"$not": {"absent": {"$lt": 3}}}, True),
        ({"none": {"$exists": True}}, True),
        ({"absent": {"$exists": False}}, True),
        ({"db": {"$exists": False}}, False),
        ({"tags": "a"}, False),
        ({"tags": {"$nin": ["a"]}}, True),
        ({"tags": {"$contains": "a"}}, True),
        ({"tags": {"$contains": "A"}}, False),
        ({"$not": {"tags": {"$contains": "a"}}}, False),
        ({"db": {"$contains": "g"}}, False),
        ({"absent": {"$contains": None}}, False),
        ({"year": {"$gt": 2004.5, "$lte": 2005}}, True),
        ({"year": {"$gt": "2004"}}, False),
        ({"year": {"$lte": True}}, False),
        ({"db": {"$lt": "gf", "$gte": "geo"}}, True),
        ({"db": {"$lt": "Z"}}, False),
        ({"nan": {"$ne": 1}}, True),
        ({"nan": {"$lt": 1}}, False),
        ({"share": {"$in": [1, 0.5]}}, True),
        ({"share": {"$in": []}}, False),
        ({"share": {"$nin": []}}, True),
        ({"$or": [{"db": "x"}, {"ok": True}]}, True),
        ({"$and": [{"db": "geo"}, {"ok": False}]}, False),
    ],
)
def test_what_passes(spec, passes):
    assert matches(parse_filter(spec), ROW) is passes


@pytest.mark.parametrize("field", ["1", 1, 1.0, True, 0, False, None, math.nan, 2**70, 1e23, "", [1], {"1": 1}, (1,)])
def test_one_of_many_values_is_looked_up(field):
    values = [*range(5000), "1", 2**70, 10**23, True, None]
    for op in ("in", "nin"):
        looked_up, compared = parse_filter({"k": {f"${op}": values}}), Compare("k", op, tuple(values))
        assert (looked_up, repr(looked_up)) == (compared, repr(compared))
        assert matches(looked_up, {"k": field}) is matches(compared, {"k": field})


@pytest.mark.parametrize("field", [np.int64(2005), np.int8(5), np.float32(0.5), np.bool_(True), np.str_("geo")])
def test_numbers_of_numpy_are_numbers(field):
    """As in a row of a data frame; an example with one passed no filter on it."""
    plain = field.item()
    for value in (plain, field):
        for spec in ({"k": value}, {"k": {"$in": ["x", value]}}, {"k": {"$nin": [None]}}):
            assert matches(parse_filter(spec), {"k": field})
        assert matches(parse_filter({"k": {"$gte": value}}), {"k": field}) is not isinstance(plain, bool)
        assert type(parse_filter({"k": value}).value) is type(plain)
    assert not matches(parse_filter({"k": "2005"}), {"k": field})


def test_many_values_and_many_rows_take_no_quadratic_time(monkeypatch):
    asked = []
    monkeypatch.setattr(filters, "_kind", lambda one, real=filters._kind: asked.append(one) or real(one))
    where = parse_filter({"k": {"$in": [*range(1000, 2000)]}})
    assert sum(matches(where, {"k": n}) for n in range(1500)) == 500
    assert len(asked) <= 2500


def test_filters_are_joined():
    one, two = Compare("a", "eq", 1), Compare("b", "ne", 2)
    assert joined() is joined(None, {}) is None
    assert joined({}, {"a": 1}, None) == one
    assert joined({"a": 1}, {"b": {"$ne": 2}}) == AllOf((one, two))
    assert pins(joined({"$and": [{"a": 1}]}, {"b": 3}), "a")
    for spec in (None, {"b": 1}, {"a": {"$ne": 1}}, {"$not": {"a": 1}}, {"$or": [{"a": 1}, {"b": 1}]}):
        assert not pins(joined(spec), "a")


def test_without_parts():
    assert matches(AllOf(()), {})
    assert not matches(AnyOf(()), {})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("db", "must be a mapping of fields to values, not str"),
        ({3: 1}, "a field must be a non-empty string, not 3"),
        ({"": 1}, "a field must be a non-empty string"),
        ({"$or": []}, r"\$or takes a list of filters"),
        ({"$or": {"a": 1}}, r"\$or takes a list of filters"),
        ({"$nor": [{"a": 1}]}, r"unknown operator '\$nor'"),
        ({"a": {"$like": "x"}}, r"unknown operator '\$like' at 'a' \(known: \$eq, "),
        ({"a": {"gt": 1}}, "unknown operator 'gt' at 'a'"),
        ({"a": {}}, "'a' has no condition"),
        ({"a": {"$in": "abc"}}, r"\$in at 'a' takes a list, not 'abc'"),
        ({"a": {"$exists": 1}}, r"\$exists at 'a' takes true or false, not 1"),
        ({"a": [1]}, "'a' can be compared with text, numbers, true, false and null"),
        ({"a": {"$gt": math.nan}}, "'a' can be compared with"),
        ({"a": {"$in": [math.inf]}}, "'a' can be compared with"),
        ({"$not": 3}, "must be a mapping"),
        ({"a": {"$contains": ["a"]}}, "'a' can be compared with"),
        ({"a": 10**5000}, "'a' can't be compared with a whole number of thousands of digits"),
        ({"a": {"$in": [[10**5000]]}}, "'a' can be compared with .*not such a list"),
        (deep(80), "nested more than 50 deep"),
        (deep(100_000), "nested more than 50 deep"),
        (deep(51), "nested more than 50 deep"),
        (deep(51, lambda spec: {"$and": [spec]}), "nested more than 50 deep"),
    ],
)
def test_what_is_no_filter_is_named(spec, message):
    with pytest.raises(InputError, match=f"^filter: .*{message}|^filter: {message}"):
        parse_filter(spec)


def test_a_filter_may_be_fifty_deep():
    assert matches(parse_filter(deep(50)), {"a": 1})


def test_fields_and_the_error_for_an_unknown_one():
    condition = parse_filter({"$or": [{"a": 1}, {"$not": {"b": {"$gt": 2}}}], "c": {"$exists": True}})
    assert fields_of(condition) == {"a", "b"}
    assert str(unknown_field(condition, ["z", "a"])) == "filter: no example has a field 'b' (fields there: 'a', 'z')"
    assert "(fields there: none)" in str(unknown_field(condition, []))
