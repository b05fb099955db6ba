"""Translates from Python to PostgreSQL: examples to JSONB, metadata filters to conditions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.filters import LONGEST_NUMBER, AllOf, AnyOf, Filter, Not, shown

_EXACT = 2**53
"""From here on every float is a whole number."""

_SIGNS = {"eq": "==", "ne": "==", "lt": "<", "lte": "<=", "gt": ">", "gte": ">="}


def storable(text: str) -> bool:
    """Whether PostgreSQL can keep a text: one without NUL and lone surrogates."""
    return "\0" not in text and (text.isascii() or text.encode("utf-8", "ignore").decode("utf-8") == text)


def to_json(example: Mapping[str, Any], example_id: str) -> str:
    """An example as the text of a JSON object that comes back from JSONB as an equal dict.

    Raises:
        PoolError: JSON or PostgreSQL has no such value; the message names the example and the field.
    """
    plain = {}
    for key, value in example.items():
        try:
            if not isinstance(key, str):
                raise ValueError("has a name that is not a string")
            plain[_plain(key)] = _plain(value)
        except (ValueError, RecursionError) as error:
            reason = "is nested too deeply" if isinstance(error, RecursionError) else error
            msg = f"example {shown(example_id)}: field {shown(key)} {reason}, so PostgreSQL can't keep it"
            raise PoolError(msg) from None
    return json.dumps(plain, ensure_ascii=False)


def to_sql(condition: Filter, values: dict[str, Any]) -> str:
    """A filter as a condition on a row `e`, true or false, never unknown; adds the statement's parameters to `values`.

    Raises:
        InputError: a value that is neither text, number, bool nor null, or a text that PostgreSQL can't keep.
    """
    name = f"filter{len(values)}"
    if not _has_list(condition):
        values[name] = f"strict {_predicate(condition)}"  # `lax` would look into lists
        return f"(e.example @@ %({name})s::jsonpath)"
    if isinstance(condition, AllOf | AnyOf):
        word = " AND " if isinstance(condition, AllOf) else " OR "
        return f"({word.join(to_sql(part, values) for part in condition.parts)})"
    if isinstance(condition, Not):
        return f"(NOT {to_sql(condition.part, values)})"
    values[name] = [_literal(one, "a value") for one in condition.value]
    values[f"{name}key"] = json.loads(_literal(condition.key, f"the field {shown(condition.key)}"))
    # Not as a JSON path, which compares all values with each row; PostgreSQL hashes those of an array.
    test = f"coalesce(e.example -> %({name}key)s::text = ANY (%({name})s::text[]::jsonb[]), false)"
    return f"(NOT {test})" if condition.op == "nin" else test


def _has_list(condition: Filter) -> bool:
    """Whether `in` or `nin` is part of a filter."""
    if isinstance(condition, AllOf | AnyOf):
        return any(map(_has_list, condition.parts))
    return _has_list(condition.part) if isinstance(condition, Not) else condition.op in ("in", "nin")


def _predicate(condition: Filter) -> str:
    """A filter without lists as a JSON path predicate."""
    if isinstance(condition, AllOf | AnyOf):
        word, empty = (" && ", "1 == 1") if isinstance(condition, AllOf) else (" || ", "1 == 0")
        return f"({word.join(map(_predicate, condition.parts)) or empty})"
    if isinstance(condition, Not):
        return f"(!{_predicate(condition.part)})"
    op, value = condition.op, condition.value
    field = f"$.{_literal(condition.key, f'the field {shown(condition.key)}')}"
    if op == "exists":
        test = f"exists({field})"
    elif op == "contains":
        test = f"exists({field}[*] ? (@ == {_literal(value, 'a value')}))"
    elif op not in ("eq", "ne") and (value is None or isinstance(value, bool)):
        test = "1 == 0"
    else:
        test = f"{field} {_SIGNS[op]} {_literal(value, 'a value')}"
    # Unknown if the field is missing or of another type.
    holds = f"(!(({test}) is unknown) && ({test}))"
    return f"(!{holds})" if op == "ne" or (op == "exists" and not value) else holds


def _literal(value: Any, what: str) -> str:
    """A filter's field or value as JSON."""
    try:
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"can't be compared with: {type(value)}")
        return json.dumps(_plain(value), ensure_ascii=False)
    except ValueError as error:
        raise InputError(f"filter: {what} {error}") from None


def _plain(value: Any) -> Any:
    """A JSON value whose numbers equal Python's in JSONB's decimal arithmetic too."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not storable(value):
            raise ValueError(f"contains {'a NUL character' if chr(0) in value else 'a lone surrogate'}")
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > LONGEST_NUMBER:
            raise ValueError("contains a whole number of thousands of digits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"contains {value}")
        return int(value) if abs(value) >= _EXACT else float(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_plain(key): _plain(one) for key, one in value.items()}
    msg = f"contains {'a mapping with keys that are not strings' if isinstance(value, Mapping) else type(value)}"
    raise ValueError(msg)
