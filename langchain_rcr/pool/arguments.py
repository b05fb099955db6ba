"""Checks the retriever's fields, and finds the query in a prompt's variables and question and program in examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypedDict, get_args

from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import InputError
from langchain_rcr.index.filters import joined
from langchain_rcr.policy.constraints import TOKENIZERS, token_counter
from langchain_rcr.pool.examples import Example
from langchain_rcr.pool.outcomes import OutcomeLog
from langchain_rcr.programs import ProgramSpec

Order = Literal["picked", "reversed"]
"""The order of the picks in a prompt."""

_LOOKED_AT = 50
"""How many examples are read to tell questions from programs."""


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
    """The query among a prompt's variables (name → value), or an `InputError` that names the keys.

    It consists of the variables `input_keys`, joined by spaces in the order of their sorted names. Without these, it
    consists of those named like the keys of an example's question, else of the only variable.
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


def keys_of(
    examples: Sequence[Example],
    input_keys: Sequence[str] | None,
    example_keys: Sequence[str] | None,
    source_key: str | Sequence[str] | None,
    target_key: str | None,
    spec: ProgramSpec,
) -> tuple[str | Sequence[str], str]:
    """The keys of question and program; those that weren't given are inferred from the first example's fields.

    The question is `input_keys` if given, else "source". Else, of two fields, it is the one that isn't "target", or the
    one that parses less often as a program of `spec`, or the first. The program is "target", else the only other field,
    else the only one of `example_keys` that isn't the question's. Without examples, the fields are `input_keys` and
    `example_keys`. An `InputError` if they leave it open.
    """
    first = next(iter(examples), {}) if isinstance(examples, Iterable) else {}
    fields = list(first) if isinstance(first, Mapping) else []
    fields = fields or [*dict.fromkeys((*(input_keys or ()), *(example_keys or ())))]
    if source_key is None:
        if input_keys and fields:
            lacking = next((key for key in input_keys if key not in fields), None)
            if lacking is not None:
                advice = "where the prompt's variables have other names, give source_key"
                raise InputError(f"input_keys: {unknown(lacking, map(str, fields))}; {advice}")
            source_key = input_keys
        elif "source" in fields or len(fields) < 2:
            source_key = "source"
        elif len(fields) == 2:
            program = target_key or ("target" if "target" in fields else None)
            possible = [name for name in fields if name != program]
            source_key = min(possible, key=lambda name: _parsing(examples, name, spec) if possible[1:] else 0)
    questions = (source_key,) if isinstance(source_key, str) else source_key or ()
    if target_key is None:
        others = [name for name in fields if name not in questions]
        if "target" in others or not others:
            others = ["target"]
        shown = [name for name in example_keys or () if name in others]
        target_key = next((names[0] for names in (others, shown) if len(names) == 1), None)
    if source_key is None or target_key is None:
        has = ", ".join(map(repr, fields))
        lacking = next((name for name in questions if name not in fields), None)
        if lacking is not None:
            raise InputError(f"source_key: the examples have no field {lacking!r}; their fields: {has}")
        raise InputError(f"which fields are question and program? The examples have {has}: set source_key, target_key")
    return source_key, target_key


def _parsing(examples: Sequence[Example], field: str, spec: ProgramSpec) -> int:
    """How many of the first examples have a program of `spec`'s language in a field."""
    texts = (example.get(field) for example in islice(examples, _LOOKED_AT) if isinstance(example, Mapping))
    return sum(isinstance(text, str) and spec.tree(text) is not None for text in texts)


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
    "source_key": (lambda value: isinstance(value, str | None) or _names(value), "a name, or a sequence of names"),
    "target_key": (lambda value: isinstance(value, str | None), "a name"),
    "prefer": (lambda value: isinstance(value, str | None), "a name"),
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
