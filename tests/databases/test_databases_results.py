"""Results of programs that count as the same: values, order of rows, order of columns."""

import datetime
import itertools
import math
import random
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from langchain_rcr.databases.results import Result, canonical

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, Decimal("1.00"), True),
        (True, 1, True),
        (np.int64(3), 3, True),
        (np.float32(0.5), Fraction(1, 2), True),
        (0.1 + 0.2, 0.3, True),
        (1234567890.1, 1234567890.2, False),
        (12345678901, 12345678902, False),
        (2**60, 2**60 + 1, False),
        (1700000000123.0, 1700000000123, True),  # whole numbers are exact, also those in a float
        (1700000000123.0, 1700000000124.0, False),
        (1.0000000000001e20, 1.0000000000002e20, True),
        (math.nan, float("nan"), True),
        (Decimal("NaN"), math.nan, True),
        (math.inf, Decimal("Infinity"), True),
        (1, "1", False),
        ("a", b"a", False),
        (None, "None", False),
        (-0.0, 0, True),
        ([1, 2], (1, 2), True),
        ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True),
        ({1, 2}, frozenset({2, 1}), True),
        (("a,b",), ("a", "b"), False),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1), True),
        (np.array([[1, 2]]), [(1.0, 2.0)], True),
        (np.arange(2000), np.arange(2000.0), True),
        (np.arange(2000), np.where(np.arange(2000) == 1000, 0, np.arange(2000)), False),  # NumPy prints them alike
        (np.str_("a"), "a", True),
        ("<object at 0x1f>", "<object at 0x1f>", True),
    ],
)
def test_what_counts_as_the_same_value(one, other, same):
    assert (canonical(one) == canonical(other)) is same


def test_numbers_of_any_length_are_compared():
    for one, other, same in (
        (10**5000, Decimal("1E+5000"), True),
        (10**5000, 10**5000 + 1, False),
        (-(10**5000), 10**5000, False),
        (2**1000, Decimal(2**1000), True),
        (10**300, Decimal(10**300), True),
        (Decimal("1E+999999999"), Decimal("10E+999999998"), True),
        (Decimal("1.5E+400"), math.inf, False),
        (Decimal("1E-999999"), 0, True),
        (Decimal("sNaN"), math.nan, True),
    ):
        assert (canonical(one) == canonical(other)) is same


def test_results_are_lists_but_for_their_order_or_tuples_with_it():
    assert Result.of([1, 2]).rows == Result.of([2, 1]).rows
    assert Result.of([1, 2]).in_order != Result.of([2, 1]).in_order
    assert Result.of((1, 2)).rows != Result.of((2, 1)).rows
    assert Result.of([1, 1, 2]).rows != Result.of([1, 2, 2]).rows
    assert Result.of(["a", "b"]).rows != Result.of(["ab"]).rows
    assert Result.of("\ud800").rows  # a lone surrogate has no UTF-8


