"""Programs of several languages as labelled trees, and the local structures that coverage counts."""

from __future__ import annotations

from rcr_trainer.programs.anonymize import COVR_CLASSES, anonymize
from rcr_trainer.programs.languages import LANGUAGES, ProgramParser, get_parser, parse
from rcr_trainer.programs.matrix import structure_matrices
from rcr_trainer.programs.spec import ProgramSpec
from rcr_trainer.programs.structures import local_structures
from rcr_trainer.programs.tree import Tree

__all__ = [
    "COVR_CLASSES",
    "LANGUAGES",
    "ProgramParser",
    "ProgramSpec",
    "Tree",
    "anonymize",
    "get_parser",
    "local_structures",
    "parse",
    "structure_matrices",
]
