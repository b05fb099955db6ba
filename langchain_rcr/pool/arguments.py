"""What a retriever is given: its fields, a prompt's variables, a call's options, and the keys of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, Literal, SupportsInt, TypedDict, get_type_hints

import numpy as np
from pydantic import Field, GetPydanticSchema, InstanceOf, ValidationError, create_model

from langchain_rcr.basics.section import explained, unknown
from langchain_rcr.errors import InputError
from langchain_rcr.index.base import Row
from langchain_rcr.index.filters import joined, pins, scalar
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.policy.selection import Options
from langchain_rcr.pool.examples import Example
from langchain_rcr.pool.outcomes import OutcomeLog
from langchain_rcr.programs import ProgramSpec

Order = Literal["picked", "reversed"]
"""The order of the picks in a prompt."""

Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Names = Annotated[list[str], GetPydanticSchema(lambda _, handler: handler(Sequence[str]))]
"""A tuple will do, but not an iterator, which the check would use up."""

OPEN: Any = object()
"""Stands for a value that wasn't given. Not None: a caller's missing value must not match another caller's filter."""

_LOOKED_AT = 50
"""How many examples are read to tell questions from programs."""
_TOKENIZERS = "a LangChain model, a tokenizer with encode, or a function from a text to its tokens or their number"


class Fields(TypedDict, total=False):
    """The retriever's fields, as its constructors take them; described there."""

    k: Positive | None
    k_min: Count
    input_keys: Names | None
    example_keys: Names | None
    filter: dict[str, Any] | None
    group: str | None
    beam_width: Positive
    order: Order | None
    mask_same_program: bool
    max_tokens: Positive | None
    tokenizer: Any
    stop_early: bool
    min_relevance: Annotated[float, Field(ge=0, lt=1, strict=True)]
    probabilities: bool
    explore: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
    log: InstanceOf[OutcomeLog] | None
    auto_refit: bool
    name: str | None
    tags: list[str] | None
    metadata: dict[str, Any] | None


_MORE = {"source_key": str | Sequence[str] | None, "target_key": str | None, "prefer": str | None, "runner_ups": Count}
"""What the constructors and `explain` take as well."""
_KINDS: dict[str, Any] = {
    name: (kind, None) for name, kind in (get_type_hints(Fields, include_extras=True) | _MORE).items()
}
_Checked = create_model("_Checked", **_KINDS)  # up to Python 3.11, pydantic doesn't take `typing.TypedDict`