@pytest.mark.parametrize(
    ("one", "other", "unordered", "ordered"),
    [
        # rows
        ([(1, "a"), (2, "b")], [(1, "a"), (2, "b")], True, True),
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], True, False),
        ([(1,), (2,)], [(2,), (1,)], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),  # a multiset, no set
        ([(1,), (1,)], [(1,)], False, False),
        ([], [], True, True),
        ([], [(None,)], False, False),
        ([(0,)], [], False, False),
        # columns
        ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], True, True),
        ([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], True, False),
        ([(1, "a", 7), (2, "b", 8)], [(7, 1, "a"), (8, 2, "b")], True, True),
        ([(1, "a"), (2, "b")], [("a", 2), ("b", 1)], False, False),  # the values of each column, in other rows
        ([(1, 2), (2, 1)], [(2, 1), (1, 2)], True, True),  # by the columns or by the rows
        ([(1, 2), (2, 1)], [(1, 1), (2, 2)], False, False),
        ([(1, 2), (1, 2)], [(1, 2), (2, 1)], False, False),
        ([(1, 2, 3), (2, 3, 1), (3, 1, 2)], [(1, 3, 2), (2, 1, 3), (3, 2, 1)], True, True),
        ([(1, 2, 3), (2, 3, 1)], [(1, 2, 3), (2, 1, 3)], False, False),
        ([(1, 1)], [(1,)], False, False),
        ([(1, 2)], [(2, 1)], True, True),
        ([(1, 1, 2)], [(1, 2, 2)], False, False),
        ([("ab", "c")], [("a", "bc")], False, False),
        ([("1:a", "b")], [("1", "a:b")], False, False),
        # NULL
        ([(None, 1)], [(1, None)], True, True),
        ([(None,)], [("None",)], False, False),
        ([(None,)], [("",)], False, False),
        ([(None,)], [(0,)], False, False),
        ([(None, 1), (2, None)], [(None, None), (2, 1)], False, False),
        # numbers
        ([(2, 1.0)], [(1, 2.0)], True, True),
        ([(0.1 + 0.2,)], [(0.3,)], True, True),
        ([(0.1 + 0.2, "x")], [("x", 0.3)], True, True),
        ([(1 / 3,)], [(0.333333,)], False, False),
        ([(1e-13,)], [(0,)], False, False),
        ([(-0.0,)], [(0,)], True, True),
        ([(NAN,)], [(NAN,)], True, True),
        ([(Decimal("1.50"),)], [(1.5,)], True, True),
        ([(True,)], [(1,)], True, True),
        ([(1,)], [("1",)], False, False),
        ([(b"a",)], [("a",)], False, False),
        ([("A",)], [("a",)], False, False),
        ([("a ",)], [("a",)], False, False),
        # As many of each value in every row and column: they differ in which rows a column's ones are in.
        (
            [(1, 1, 1, 0), (1, 1, 0, 1), (0, 0, 1, 0), (0, 0, 0, 1)],
            [(1, 1, 1, 0), (1, 1, 1, 0), (0, 0, 0, 1), (0, 0, 0, 1)],
            False,
            False,
        ),
    ],
)
def test_pairs_of_results_made_by_hand(one, other, unordered, ordered):
    first, second = Result.of(one), Result.of(other)
    assert (first.rows == second.rows, first.in_order == second.in_order) == (unordered, ordered)


def same_by_trying(one, other, *, ordered):
    """Spider's way: some permutation of the columns makes the tables equal."""
    if len(one) != len(other) or {len(row) for row in one} != {len(row) for row in other}:
        return False
    arranged = list if ordered else sorted
    return any(
        arranged(tuple(row[place] for place in places) for row in one) == arranged(other)
        for places in itertools.permutations(range(len(other[0])))
    )


@pytest.mark.slow
def test_no_permutation_of_small_tables_is_missed_and_none_is_made_up():
    draw = random.Random(0)
    equal = 0
    for _ in range(3000):
        rows, columns, values = draw.randint(1, 4), draw.randint(2, 4), draw.choice([2, 3])
        one, other = ([tuple(draw.randint(1, values) for _ in range(columns)) for _ in range(rows)] for _ in range(2))
        if draw.random() < 0.5:
            places = draw.sample(range(columns), columns)
            other = [tuple(row[place] for place in places) for row in draw.sample(one, rows)]
        first, second = Result.of(one), Result.of(other)
        assert (first.rows == second.rows) == same_by_trying(one, other, ordered=False)
        assert (first.in_order == second.in_order) == same_by_trying(one, other, ordered=True)
        equal += first.rows == second.rows
    assert 1500 < equal < 2700


def test_the_time_goes_with_the_number_of_columns():
    """Columns with equal values, as joins have them, are told apart by their rows."""

    def seconds(columns):
        rows = [(n, *range(columns - 2), n) for n in range(500)]
        begin = time.process_time()
        Result.of(rows)
        return time.process_time() - begin

    assert seconds(400) < 20 * min(seconds(50) for _ in range(3))


@pytest.mark.slow
def test_columns_that_are_told_apart_one_after_the_other():
    """Each refinement tells two of them apart, from both ends: it once took a minute and more."""
    rows = [tuple(int(row in (column, column + 1)) for column in range(60)) for row in range(3000)]
    begin = time.process_time()
    one, other = Result.of(rows), Result.of([row[::-1] for row in reversed(rows)])
    assert one.rows == other.rows
    assert one.in_order != other.in_order
    assert time.process_time() - begin < 10


def test_only_tuples_of_one_length_are_rows():
    assert Result.of([[1, 2]]).rows != Result.of([[2, 1]]).rows
    assert Result.of([(1, 2), (1,)]).rows != Result.of([(2, 1), (1,)]).rows


@pytest.mark.parametrize("value", [object(), (n for n in (1, 2)), [(1, object())]])
def test_what_says_where_it_is_and_not_what_it_is_is_no_result(value):
    assert Result.of(value) is None
