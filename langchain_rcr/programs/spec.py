"""How a run reads its programs: an object that all stages share, so that they see the same structures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from sys import intern
from typing import Any, Literal

from langchain_rcr.errors import InputError
from langchain_rcr.programs.anonymize import COVR_CLASSES, anonymize
from langchain_rcr.programs.languages import TOKENS, get_parser
from langchain_rcr.programs.structures import local_structures
from langchain_rcr.programs.tree import Tree


@dataclass(frozen=True)
class ProgramSpec:
    """How programs are parsed, anonymised and cut into local structures.

    Attributes:
        language: the program language, see `get_parser`.
        anonymize: replace strings, numbers and `_` by constants (section 3); "names": those of tables and columns, too,
            in a language whose parser can tell them (sql), for pools of several databases.
        covr_classes: while anonymising, also replace COVR's symbols by their classes (appendix B).
        max_size: the size of the largest local structures, the paper's l = 4.

    Raises:
        InputError: an unknown language, or max_size below 1.
        MissingExtraError: the language needs a package that is not installed.
    """

    language: str = "functional"
    anonymize: bool | Literal["names"] = True
    covr_classes: bool = False
    max_size: int = 4

    def __post_init__(self) -> None:
        parser = get_parser(self.language)
        if self.anonymize == "names" and not hasattr(parser, "shape"):
            raise InputError(f"anonymize: names: programs in '{self.language}' have no tables and columns; sql has")
        if self.max_size < 1:
            raise InputError(f"max_size: must be at least 1, got {self.max_size}")
        if self.covr_classes and not self.anonymize:
            raise InputError("covr_classes: needs anonymize to be on")

    @property
    def named(self) -> ProgramSpec:
        """The same with the names of tables and columns, by which answers are judged."""
        return replace(self, anonymize=bool(self.anonymize))

    def tree(self, text: str) -> Tree | None:
        """Return the program's tree, anonymised if the spec says so, or None for what is not a program."""
        parser: Any = get_parser(self.language)
        tree: Tree | None = parser.shape(text) if self.anonymize == "names" else parser.parse(text)
        if tree is None or not self.anonymize:
            return tree
        return anonymize(tree, COVR_CLASSES if self.covr_classes else None, everywhere=self.language == TOKENS)

    def structures(self, text: str) -> frozenset[str]:
        """Return the program's local structures; none if it doesn't parse."""
        return _structures(self, text)

    def key(self, text: str) -> str:
        """Return a canonical form, the same for texts that are the same program up to the anonymised values.

        A text that doesn't parse is its own key, with runs of whitespace as one space.
        """
        return _key(self, text)


# Fitting, holding out and encoding ask for the same programs. Names are interned, as programs share most of theirs.
@lru_cache(maxsize=1 << 15)
def _structures(spec: ProgramSpec, text: str) -> frozenset[str]:
    tree = spec.tree(text)
    return frozenset() if tree is None else frozenset(map(intern, local_structures(tree, spec.max_size)))


@lru_cache(maxsize=1 << 15)
def _key(spec: ProgramSpec, text: str) -> str:
    tree = spec.tree(text)
    return " ".join(text.split()) if tree is None else str(tree)
