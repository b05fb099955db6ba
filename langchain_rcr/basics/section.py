"""What all groups of settings share. Imports nothing heavy."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic.functional_validators import AfterValidator, field_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from langchain_rcr.errors import InputError


class Section(BaseModel):
    """A group of settings: frozen, no unknown keys. A number may stand for a name; true and 10^19 are not numbers.

    A command's groups also have `use_attribute_docstrings`: reading them takes time that serving needn't spend.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, protected_namespaces=()
    )

    def __init__(self, **values: Any) -> None:
        with stated(type(self).__name__, type(self)):
            super().__init__(**values)

    # Otherwise pydantic would call it for nested sections, whose errors would lose their locations.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers(cls, value: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        if isinstance(value, bool) and not {int, float}.isdisjoint(kinds):
            raise PydanticCustomError("number", "Input should be a number")
        value = handler(value)
        if isinstance(value, int) and abs(value) >= 1 << 63:  # as arrays and databases hold
            raise PydanticCustomError("number", "Input should be a number of at most 18 digits")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a field whose values are the names in a registry: `Annotated[str, OneOf(names)]`."""

    names: Callable[[], Mapping[str, str]]  # returns the registered names, each with its description or ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        names = list(self.names())
        if value not in names:
            *some, last = map(repr, names)
            expected = f"{', '.join(some)} or {last}" if some else last
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


def matching(pattern: str, what: str) -> AfterValidator:
    """Marks a field whose text must match a pattern as a whole; `what` says it in words."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("pattern", "Input should be {what}", {"what": what})
        return text

    return AfterValidator(check)


def contradiction(field: str, value: object, other: str, other_value: object, advice: str) -> ValueError:
    """The error for two settings that contradict each other."""
    return ValueError(f"{field} = {show(value)} contradicts {other} = {show(other_value)}: {advice}")


@contextmanager
def stated(what: str, model: type[BaseModel]) -> Iterator[None]:
    """Turn pydantic's multi-line error about the fields of `model` into a one-line `InputError`."""
    try:
        yield
    except ValidationError as error:
        said = explained(error, lambda place: str(place[0]) if place else "", model.model_fields)
        raise InputError(f"{what}: {said}") from None


def explained(error: ValidationError, name: Callable[[Sequence[int | str]], str], known: Iterable[str] = ()) -> str:
    """One line for what pydantic found: the field, what is expected, and the value.

    `name` maps a location to a field's name, or "" if the message says enough. `known` are the existing fields.
    """
    wanted: dict[tuple[str, str], list[str]] = {}
    for item in error.errors(include_url=False):
        text, field = item["msg"].removeprefix("Value error, "), name(item["loc"])
        if item["type"] == "extra_forbidden":
            field, text = "", unknown(str(item["loc"][-1]), known)
        elif item["type"] == "missing":
            field, text = "", f"{field} must be given"
        elif item["type"] in ("list_type", "sequence_str") and isinstance(item["input"], str):
            text = f"a list, as in [{show(item['input'])[1:-1]}]"
        elif item["type"] == "path_type":
            text = "a path"
        # pydantic adds how it failed ("…, unable to parse string as an integer"), which the value shows better.
        expected = re.sub(r", (unable|got) .*", "", text.removeprefix("Input should be "))
        too_short = re.match(r"(?:List|String) should (have at least \d+ \w+)", text)
        # A field that allows several types has a message for each.
        about = wanted.setdefault((field, show(item["input"])) if field else (text, ""), [])
        about += [too_short[1] if too_short else expected if about else f"be {expected}"] if field else []
    messages = []
    for (field, value), each in wanted.items():
        must = " or ".join(each)
        near = difflib.get_close_matches(value.strip("'"), re.findall("'([^']+)'", must), 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        messages.append(f"{field} must {must}, not {value}{hint}" if must else field)
    return "; ".join(messages)


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: with the nearest known one, and all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name.lower(), choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {name!r}; {hint}known: {', '.join(choices)}"


def check_limits(*, timeout_s: object = 1.0, least: int = 1, **counts: object) -> None:
    """Raise an `InputError` unless the time is a positive number, and all others are whole numbers from `least` on."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InputError(f"timeout_s must be a positive number of seconds, not {timeout_s!r:.80}")
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise InputError(f"{name} must be a whole number of at least {least}, not {count!r:.80}")


def show(value: object) -> str:
    """A value as quoted in messages: short, on one line, None as null."""
    if value is None:
        return "null"
    return reprlib.repr(str(value) if isinstance(value, Path) else value)
