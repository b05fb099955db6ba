"""Between Python and PostgreSQL: examples as JSONB, metadata filters as SQL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from psycopg import sql

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.filters import AllOf, AnyOf, Compare, Filter, Not

_EXACT = 2**53
"""From here on every float is a whole number."""

_LONGEST_NUMBER = 14_000
"""Bits; Python reads and writes some more as text."""

_COMPARISONS = {"lt": "<", "lte": "<=", "gt": ">", "gte": ">="}


def storable(text: str) -> bool:
    """Whether PostgreSQL can keep a text: without NUL and lone surrogates."""
    return "\0" not in text and (text.isascii() or text.encode("utf-8", "ignore").decode("utf-8") == text)


def to_json(example: Mapping[str, Any], example_id: str) -> str:
    """An example as the text of a JSON object that comes back from JSONB as an equal dict.

    Raises:
        PoolError: JSON or PostgreSQL has no such value; the message names the example and the field.
    """
    plain = {}
    for key, value in example.items():
        try:
            plain[_plain(key)] = _plain(value)
        except (ValueError, RecursionError) as error:
            reason = "is nested too deeply" if isinstance(error, RecursionError) else error
            msg = f"example {shown(example_id)}: field {shown(key)} {reason}, so PostgreSQL can't keep it"
            raise PoolError(msg) from None
        if not isinstance(key, str):
            msg = f"example {shown(example_id)}: the field name {key!r} is not a string, so PostgreSQL can't keep it"
            raise PoolError(msg)
    return json.dumps(plain, ensure_ascii=False)


def shown(value: object) -> str:
    """A value as an error message shows it: an id may be a megabyte long."""
    return f"{value!r:.80}"


def _plain(value: Any) -> Any:
    """A JSON value; its numbers are equal to Python's in JSONB's decimal arithmetic too."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not storable(value):
            raise ValueError(f"contains {'a NUL character' if chr(0) in value else 'a lone surrogate'}")
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > _LONGEST_NUMBER:
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


def compile_filter(condition: Filter) -> tuple[sql.Composable, list[Any]]:
    """A filter as a condition on the JSONB column `example`, true or false and never NULL, and its parameters.

    Raises:
        InputError: a value that is neither text, number, bool nor null, or a text that PostgreSQL can't keep.
    """
    if isinstance(condition, AllOf | AnyOf):
        parts = [compile_filter(part) for part in condition.parts]
        word, empty = (" AND ", "true") if isinstance(condition, AllOf) else (" OR ", "false")
        joined = sql.SQL(word).join([part for part, _ in parts]) if parts else sql.SQL(empty)
        return sql.SQL("({})").format(joined), [value for _, values in parts for value in values]
    if isinstance(condition, Not):
        part, values = compile_filter(condition.part)
        return sql.SQL("(NOT {})").format(part), values
    return _compare(condition)


def _compare(condition: Compare) -> tuple[sql.Composable, list[Any]]:
    key, op, value = condition.key, condition.op, condition.value
    if not storable(key):
        raise InputError(f"filter: the field {shown(key)} contains a NUL character or a lone surrogate")
    if op == "exists":
        return sql.SQL("((example ? %s::text) = %s::boolean)"), [key, value]
    if op in ("eq", "ne", "in", "nin"):
        test = "" if op in ("eq", "in") else "NOT "
        among = [_scalar(one) for one in (value if op in ("in", "nin") else [value])]
        one = "= %s::text::jsonb" if len(among) == 1 else "= ANY(ARRAY(SELECT jsonb_array_elements(%s::text::jsonb)))"
        parameter = among[0] if len(among) == 1 else f"[{','.join(among)}]"
        return sql.SQL(f"({test}COALESCE((example -> %s::text) {one}, false))"), [key, parameter]
    number = _scalar(value)
    if isinstance(value, bool) or value is None:
        return sql.SQL("false"), []
    if isinstance(value, str):
        # By code point, as in Python: "C" compares bytes, and UTF-8 keeps the order.
        kind, left, right, sent = "string", '(example ->> %s::text) COLLATE "C"', "%s::text", value
    else:
        kind, left, right, sent = "number", "(example -> %s::text)", "%s::text::jsonb", number
    holds = f"jsonb_typeof(example -> %s::text) = '{kind}' AND {left} {_COMPARISONS[op]} {right}"
    return sql.SQL(f"COALESCE({holds}, false)"), [key, key, sent]


def _scalar(value: Any) -> str:
    """A filter's value as JSON."""
    try:
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"can't be compared with: {type(value)}")
        return json.dumps(_plain(value), ensure_ascii=False)
    except ValueError as error:
        raise InputError(f"filter: a value {error}") from None
