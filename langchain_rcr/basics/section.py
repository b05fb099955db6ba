"""What all groups of settings share. Loads nothing heavy."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, field_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that steer a terminal, turn a text's direction or can't be encoded; not tab and newline."""


class Section(BaseModel):
    """A group of settings: frozen, no unknown keys. A number may stand for a name; true and 10^19 are not numbers.

    A command's have `use_attribute_docstrings`, too: reading them takes time, which serving needn't spend.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise PydanticCustomError("number", "Input should be a number")
        return value

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise PydanticCustomError("number", "Input should be a number of at most 18 digits")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a field whose values are the names in a registry: `Annotated[str, OneOf(names)]`.

    Args:
        names: returns the registered names, each with its description or "".
    """

    names: Callable[[], Mapping[str, str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        names = list(self.names())
        if value not in names:
            *some, last = map(repr, names)
            expected = f"{', '.join(some)} or {last}" if some else last
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


def contradiction(field: str, value: object, other: str, other_value: object, advice: str) -> ValueError:
    """The error for two settings that contradict each other."""
    return ValueError(f"{field} = {show(value)} contradicts {other} = {show(other_value)}: {advice}")


def show(value: object) -> str:
    """A value as messages quote it: short, on one line, None as null."""
    if value is None:
        return "null"
    return reprlib.repr(str(value) if isinstance(value, Path) else value)


def printable(text: str) -> str:
    """A text that is safe in a terminal or plot: U+FFFD replaces control characters."""
    return _CONTROL.sub("\ufffd", text)
