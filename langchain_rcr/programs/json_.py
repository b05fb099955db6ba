"""JSON: tool calls, and any other value.

- A call is a node named after the tool, with a child per argument and the value below it. Known forms:
  `{"name": …, "arguments": {…}}` (also `args`, `parameters`, `input`), with `id`, `type` or `index` beside them, and
  OpenAI's `{"function": {"name": …, "arguments": "<JSON in a string>"}}`.
- Any other object is the node `object` with a child per key and the value below it; a list is the node `array`.
- JSON objects are unordered, so keys are sorted: two calls that differ in the order of their arguments are one tree.
- A string keeps its double quotes in the label, a number stands as written, `true`, `false` and `null` are leaves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from langchain_rcr.programs.tree import Tree, unfold

_ARGUMENT_KEYS = ("arguments", "args", "parameters", "input")
_BESIDE = {"id", "type", "index"}


class _Number(NamedTuple):
    """A number as written."""

    text: str


class _Key(NamedTuple):
    """A key of an object, to become a node with its value below."""

    name: str
    value: Any


class JsonParser:
    """Parses one JSON value (see the module's rules)."""

    def parse(self, text: str) -> Tree | None:
        """Return the value's tree, or None for what is not one JSON value, or too deep for the JSON reader."""
        try:
            value = _read(text)
        except (ValueError, RecursionError):
            return None
        return unfold(value, _expand)


def _read(text: str) -> Any:
    return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_reject)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _expand(value: Any) -> tuple[str, Sequence[Any]]:
    if isinstance(value, _Number):
        return value.text, ()
    if isinstance(value, _Key):
        return value.name, [value.value]
    if isinstance(value, list):
        return "array", value
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False), ()
    call = _call(value)
    if call is None:
        return "object", _keys(value)
    name, arguments = call
    if isinstance(arguments, dict):
        return name, _keys(arguments)
    return name, () if arguments is None else [arguments]


def _keys(value: dict[str, Any]) -> list[_Key]:
    return [_Key(key, value[key]) for key in sorted(value)]


def _call(value: dict[str, Any]) -> tuple[str, Any] | None:
    beyond = value.keys() - _BESIDE
    if beyond == {"function"} and isinstance(value["function"], dict):
        value = value["function"]
        beyond = set(value)
    if len(beyond) != 2 or not isinstance(value.get("name"), str):
        return None
    for key in _ARGUMENT_KEYS:
        if key in beyond:
            return value["name"], _arguments(value[key])
    return None


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        try:
            decoded = _read(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(decoded, dict):
            return decoded
    return value
