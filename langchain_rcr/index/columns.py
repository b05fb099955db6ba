"""Metadata filters over a whole pool at once: its fields as columns of small numbers."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.filters import AllOf, AnyOf, Compare, Filter, Not
from langchain_rcr.index.base import Row

BoolArray = NDArray[np.bool_]

_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
}
_MISSING, _OTHER = 0, 1
"""Codes of a field that isn't there, and of values that no filter's value is equal to: lists, NaN, …"""


class Columns:
    """The columns of a list of rows that only grows.

    A field's column is made when a filter first asks about the field; afterwards each row is looked at once more, when
    it is new. Safe from many threads.

    Args:
        rows: the list; others append to it.
    """

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._columns: dict[str, _Column] = {}
        self._lock = threading.Lock()

    def passing(self, condition: Filter, count: int) -> BoolArray:
        """Which of the first `count` rows pass, (count,): `filters.matches` of each."""
        if isinstance(condition, AllOf | AnyOf):
            every = isinstance(condition, AllOf)
            passing = np.full(count, every)
            for part in condition.parts:
                (np.logical_and if every else np.logical_or)(passing, self.passing(part, count), out=passing)
            return passing
        if isinstance(condition, Not):
            return ~self.passing(condition.part, count)
        with self._lock:
            column = self._columns.setdefault(condition.key, _Column(condition.key))
            column.extend(self._rows, count)
            return column.compare(condition, count)


class _Column:
    """One field: a code for each row, and what the codes stand for."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._codes = np.empty(0, dtype=np.int32)
        self._code_of: dict[tuple[str, Any], int] = {}
        # The numbers and strings seen, each with its code: what `lt` … `gte` look at.
        self._ordered: dict[str, tuple[list[Any], list[int]]] = {"number": ([], []), "string": ([], [])}

    def extend(self, rows: list[Row], count: int) -> None:
        start = len(self._codes)
        if count > start:
            codes = (self._code(row.example) for row in rows[start:count])
            self._codes = np.append(self._codes, np.fromiter(codes, dtype=np.int32, count=count - start))

    def compare(self, condition: Compare, count: int) -> BoolArray:
        codes = self._codes[:count]
        op, value = condition.op, condition.value
        if op == "exists":
            there: BoolArray = (codes != _MISSING) == bool(value)
            return there
        if op in ("eq", "ne", "in", "nin"):
            values = value if op in ("in", "nin") else (value,)
            wanted = [code for code in (self._code_of.get(_identity(one), -1) for one in values) if code >= 0]
            equal = codes == wanted[0] if len(wanted) == 1 else np.isin(codes, wanted)
            return equal if op in ("eq", "in") else ~equal
        passes = np.zeros(len(self._code_of) + 2, dtype=bool)
        kind, _ = _identity(value)
        if kind in self._ordered:
            seen, which = self._ordered[kind]
            # An array of objects compares as Python does: by code point, and whole numbers of any size exactly.
            passes[which] = _ORDER[op](np.array(seen, dtype=object), value)
        result: BoolArray = passes[codes]
        return result

    def _code(self, example: dict[str, Any]) -> int:
        if self._key not in example:
            return _MISSING
        value = example[self._key]
        identity = _identity(value)
        if identity[0] == "other":
            return _OTHER
        code = self._code_of.get(identity)
        if code is None:
            code = len(self._code_of) + 2
            self._code_of[identity] = code
            if identity[0] in self._ordered:
                values, codes = self._ordered[identity[0]]
                values.append(value)
                codes.append(code)
        return code


def _identity(value: Any) -> tuple[str, Any]:
    """Equal for values that are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if value is None or isinstance(value, bool):
        return "constant", str(value)
    if isinstance(value, str):
        return "string", value
    if isinstance(value, int) or (isinstance(value, float) and not math.isnan(value)):
        return "number", value
    return "other", None
