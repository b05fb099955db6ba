"""Programs and their local structures (`langchain_rcr.programs`) as sparse matrices, and greedy coverage on these."""

from __future__ import annotations

from langchain_rcr.programs import (
    COVR_CLASSES,
    LANGUAGES,
    TOKENS,
    ProgramParser,
    ProgramSpec,
    Tree,
    anonymize,
    get_parser,
    local_structures,
    parse,
)
from rcr_trainer.programs.coverage import structure_matrices

__all__ = [
    "COVR_CLASSES",
    "LANGUAGES",
    "TOKENS",
    "ProgramParser",
    "ProgramSpec",
    "Tree",
    "anonymize",
    "get_parser",
    "local_structures",
    "parse",
    "structure_matrices",
]
