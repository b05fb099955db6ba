"""Checks the retriever's fields, and finds the query among a prompt's variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

from langchain_rcr.errors import InputError
from langchain_rcr.index.filters import joined
from langchain_rcr.policy.constraints import TOKENIZERS, token_counter
from langchain_rcr.pool.outcomes import OutcomeLog

Order = Literal["picked", "reversed"]
"""The order of the picks in a prompt."""


class Fields(TypedDict, total=False):
    """The retriever's fields, as its constructors take them; described there."""

    k: int | None
    k_min: int
    input_keys: list[str] | None
    example_keys: list[str] | None
    filter: dict[str, Any] | None
    group: str | None
    beam_width: int
    order: Order | None
    mask_same_program: bool
    max_tokens: int | None
    tokenizer: Any
    stop_early: bool
    min_relevance: float
    probabilities: bool
    explore: float
    log: OutcomeLog | None
    auto_refit: bool
    name: str | None
    tags: list[str] | None
    metadata: dict[str, Any] | None


def query_of(variables: Mapping[str, str], input_keys: Sequence[str] | None, source_keys: Sequence[str]) -> str:
    """Return the query among a prompt's variables.

    Args:
        variables: name → value.
        input_keys: the variables that make up the query, joined by spaces in the order of their sorted names. None:
            the variables `source_keys`, or else the only one.
        source_keys: the keys of an example's question, sorted.

    Raises:
        InputError: the query is missing or not a string; the message names the keys.
    """
    if not isinstance(variables, Mapping):
        raise InputError(f"input_variables must be a mapping of names to values, not {type(variables).__name__}")
    named = input_keys or (source_keys if all(key in variables for key in source_keys) else None)
    keys = sorted({*(named or variables)})
    names = ", ".join(repr(key) for key in variables) or "nothing"
    lacking = [key for key in keys if key not in variables]
    if lacking:
        raise InputError(f"input_keys names {lacking[0]!r}, but the input variables are {names}")
    if not named and len(keys) != 1:
        expected = f"Expected {' and '.join(map(repr, source_keys))} or a single one"
        raise InputError(f"which variable is the query? {expected}, got {names}: set input_keys")
    for key in keys:
        if not isinstance(variables[key], str):
            raise InputError(f"the input variable {key!r} must be a string, not {type(variables[key]).__name__}")
    return " ".join(variables[key] for key in keys)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high


def _names(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "k": (lambda value: value is None or _whole(value), "a whole number from 1 on"),
    "k_min": (lambda value: value == 0 or _whole(value), "a whole number from 0 on"),
    "beam_width": (_whole, "a whole number from 1 on"),
    "runner_ups": (lambda value: value == 0 or _whole(value), "a whole number from 0 on"),
    "max_tokens": (lambda value: value is None or _whole(value), "a whole number from 1 on"),
    "explore": (lambda value: _number(value, 0, math.inf), "a number from 0 on"),
    "min_relevance": (lambda value: _number(value, 0, 1), "a number from 0 to below 1"),
    "order": (
        lambda value: value is None or value in get_args(Order),
        " or ".join(repr(name) for name in get_args(Order)),
    ),
    "log": (lambda value: value is None or isinstance(value, OutcomeLog), "an OutcomeLog"),
    "input_keys": (lambda value: value is None or _names(value), "a sequence of names"),
    "example_keys": (lambda value: value is None or _names(value), "a sequence of names"),
}


def check_fields(**fields: Any) -> None:
    """Refuse fields that are out of range: an `InputError` names the field and its value."""
    for name, (fits, what) in _RULES.items():
        if name in fields and not fits(fields[name]):
            raise InputError(f"{name} must be {what}, not {fields[name]!r}")
    if fields.get("explore") and fields.get("beam_width", 1) > 1:
        raise InputError(f"explore = {fields['explore']} draws picks, which beams don't: beam_width must be 1")
    joined(fields.get("filter"))
    if fields.get("max_tokens") is not None:
        if fields.get("tokenizer") is None:
            raise InputError(f"max_tokens = {fields['max_tokens']} needs a tokenizer: tokenizer={TOKENIZERS}")
        token_counter(fields["tokenizer"])
