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

_PATHS = {
    "lt": "$.{key} < {value}",
    "lte": "$.{key} <= {value}",
    "gt": "$.{key} > {value}",
    "gte": "$.{key} >= {value}",
    "contains": "exists($.{key}[*] ? (@ == {value}))",
}


def storable(text: str) -> bool:
    """Whether PostgreSQL can keep a text: one without NUL and lone surrogates."""
    return "\0" not in text and (text.isascii() or text.encode("utf-8", "ignore").decode("utf-8") == text)


def to_json(example: Mapping[str, Any], example_id: str) -> str:
    """An example as JSON text that comes back from JSONB as an equal dict, or a `PoolError` that names the field."""
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

    A field or value that PostgreSQL can't keep is an `InputError`.
    """
    if isinstance(condition, AllOf | AnyOf):
        word, empty = (" AND ", "true") if isinstance(condition, AllOf) else (" OR ", "false")
        return f"({word.join(to_sql(part, values) for part in condition.parts) or empty})"
    if isinstance(condition, Not):
        return f"(NOT {to_sql(condition.part, values)})"
    op, value, name = condition.op, condition.value, f"filter{len(values)}"
    key = _literal(condition.key, f"the field {shown(condition.key)}")
    values[f"{name}key"] = json.loads(key)
    field = f"(e.example -> %({name}key)s::text)"
    if op == "exists":
        return f"({field} IS {'NOT ' if value else ''}NULL)"
    literals = [_literal(one, "a value") for one in (value if op in ("in", "nin") else [value])]
    if op in ("eq", "ne", "in", "nin"):
        values[name] = literals
        test = f"{field} = ANY (%({name})s::text[]::jsonb[])"  # PostgreSQL hashes a long array
    elif op != "contains" and (value is None or isinstance(value, bool)):
        test = "false"
    else:  # `lax` would look into lists; the order of texts is that of code points, unlike JSONB's own
        values[name] = f"strict {_PATHS[op].format(key=key, value=literals[0])}"
        test = f"e.example @@ %({name})s::jsonpath"
    test = f"coalesce({test}, false)"  # unknown if the field is missing or of another type
    return f"(NOT {test})" if op in ("ne", "nin") else test


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
        return str.__str__(value)  # a subclass such as an enum may print something else
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
