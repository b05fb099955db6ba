"""Whether two programs give the same result, as in Spider's test-suite evaluation, except where that is wrong.

The order of rows counts if the caller says so, the order of columns never (Zhong, Yu and Klein, "Semantic Evaluation
for Text-to-SQL with Distilled Test Suites", EMNLP 2020). Departures: whole numbers are compared exactly and others
to 12 digits, since sums of floats depend on their order, and NULL isn't a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIGITS = 12
"""Digits to which numbers must agree: the last few digits of a sum of floats depend on its order."""
_EXACT = 1 << 53
"""Below this every whole number is a float, so that 2 and 2.0 can be treated as equal."""
_LARGE = 300
"""From this many digits on, numbers don't fit a float, and whole ones are compared by their digits: Python refuses to
write integers of more than 4,300."""
_ALL_DIGITS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


@dataclass(frozen=True, slots=True)
class Result:
    """What a program returned, as digests, since a caller remembers many results and some are long.

    For a list of tuples of one length, which are a query's rows, the order of columns doesn't matter.
    """

    in_order: str  # digest of the result with its rows in order
    rows: str  # digest of its rows in any order

    @classmethod
    def of(cls, value: Any) -> Result | None:
        """The digests of a result; None if it can't be compared, as a cursor or a value that is nested too deeply."""
        rows = value if isinstance(value, list) else [value]
        widths = {len(row) if isinstance(row, tuple) else 0 for row in (rows if rows is value else ())}
        try:
            if len(widths) == 1 and max(widths) > 1:
                return cls(*_of_table([[canonical(value) for value in row] for row in rows]))
            texts = [canonical(row) for row in rows]
        except (RecursionError, ValueError, ArithmeticError):
            return None
        return cls(_digest(texts), _digest(sorted(texts)))


def canonical(value: Any) -> str:
    """A text that is equal for equal results: numbers of any type by value, anything unusual by its repr."""
    if isinstance(value, Integral):
        value = int(value)
        if value.bit_length() <= 3 * _LARGE:
            return str(value)
        value = Decimal(value)
    if isinstance(value, Decimal):
        if value.is_finite() and value.adjusted() >= _LARGE:
            return str(value.normalize(_ALL_DIGITS))
        if value.is_finite() and value == value.to_integral_value():
            return str(int(value))
        value = math.nan if value.is_nan() else float(value)
    if isinstance(value, Real):
        number = float(value)
        if not (number.is_integer() and abs(number) < _EXACT):
            number = float(f"{number:.{_DIGITS}g}")
        return str(int(number)) if abs(number) < _EXACT and number.is_integer() else repr(number)
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(inner)}" for key, inner in value.items())) + "}"
    if isinstance(value, Set):
        return "<" + ",".join(sorted(map(canonical, value))) + ">"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(canonical, value)) + ")"
    if hasattr(value, "__array__"):  # NumPy and pandas leave out the middle of a long one
        return canonical(np.asarray(value).tolist())
    text = repr(value)
    if " at 0x" in text and not isinstance(value, str | bytes):
        raise ValueError(f"{text} says where it is, not what: a cursor, a generator or a coroutine")
    return text


def _of_table(rows: Sequence[Sequence[str]]) -> tuple[str, str]:
    """The digests of R rows of C values, whatever the order of the columns: with rows in order, and in any order.

    Columns are told apart by their values, and columns with equal values by the rows that these are in (colour
    refinement, Weisfeiler and Leman, 1968), so that no permutations need be tried.
    """
    distinct = sorted(set().union(*rows))
    numbers = {text: number for number, text in enumerate(distinct)}
    values = np.array([[numbers[text] for text in row] for row in rows], dtype=np.int64)
    colours, kinds = _ranks(np.sort(values.T)), 0
    while kinds <= colours.max():
        kinds = colours.max() + 1
        # A row's values with the kinds of their columns, independent of the order of rows and columns.
        coloured = np.sort(values * kinds + colours)
        if kinds < len(colours):
            colours = _ranks(np.sort(values.T + len(distinct) * _ranks(coloured)))
    columns, lines = (sorted(part.tobytes().hex() for part in parts) for parts in (values.T, coloured))
    return _digest([_digest(distinct), *columns]), _digest([_digest(distinct), *lines])


def _ranks(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each row of (N, M), the same for equal rows; independent of their order."""
    keys = [row.tobytes() for row in rows]
    numbers = {key: number for number, key in enumerate(sorted({*keys}))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def _digest(texts: Sequence[str]) -> str:
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    return sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()
