"""Metadata filters: which examples of a pool may be picked at all. They mean the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from langchain_rcr.errors import InputError

Operator = Literal["eq", "ne", "lt", "lte", "gt", "gte", "in", "nin", "contains", "exists"]
_OPERATORS: tuple[Operator, ...] = get_args(Operator)
_KNOWN = ", ".join(f"${op}" for op in _OPERATORS)
_DEEPEST = 50
"""The deepest nesting of filters."""
LONGEST_NUMBER = 14_000
"""In bits; Python's limit for numbers as text is slightly higher."""


@dataclass(frozen=True, slots=True)
class Compare:
    """One field against a value.

    Args:
        key: the field of the example.
        op: `eq` and `ne` compare as JSON does (1 and 1.0 are equal, 1 and true are not); `ne` is the opposite of `eq`,
            true where the field is missing. `lt` … `gte` hold only between two numbers or two strings (by code point).
            `in` and `nin`: `eq` with one of the values, and the opposite. `contains`: the field is a list, and `eq`
            holds for one of its values. `exists`: whether the field is there, null included.
        value: what to compare with: null, a string, number or bool; a tuple of them for `in` and `nin`; a bool for
            `exists`.
    """

    key: str
    op: Operator
    value: Any


class OneOf(tuple[Any, ...]):
    """Values of `in` or `nin`, of which there may be as many as examples: looked up, not compared one by one."""

    @cached_property
    def kinds(self) -> frozenset[tuple[str, Any]]:
        """Each with its kind."""
        return frozenset((_kind(one), one) for one in self)


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of the parts hold; true without parts."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of the parts holds; false without parts."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The part doesn't hold."""

    part: Filter


Filter: TypeAlias = Compare | AllOf | AnyOf | Not


def parse_filter(spec: Mapping[str, Any], *, _depth: int = 0) -> Filter:
    """Read a filter as LangChain's vector stores write them.

    `{"db": "geo"}`, `{"year": {"$gte": 2000, "$lt": 2010}}`, `{"$or": [{"db": "geo"}, {"level": {"$in": [1, 2]}}]}`,
    `{"$not": {…}}`; several entries of one mapping must all hold.

    Raises:
        InputError: it is not a filter; the message names the operator, key or value.
    """
    if not isinstance(spec, Mapping):
        raise InputError(f"filter: must be a mapping of fields to values, not {type(spec).__name__}")
    if _depth > _DEEPEST:
        raise InputError(f"filter: nested more than {_DEEPEST} deep")
    parts = [_entry(key, value, _depth + 1) for key, value in spec.items()]
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def joined(*specs: Mapping[str, Any] | None) -> Filter | None:
    """The conjunction of several filters as `parse_filter` reads them; None: nothing is filtered."""
    parts = [part for spec in specs if spec is not None and (part := parse_filter(spec)) != AllOf(())]
    return AllOf(tuple(parts)) if len(parts) > 1 else next(iter(parts), None)


def pins(condition: Filter | None, key: str) -> bool:
    """Whether a filter fixes a field to a single value that it names and that isn't null."""
    if isinstance(condition, AllOf):
        return any(pins(part, key) for part in condition.parts)
    if not isinstance(condition, Compare) or condition.value is None:
        return False
    return (condition.key, condition.op) == (key, "eq")


def matches(condition: Filter, example: Mapping[str, Any]) -> bool:
    """Whether an example passes: the reference that every engine's own query must agree with."""
    if isinstance(condition, AllOf):
        return all(matches(part, example) for part in condition.parts)
    if isinstance(condition, AnyOf):
        return any(matches(part, example) for part in condition.parts)
    if isinstance(condition, Not):
        return not matches(condition.part, example)
    there = condition.key in example
    if condition.op == "exists":
        return there is condition.value
    return holds(condition.op, example[condition.key], condition.value) if there else condition.op in ("ne", "nin")


