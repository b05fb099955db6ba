"""JSON: tool calls, and any other value.

- A call is a node named after the tool, with a child per argument and the value below it. Known forms:
  `{"name": …, "arguments": {…}}` (also `args`, `parameters`, `input`), `{"action": …, "action_input": …}`,
  `{"tool": …, "tool_input": …}`, and OpenAI's `{"function": {"name": …, "arguments": "<JSON in a string>"}}`.
  `id`, `type` and `index` beside them are left out; other keys are further children. With other keys beside a `name`,
  an object is data rather than a call, unless `arguments` or `args` hold an object.
- Any other object is the node `object` with a child per key and the value below it; a list is the node `array`.
- JSON objects are unordered, so keys are sorted: two calls that differ in the order of their arguments are one tree.
- A string keeps its double quotes in the label, a number is kept as written, `true`, `false` and `null` are leaves.

Also sets of names, such as the tools that a request needs: a JSON list of strings, as in `["search_flights", "book"]`.
The tree is a node `set` with the names below it, sorted, each once. Neither order nor repetition means anything, so
local structures are limited to single labels (`max_size` 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from langchain_rcr.basics.files import no_number
from langchain_rcr.programs.languages import About
from langchain_rcr.programs.tree import Tree, unfold

# The keys of a call's name and of its arguments.
_FORMS = (
    *(("action", "action_input"), ("tool", "tool_input")),
    *(("name", "arguments"), ("name", "args"), ("name", "parameters"), ("name", "input")),
)
_BESIDE = {"id", "type", "index"}


# What `unfold` handles: a value, or the label of a key or number with what is below it.
_Node = tuple[str, Sequence[Any]]


class JsonParser:
    """Parses one JSON value (see the module's rules)."""

    about = About(on_one_line=True, is_json=True, fences=("json",))

    def parse(self, text: str) -> Tree | None:
        """Return the value's tree, or None for what is not one JSON value, or too deep for the JSON reader."""
        try:
            value = _read(text)
        except (ValueError, RecursionError):
            return None
        return unfold(value, _expand)


class SetParser:
    """Parses one JSON list of strings (see the module's rules)."""

    about = JsonParser.about

    def parse(self, text: str) -> Tree | None:
        """Return the set's tree, or None for what is not a JSON list of strings."""
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            return None
        return Tree("set", tuple(Tree(name) for name in sorted({*names})))


def tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each call in a program that is a call or a list of calls; otherwise nothing."""
    try:
        value = _plain(text)
        found = value if isinstance(value, list) else [value]
        calls = [call for one in found if isinstance(one, dict) and (call := _call(one, _plain)) is not None]
    except (ValueError, RecursionError):
        return []
    is_all = len(calls) == len(found) and all(isinstance(arguments or {}, dict) for _, arguments, _ in calls)
    return [(name, arguments or {}) for name, arguments, _ in calls] if is_all else []


_plain = partial(json.loads, parse_constant=no_number)
_read = partial(_plain, parse_int=lambda text: (text, ()), parse_float=lambda text: (text, ()))


def _expand(value: Any) -> _Node:
    if isinstance(value, tuple):
        return value
    if isinstance(value, list):
        return "array", value
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False), ()
    call = _call(value)
    if call is None:
        return "object", _keys(value)
    name, arguments, beside = call
    if isinstance(arguments, dict):
        return name, [*_keys(arguments), *beside]
    return name, beside if arguments is None else [arguments, *beside]


def _keys(value: dict[str, Any]) -> list[_Node]:
    return [(key, [value[key]]) for key in sorted(value)]


def _call(value: dict[str, Any], read: Callable[[str], Any] = _read) -> tuple[str, Any, list[_Node]] | None:
    """A call's name, its arguments and what stands beside them; None if it isn't a call."""
    beside: list[_Node] = []
    if isinstance(value.get("function"), dict):
        beside, value = _beside(value, "function"), value["function"]
    for name, key in _FORMS:
        if isinstance(value.get(name), str) and key in value:
            beside += _beside(value, name, key)
            arguments = value[key]
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):
                    decoded = read(arguments)
                    arguments = decoded if isinstance(decoded, dict) else arguments
            is_sure = name != "name" or (key in ("arguments", "args") and isinstance(arguments, dict | None))
            return (value[name], arguments, beside) if is_sure or not beside else None
    return None


def _beside(value: dict[str, Any], *taken: str) -> list[_Node]:
    return _keys({key: value[key] for key in value.keys() - _BESIDE - {*taken}})
