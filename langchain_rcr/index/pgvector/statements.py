"""Between Python and PostgreSQL: examples as JSONB, metadata filters as SQL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…{text[0]}"


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
        InputError: a value that is neither text, number, bool nor null.
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
    if not storable(key):  # no example has such a field
        return _constant(op in ("ne", "nin") or (op == "exists" and not value))
    if op == "exists":
        return sql.SQL("((example ? %s::text) = %s::boolean)"), [key, value]
    if op in ("eq", "ne"):
        return _equal(key, [value], wanted=op == "eq")
    if op in ("in", "nin"):
        return _equal(key, value, wanted=op == "in")
    sign = _COMPARISONS[op]
    if isinstance(value, str):
        sign, value = _bound(sign, value)
        # By code point, as in Python: "C" compares bytes, and UTF-8 keeps the order.
        text = f"jsonb_typeof(example -> %s::text) = 'string' AND (example ->> %s::text) COLLATE \"C\" {sign} %s::text"
        return sql.SQL(f"COALESCE({text}, false)"), [key, key, value]
    if isinstance(value, bool) or value is None:
        return _constant(False)
    number = f"jsonb_typeof(example -> %s::text) = 'number' AND (example -> %s::text) {sign} %s::text::jsonb"
    return sql.SQL(f"COALESCE({number}, false)"), [key, key, _scalar(value)]


def _equal(key: str, values: Sequence[Any], *, wanted: bool) -> tuple[sql.Composable, list[Any]]:
    among = [_scalar(value) for value in values if not isinstance(value, str) or storable(value)]
    test = "" if wanted else "NOT "
    one = "= %s::text::jsonb" if len(among) == 1 else "= ANY(ARRAY(SELECT jsonb_array_elements(%s::text::jsonb)))"
    parameter = among[0] if len(among) == 1 else f"[{','.join(among)}]"
    return sql.SQL(f"({test}COALESCE((example -> %s::text) {one}, false))"), [key, parameter]


def _bound(sign: str, text: str) -> tuple[str, str]:
    r"""The same comparison with stored texts where `text` itself can't be sent.

    Nothing stored lies between "a" and "a\0…"; nor between "a\ud800…" and "a\ue000", the first after the surrogates.
    """
    for position, character in enumerate(text):
        if character == "\0":
            return ("<=" if sign.startswith("<") else ">"), text[:position]
        if "\ud800" <= character <= "\udfff":
            return ("<" if sign.startswith("<") else ">="), text[:position] + "\ue000"
    return sign, text


def _scalar(value: Any) -> str:
    try:
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"can't be compared with: {type(value)}")
        return json.dumps(_plain(value), ensure_ascii=False)
    except ValueError as error:
        raise InputError(f"filter: a value {error}") from None


def _constant(value: bool) -> tuple[sql.Composable, list[Any]]:
    return sql.SQL("true" if value else "false"), []
