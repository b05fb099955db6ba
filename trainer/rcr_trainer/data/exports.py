"""Flattens rows exported by other tools: LangSmith's inputs and outputs, chats in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NESTED = ("inputs", "outputs", "reference_outputs")
_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}
"""LangChain's role names (and OpenAI's developer) → ours."""


def opened(row: Any) -> Any:
    """The row with nested objects and chats turned into fields: `inputs.question`, `messages.user`.

    Opens `inputs`, `outputs` and `messages`; of the latter, only the last answer and the last question before it count.
    An answer that calls tools is a program in JSON: `[{"name": …, "arguments": {…}}, …]`, or a single call by itself.
    Everything else stays.
    """
    return dict(_fields(row, "")) if isinstance(row, dict) else row


def _fields(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name in _NESTED and isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        elif name == "messages" and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            yield from ((f"{prefix}messages.{role}", text) for role, text in _exchange(value).items())
        else:
            yield f"{prefix}{name}", value


def _exchange(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By role: the system's text, the last answer, and the last question before it (the last of all if no answer)."""
    roles = (str(one.get("role") or one.get("type")) for one in messages)
    said = [(_ROLES.get(role, role), _text(one)) for role, one in zip(roles, messages, strict=True)]
    answers = [at for at, (role, text) in enumerate(said) if role == "assistant" and text]
    end = answers[-1] if answers else len(said)
    found = {role: text for role, text in said[:end] if role in ("system", "user")}
    return found | ({"assistant": said[end][1]} if answers else {})


def _text(message: Mapping[str, Any]) -> str:
    if isinstance(inner := message.get("data"), dict):  # LangChain's format
        message = inner
    calls = [call for call in map(_call, message.get("tool_calls") or ()) if call is not None]
    if calls:
        return json.dumps(calls if calls[1:] else calls[0], ensure_ascii=False)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _call(call: Any) -> dict[str, Any] | None:
    """A tool call in OpenAI's form (`function`, with arguments as text) or LangChain's (`name` and `args`)."""
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("arguments", inner.get("args"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return {"name": inner.get("name"), "arguments": arguments or {}}
