"""Reward by running: the answer is right where it gives the same result as the gold program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import lru_cache
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

from langchain_rcr.errors import ProgramError
from langchain_rcr.programs import ProgramSpec, about, get_parser
from rcr_trainer.data import Example
from rcr_trainer.rewards.reward import Reward

Execute = Callable[[str], Any]
"""Runs a program and gives its result: rows as a list, or any value. Raises ProgramError for one that can't be run."""

_REMEMBERED = 1 << 16
_DIGITS = 12
"""Digits to which numbers must agree: sums of floats differ in the last few by their order."""
_EXACT = 1 << 53
"""Below it every whole number is a float, so that 2 and 2.0 can be told equal."""
_LARGE = 300
"""Digits from which on numbers don't fit a float, and whole ones are compared by their digits: Python refuses to write
integers of more than 4,300."""
_ALL_DIGITS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def execution(execute: Execute, spec: ProgramSpec) -> Reward:
    """1 where answer and gold program give the same result, else 0.

    An answer that can't be run, or whose result can't be compared, scores 0; a gold program like that can't be scored.
    A list is compared as a multiset of rows, and in order where the gold program's outermost query has an ORDER BY; a
    tuple is always compared in order. Numbers are equal to 12 significant digits, whatever their types. Each program is
    run once.

    Args:
        execute: runs one program.
        spec: its language tells whether order matters (SQL).
    """
    result = lru_cache(maxsize=_REMEMBERED)(lambda program: _outcome(execute, program))
    parse, is_ordered = get_parser(spec.language).parse, about(spec.language).is_ordered
    ordered = lru_cache(maxsize=_REMEMBERED)(lambda program: (tree := parse(program)) is not None and is_ordered(tree))

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        gold = result(reference)
        if gold is None:
            return None
        found = result(prediction) if prediction and prediction.strip() else None
        if found is None:
            return 0.0
        return float(found.in_order == gold.in_order if ordered(reference) else found.rows == gold.rows)

    return Reward.per_answer("execution", one)


@dataclass(frozen=True, slots=True)
class Result:
    """What a program returned, as digests, since a reward remembers many results, and some are long.

    Args:
        in_order: of the result as it is.
        rows: of its rows in any order.
    """

    in_order: str
    rows: str

    @classmethod
    def of(cls, value: Any) -> Result | None:
        """The digests of a result; None where it can't be compared, such as a value that is nested too deeply."""
        try:
            rows = [canonical(row) for row in (value if isinstance(value, list) else [value])]
        except (RecursionError, ValueError, ArithmeticError):
            return None
        return cls(_digest(rows), _digest(sorted(rows)))


def canonical(value: Any) -> str:
    """A text that is equal for equal results: numbers of any type by value, what is no plain value by its repr."""
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
        number = float(f"{float(value):.{_DIGITS}g}")
        return str(int(number)) if abs(number) < _EXACT and number.is_integer() else repr(number)
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(inner)}" for key, inner in value.items())) + "}"
    if isinstance(value, Set):
        return "<" + ",".join(sorted(map(canonical, value))) + ">"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(canonical, value)) + ")"
    return repr(value)


def _digest(rows: Sequence[str]) -> str:
    total = sha256()
    for row in rows:
        total.update(f"{len(row)}:{row}".encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def _outcome(execute: Execute, program: str) -> Result | None:
    """None if the program can't be run, or its result can't be compared."""
    try:
        return Result.of(execute(program))
    except ProgramError:
        return None