def query_of(variables: Mapping[str, str], input_keys: Sequence[str] | None, source_keys: Sequence[str]) -> str:
    """The query among a prompt's variables (name → value), or an `InputError` that names the keys.

    It consists of the variables `input_keys`, joined by spaces in the order of their sorted names. Without these, it
    consists of those named like the keys of an example's question, else of the only variable.
    """
    if not isinstance(variables, Mapping):
        raise InputError(f"input_variables must be a mapping of names to values, not {type(variables).__name__}")
    named = input_keys or (source_keys if all(key in variables for key in source_keys) else None)
    keys = sorted({*(named or variables)})
    lacking = [key for key in keys if key not in variables]
    if lacking or not (named or len(keys) == 1):
        names = ", ".join(repr(key) for key in variables) or "nothing"
        if lacking:
            raise InputError(f"input_keys names {lacking[0]!r}, but the input variables are {names}")
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
    """The keys of question and program; those that weren't given are inferred as `from_examples` says.

    They come from the first example's fields or, without examples, from `input_keys` and `example_keys`. An
    `InputError` if they leave it open.
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
        parsing = [name for name in others if questions and others[1:] and _parsing(examples, name, spec)]
        target_key = next((names[0] for names in (others, shown, parsing) if len(names) == 1), None)
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


def options_of(
    retriever: Any,
    seen: bool,
    /,
    k: int | None = None,
    beam_width: int | None = None,
    filter: Mapping[str, Any] | None = None,
    within: Any = OPEN,
    of_variables: Mapping[str, Any] | None = None,
    **strange: Any,
) -> Options:
    """How a call's selection goes, by the retriever's fields and the call's own options.

    `seen`: whether anybody sees the probabilities. An `InputError` if an option is unknown or out of range.
    """
    for name in strange:
        drafts = "drafts" if name == "draft" else "draft"  # a batch takes drafts, a single question takes draft
        raise InputError(f"option of the call: {unknown(name, ('k', 'beam_width', 'filter', 'within', drafts))}")
    encoder = retriever.store.encoder
    k = next(each for each in (k, retriever.k, encoder.config.k) if each is not None)
    beam_width = retriever.beam_width if beam_width is None else beam_width
    check_fields(k=k, beam_width=beam_width, explore=retriever.explore)
    if k < retriever.k_min:
        raise InputError(f"k_min = {retriever.k_min} is more than k = {k}, the number of picks")
    group = retriever.picks_within
    field = group or encoder.prefer
    # Looked up by name: a configured group may differ from that of the retriever that the chain knows.
    given = [value for value in (within, (of_variables or {}).get(field, OPEN)) if value is not OPEN]
    if given and not field:
        raise InputError("within: the value of which field? Set the retriever's group")
    values = [value_of(field, value) for value in given]
    where = joined(retriever.filter, filter, *({group: value} for value in values if group))
    if group and not pins(where, group):
        raise InputError(
            f"examples are picked within one {group!r}: pass filter={{{group!r}: …}} with one value, or within=…"
        )
    fits = None
    if retriever.max_tokens is not None:
        shown, item = (encoder.prompt or APPENDIX_D).shown, retriever.store.schema.item
        fits = token_budget(retriever.max_tokens, retriever.tokenizer, lambda example: shown(item(example)))
    return Options(
        k=k,
        beam_width=beam_width,
        tau=encoder.config.tau,
        probabilities=retriever.probabilities and seen,
        stop_early=retriever.stop_early,
        different_programs=retriever.mask_same_program,
        fits=fits,
        k_min=retriever.k_min,
        where=where,
        explore=retriever.explore,
        random=np.random.default_rng() if retriever.explore else None,
        min_relevance=retriever.min_relevance,
        home="" if group or not values else str(values[-1]),
    )


def token_budget(max_tokens: int, tokenizer: Any, text: Callable[[Example], str]) -> Callable[[Sequence[Row]], bool]:
    """A function that says whether examples' texts, each with a line break, fit whole into `max_tokens`."""
    count, tokens = token_counter(tokenizer), dict[str, int]()

    def fits(rows: Sequence[Row]) -> bool:
        for row in rows:
            if row.id not in tokens:
                tokens[row.id] = count(text(row.example) + "\n")
        return sum(tokens[row.id] for row in rows) <= max_tokens

    return fits


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts the tokens of a text; for what it takes see `_TOKENIZERS`.

    Tokens may be a sequence or an array. The tokenizer, or later what it returns, may be an `InputError`.
    """
    named = (getattr(tokenizer, name, None) for name in ("get_num_tokens", "encode"))
    function = next((one for one in (*named, tokenizer) if callable(one)), None)
    if function is None or isinstance(tokenizer, str):
        raise InputError(f"tokenizer must be {_TOKENIZERS}, not {type(tokenizer).__name__}")

    def count(text: str) -> int:
        tokens = function(text)
        dimensions = getattr(tokens, "ndim", None)
        # A mapping, which transformers' tokenizers return when called, has entries that aren't tokens.
        if isinstance(tokens, Sized) and dimensions in (None, 1) and not isinstance(tokens, str | bytes | Mapping):
            return len(tokens)
        with suppress(ValueError, OverflowError):  # not a number, or infinitely many
            if isinstance(tokens, SupportsInt) and not dimensions:
                return int(tokens)
        raise InputError(f"tokenizer must return tokens or their number, not {type(tokens).__name__} ({tokens!r:.80})")

    return count


def value_of(group: str, value: Any) -> Any:
    """The value of a group. Refuses conditions, and null, which examples without the field would match."""
    if not isinstance(value, str | int | float | np.generic):
        raise InputError(f"examples are picked within one {group!r}: text, number or bool, not {type(value).__name__}")
    return scalar(group, value)


def check_types(**fields: Any) -> None:
    """Refuse fields that are of a wrong type or out of range: an `InputError` names the field and its value."""
    try:
        _Checked.model_validate(fields)
    except ValidationError as error:
        raise InputError(explained(error, lambda place: str(place[0]))) from None


def check_fields(**fields: Any) -> None:
    """`check_types`; also refuse fields that contradict each other."""
    joined(fields.get("filter"))
    check_types(**fields)
    if fields.get("explore") and fields.get("beam_width", 1) > 1:
        raise InputError(f"explore = {fields['explore']} draws picks, which beams don't: beam_width must be 1")
    if fields.get("max_tokens") is not None:
        if fields.get("tokenizer") is None:
            raise InputError(f"max_tokens = {fields['max_tokens']} needs a tokenizer: tokenizer={_TOKENIZERS}")
        token_counter(fields["tokenizer"])
