"""Between examples and Qdrant: a point's payload, and metadata filters as conditions on it.

Qdrant's own conditions on JSON values don't mean what `filters.matches` means: 1 and 1.0 differ, whole numbers beyond
64 bits lose digits, a field's name may not contain a quotation mark, strings have no order, and null is the same as
missing. So a point carries its example as text, and beside it what filters ask for in a form of ours: the names of its
fields, a term for each field with a plain value (`"db"="geo"`), and its numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from qdrant_client import models

from langchain_rcr.errors import PoolError
from langchain_rcr.filters import AllOf, AnyOf, Compare, Filter, Not
from langchain_rcr.index.base import Row

Condition = models.Filter | models.FieldCondition

INDEXES: dict[str, models.PayloadSchemaType] = {
    "fields": models.PayloadSchemaType.KEYWORD,
    "terms": models.PayloadSchemaType.KEYWORD,
    "key": models.PayloadSchemaType.INTEGER,
    "length": models.PayloadSchemaType.FLOAT,
}
"""What of the payload Qdrant must find quickly; each of the `numbers` too."""

_LONGEST_TERM = 200
_SLACK = 1e-9
"""Server and client may read a decimal number as neighbouring floats: bounds are taken wider or narrower by this."""


def payload(row: Row, key: int, length: float) -> dict[str, Any]:
    """What a point carries beside its vectors.

    Args:
        row: the example.
        key: the number that names it in searches.
        length: |E_c|.

    Raises:
        PoolError: JSON has no such value; the message names the example and the field.
    """
    if not _encodable(row.id):
        msg = f"the id {row.id!r} contains a lone surrogate, so Qdrant can't keep it"
        raise PoolError(msg)
    numbers, terms = {}, []
    for name, value in row.example.items():
        _check(row.id, name, value)
        if (term := _term(name, value)) is not None:
            terms.append(term)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[_path(name)] = _float(value)
    return {
        "id": row.id,
        "key": key,
        "program": row.program,
        "example": json.dumps(row.example),
        "length": length,
        "fields": [_name(name) for name in row.example],
        "terms": terms,
        "numbers": numbers,
    }


def row_of(payload: Mapping[str, Any]) -> Row:
    """The example that a point carries."""
    return Row(payload["id"], json.loads(payload["example"]), payload["program"])


def number_fields(payload: Mapping[str, Any]) -> set[str]:
    """The payload's paths to the example's numbers."""
    return {f"numbers.{name}" for name in payload["numbers"]}


def has_field(name: str) -> models.Filter:
    """The examples that have a field."""
    return models.Filter(must=[_match("fields", _name(name))])


def field_of(name: str) -> str:
    """The field that an entry of a payload's `fields` stands for; a very long one stays a digest."""
    return str(json.loads(name)) if name.startswith('"') else name


def compile_filter(condition: Filter) -> tuple[models.Filter | None, bool]:
    """A filter as Qdrant takes it, and whether it says exactly the same.

    Returns:
        A condition that every example fulfils which `filters.matches` lets through; None where all do. Where it is not
        exact, others may too.
    """
    native = _compile(condition, wide=True)
    if native is True:
        return None, _is_exact(condition)
    if native is False:
        return models.Filter(must=[_match("terms", "")]), True
    return native if isinstance(native, models.Filter) else models.Filter(must=[native]), _is_exact(condition)


def _compile(condition: Filter, wide: bool) -> Condition | bool:
    """What is fulfilled at least (`wide`) or at most by the examples that the filter lets through."""
    if isinstance(condition, AllOf | AnyOf):
        every = isinstance(condition, AllOf)
        parts = [_compile(part, wide) for part in condition.parts]
        if any(part is not every and isinstance(part, bool) for part in parts):
            return not every
        left = [part for part in parts if not isinstance(part, bool)]
        if not left:
            return every
        return models.Filter(must=left) if every else models.Filter(should=left)
    if isinstance(condition, Not):
        return _opposite(_compile(condition.part, not wide))
    return _compare(condition, wide)


def _compare(condition: Compare, wide: bool) -> Condition | bool:
    key, op, value = condition.key, condition.op, condition.value
    if op == "exists":
        there = _match("fields", _name(key))
        return there if value else _opposite(there)
    if op in ("eq", "ne", "in", "nin"):
        values = value if op in ("in", "nin") else (value,)
        terms = sorted({term for one in values if (term := _term(key, one)) is not None})
        equal: Condition | bool = _match("terms", *terms) if terms else False
        return equal if op in ("eq", "in") else _opposite(equal)
    if isinstance(value, str):
        return _match("fields", _name(key)) if wide else False
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # noqa: PLR0124 - NaN
        return False
    return models.FieldCondition(key=f"numbers.{_path(key)}", range=_range(op, _float(value), wide))


def _range(op: str, bound: float, wide: bool) -> models.Range:
    slack = max(abs(bound) * _SLACK, sys.float_info.min)
    below = op in ("lt", "lte")
    bound = _float(bound + slack if below is wide else bound - slack)
    if wide:
        return models.Range(lte=bound) if below else models.Range(gte=bound)
    return models.Range(lt=bound) if below else models.Range(gt=bound)


def _is_exact(condition: Filter) -> bool:
    if isinstance(condition, AllOf | AnyOf):
        return all(_is_exact(part) for part in condition.parts)
    if isinstance(condition, Not):
        return _is_exact(condition.part)
    return condition.op in ("exists", "eq", "ne", "in", "nin")


def _match(key: str, *values: str) -> models.FieldCondition:
    match = models.MatchValue(value=values[0]) if len(values) == 1 else models.MatchAny(any=list(values))
    return models.FieldCondition(key=key, match=match)


def _opposite(condition: Condition | bool) -> Condition | bool:
    return not condition if isinstance(condition, bool) else models.Filter(must_not=[condition])


def _term(name: str, value: Any) -> str | None:
    """The same for a field's values that are equal as JSON (1 and 1.0, not 1 and true); None for lists and such."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else value
    if value is not None and not isinstance(value, str | int | float):
        return None
    try:
        return _short(f"{json.dumps(name)}={json.dumps(value)}")
    except ValueError:  # a whole number of thousands of digits; no example has one
        return None


def _name(name: str) -> str:
    return _short(json.dumps(name))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TERM else _digest(text)


def _path(name: str) -> str:
    """A field's name as a step of a JSON path."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,60}", name) and not name.startswith("x_")
    return name if plain else f"x_{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _float(value: float) -> float:
    """The nearest finite float."""
    most = sys.float_info.max
    try:
        return min(max(float(value), -most), most)
    except OverflowError:
        return most if value > 0 else -most


def _check(row_id: str, name: object, value: Any) -> None:
    """Whether JSON keeps a field as it is."""
    if not isinstance(name, str):
        msg = f"example {row_id!r}: the field name {name!r} is not a string, so Qdrant can't keep it"
        raise PoolError(msg)
    try:
        json.dumps(value, allow_nan=False)
        whole = _keys_are_strings(value)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"example {row_id!r}: Qdrant can't keep field {name!r} as JSON: {error}"
        raise PoolError(msg) from None
    if not whole:
        msg = f"example {row_id!r}: field {name!r} contains a mapping with keys that are not strings"
        raise PoolError(msg)


def _keys_are_strings(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _keys_are_strings(one) for key, one in value.items())
    return not isinstance(value, list | tuple) or all(_keys_are_strings(one) for one in value)


def _encodable(text: str) -> bool:
    return text.isascii() or text.encode("utf-8", "ignore").decode("utf-8") == text
