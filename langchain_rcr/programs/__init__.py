"""Programs of several languages as labelled trees, and their local structures."""

from __future__ import annotations

from langchain_rcr.programs.languages import LANGUAGES, TOKENS, ProgramParser, about, get_parser, parse
from langchain_rcr.programs.spec import ProgramSpec, anonymize, implied_values
from langchain_rcr.programs.tree import Tree, local_structures

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
