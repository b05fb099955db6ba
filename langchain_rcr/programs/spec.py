"""How a run reads its programs: an object that all stages share, so that they see the same structures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import intern
from typing import Any, Literal

from langchain_rcr.errors import InputError
from langchain_rcr.programs.languages import about, get_parser
from langchain_rcr.programs.remembering import remembered
from langchain_rcr.programs.structures import local_structures
from langchain_rcr.programs.tree import Tree
from langchain_rcr.programs.values import anonymize, values

LARGEST = 8
"""The limit of `max_size`: time and memory grow with its square."""


@dataclass(frozen=True)
class ProgramSpec:
    """How programs are parsed, anonymised and cut into local structures.

    Attributes:
        language: the program language, see `get_parser`.
        anonymize: replace strings, numbers and `_` by constants (section 3); "names": also the names of tables and
            columns, in a language that has them (sql), for pools of several databases.
        max_size: the size of the largest local structures, the paper's l = 4; 1 to 8.
        implied: values that stay, since questions don't name them; see `implied_values`.

    Raises:
        InputError: an unknown language, max_size out of its range, or `implied` doesn't hold strings.
        MissingExtraError: the language needs a package that is not installed.
    """

    language: str = "functional"
    anonymize: bool | Literal["names"] = True
    max_size: int = 4
    implied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in self.implied):
            raise InputError(f"implied: strings were expected, not {self.implied!r:.80}")
        object.__setattr__(self, "implied", tuple(self.implied))  # JSON gives a list
        if not isinstance(self.language, str):
            raise InputError(f"language: a name was expected, not {self.language!r:.80}")
        parser = get_parser(self.language)
        if self.anonymize == "names" and not hasattr(parser, "shape"):
            raise InputError(f"anonymize: names: programs in '{self.language}' have no tables and columns; sql has")
        if self.max_size < 1:
            raise InputError(f"max_size: must be at least 1, got {self.max_size}")
        if self.max_size > LARGEST:
            raise InputError(f"max_size: must be at most {LARGEST}, got {self.max_size:.9g}")

    @property
    def named(self) -> ProgramSpec:
        """The same with the names of tables and columns kept, for judging answers."""
        return replace(self, anonymize=bool(self.anonymize))

    def to_json(self) -> dict[str, Any]:
        """Return the attributes, with `implied` only if there are any, so that digests match earlier versions."""
        first = {"language": self.language, "anonymize": self.anonymize, "covr_classes": False}
        return {**first, "max_size": self.max_size, **({"implied": self.implied} if self.implied else {})}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProgramSpec:
        """Read what `to_json` returned.

        Raises:
            InputError: as for the class; or an earlier version replaced COVR's words by classes.
            TypeError: it is something else.
        """
        fields = {**value}
        if fields.pop("covr_classes", False):
            raise InputError("covr_classes: COVR's words are no longer replaced by classes: train again")
        return cls(**fields)

    def tree(self, text: str) -> Tree | None:
        """Return the program's tree, anonymised if the spec says so, or None for what is not a program."""
        tree = self._parsed(text)
        if tree is None or not self.anonymize:
            return tree
        return anonymize(tree, everywhere=about(self.language).inner_values, kept=frozenset(self.implied))

    def values(self, text: str) -> set[str]:
        """Return the strings and numbers of a program as they are written there, quotes included."""
        tree = self._parsed(text)
        return set() if tree is None else values(tree, everywhere=about(self.language).inner_values)

    def _parsed(self, text: str) -> Tree | None:
        return _parsed(self.language, self.anonymize == "names", text)

    def structures(self, text: str) -> frozenset[str]:
        """Return the program's local structures; none if it doesn't parse."""
        return frozenset(self._read(text)[1])

    def key(self, text: str) -> str:
        """Return a canonical form, the same for texts that are the same program up to its values, implied ones too.

        A text that doesn't parse is its own key, with runs of whitespace as one space.
        """
        return self._read(text)[0]

    # Fitting, holding out and encoding ask for key and structures of the same programs, and parsing takes nearly all of
    # the time. Structures are interned, as programs share most of them, and no set, which takes six times the memory.
    # Takes about 10 bytes per character, up to 50.
    @remembered(1 << 25)
    def _read(self, text: str) -> tuple[str, tuple[str, ...]]:
        tree = self.tree(text)
        if tree is None:
            return " ".join(text.split()), ()
        key = replace(self, implied=()).tree(text) if self.implied else tree
        return str(key), tuple(map(intern, local_structures(tree, self.max_size)))


# Shared by specs with and without implied values. Takes about 10 bytes per character, up to 80.
@remembered(1 << 21)
def _parsed(language: str, shape: bool, text: str) -> Tree | None:
    parser: Any = get_parser(language)
    tree: Tree | None = parser.shape(text) if shape else parser.parse(text)
    return tree