def holds(op: Operator, field: Any, value: Any) -> bool:
    """Whether the comparison `op` (not `exists`) holds between a field's value and a filter's value."""
    if op == "contains":
        return isinstance(field, list | tuple) and any(holds("eq", one, value) for one in field)
    if op in ("in", "nin"):
        if isinstance(value, OneOf) and type(field) in (str, int, float, bool, NoneType):
            return ((_kind(field), field) in value.kinds) is (op == "in")
        return any(holds("eq", field, one) for one in value) is (op == "in")
    if op in ("eq", "ne"):
        return (_kind(field) == _kind(value) and bool(field == value)) is (op == "eq")
    if _kind(field) != _kind(value) or _kind(field) not in ("number", "string"):
        return False
    return bool({"lt": field < value, "lte": field <= value, "gt": field > value, "gte": field >= value}[op])


def fields_of(condition: Filter) -> set[str]:
    """The fields that a filter asks about, except with `exists`."""
    if isinstance(condition, AllOf | AnyOf):
        return {key for part in condition.parts for key in fields_of(part)}
    if isinstance(condition, Not):
        return fields_of(condition.part)
    return set() if condition.op == "exists" else {condition.key}


def unknown_field(condition: Filter, known: Sequence[str]) -> InputError:
    """The error for a filter that asks about a field which no example has."""
    lacking = sorted(fields_of(condition) - set(known))
    has = ", ".join(repr(key) for key in sorted(known)) or "none"
    return InputError(f"filter: no example has a field {lacking[0]!r} (fields there: {has})")


def _entry(key: object, value: Any, depth: int) -> Filter:
    if not isinstance(key, str) or not key:
        raise InputError(f"filter: a field must be a non-empty string, not {shown(key)}")
    if key in ("$and", "$or"):
        if not isinstance(value, list | tuple) or not value:
            raise InputError(f"filter: {key} takes a list of filters, not {shown(value)}")
        parts = tuple(parse_filter(part, _depth=depth) for part in value)
        return AllOf(parts) if key == "$and" else AnyOf(parts)
    if key == "$not":
        return Not(parse_filter(value, _depth=depth))
    if key.startswith("$"):
        raise InputError(f"filter: unknown operator {key!r} (known: $and, $or, $not, and {_KNOWN} below a field)")
    if not isinstance(value, Mapping):
        return Compare(key, "eq", scalar(key, value))
    if not value:
        raise InputError(f"filter: {key!r} has no condition: {{}}")
    parts = tuple(_condition(key, op, operand) for op, operand in value.items())
    return parts[0] if len(parts) == 1 else AllOf(parts)


def _condition(key: str, op: object, operand: Any) -> Filter:
    name = next((known for known in _OPERATORS if op == f"${known}"), None)
    if name is None:
        raise InputError(f"filter: unknown operator {shown(op)} at {key!r} (known: {_KNOWN})")
    if name in ("in", "nin"):
        if not isinstance(operand, list | tuple | set | frozenset):
            raise InputError(f"filter: {op} at {key!r} takes a list, not {shown(operand)}")
        return Compare(key, name, OneOf(scalar(key, one) for one in operand))
    if name == "exists" and not isinstance(operand, bool):
        raise InputError(f"filter: $exists at {key!r} takes true or false, not {shown(operand)}")
    return Compare(key, name, scalar(key, operand))


def scalar(key: str, value: Any) -> Any:
    """A value that a field can be compared with, as its plain base type if it is of a subclass such as an enum."""
    value = value.item() if isinstance(value, np.generic) else value
    kinds: tuple[Any, ...] = (str, int, float)
    for kind in kinds:
        if isinstance(value, kind) and not isinstance(value, bool):
            # The base class's own method, as a subclass may print, hash and compare as it likes.
            value = kind.__getnewargs__(value)[0]
    finite = not isinstance(value, float) or math.isfinite(value)
    if (value is not None and not isinstance(value, str | int | float)) or not finite:
        raise InputError(
            f"filter: {key!r} can be compared with text, numbers, true, false and null, not {shown(value)}"
        )
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        raise InputError(f"filter: {key!r} can't be compared with a whole number of thousands of digits")
    return value


def shown(value: object) -> str:
    """A value as shown in errors, shortened: an id may be a megabyte long."""
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists a thousand deep
        return f"such a {type(value).__name__}"


def _kind(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | float | np.integer | np.floating):
        return "number"
    return "string" if isinstance(value, str) else type(value).__name__
