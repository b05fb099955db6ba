"""Programs of several languages as labelled trees, and their local structures."""

from __future__ import annotations

from langchain_rcr.programs.languages import LANGUAGES, TOKENS, ProgramParser, about, get_parser, parse
from langchain_rcr.programs.spec import ProgramSpec
from langchain_rcr.programs.structures import local_structures
from langchain_rcr.programs.tree import Tree
from langchain_rcr.programs.values import anonymize, implied_values

__all__ = [
    "LANGUAGES",
    "TOKENS",
    "ProgramParser",
    "ProgramSpec",
    "Tree",
    "about",
    "anonymize",
    "get_parser",
    "implied_values",
    "local_structures",
    "parse",
]
