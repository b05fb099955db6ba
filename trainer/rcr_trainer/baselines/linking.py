"""What of a question names tables, columns and values: schema linking by words, as in IRNet and RAT-SQL.

A word links to a schema if it is a word of one of its names (partial matches count), in the singular: Guo et al.,
"Towards Complex Text-to-SQL in Cross-Domain Database with Intermediate Representation", ACL 2019, section 2.2; Wang et
al., "RAT-SQL", ACL 2020, section 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Any

from langchain_rcr.policy.schema import words
from langchain_rcr.programs import ProgramSpec, Tree, get_parser

MASK, UNKNOWN = "<mask>", "<unk>"
"""What stands for names, and for values."""
_TOKEN = re.compile(r"""(?<!\w)"[^"]*"|(?<!\w)'[^']*'(?!\w)|\d[\d.,]*\b|\w+|[^\w\s]""")
_NEVER = re.compile(
    "a|all|an|and|are|as|at|be|by|do|does|each|every|find|for|from|give|have|how|in|is|it|list|many|me|most|much|not|of|on|"
    "or|show|than|that|the|their|there|to|was|were|what|when|where|which|who|whose|with",
    re.IGNORECASE,
)
"""Words that say no name on their own, though names have them."""
_SQL = re.compile(
    "bigint|blob|boolean|char|character|check|constraint|create|date|datetime|decimal|default|delete|double|exist|float|"
    "foreign|if|int|integer|key|not|null|number|numeric|other|primary|real|reference|smallint|table|text|time|timestamp|"
    "unique|update|value|varchar|view"
)
"""What CREATE TABLE statements say beside names, in the singular."""


def mask_question(question: str, names: Set[str]) -> str:
    """A question without what is its database's: runs of words of `names` become a mask, values become unknown."""
    masked: list[str] = []
    for token in _TOKEN.findall(question):
        if token[0].isdigit() or (token[0] in "\"'" and len(token) > 2):
            masked.append(UNKNOWN)
        elif not is_linked(token, names):
            masked.append(token)
        elif masked[-1:] != [MASK]:
            masked.append(MASK)
    return " ".join(masked)


def is_linked(word: str, names: Set[str]) -> bool:
    """Whether a word of a question names a table or column."""
    return not _NEVER.fullmatch(word) and any(part in names for part in words(word))


def schema_words(schema: str) -> frozenset[str]:
    """The words of the names in CREATE TABLE statements."""
    return frozenset(word for word in words(re.sub(r"--[^\n]*", "", schema)) if not _SQL.fullmatch(word))


def program_words(program: str, language: str) -> list[str]:
    """The words of the tables and columns that a program names, as often as it does; none where it has no names."""
    parser: Any = get_parser(language)
    whole, shape = parser.parse(program), parser.shape(program) if hasattr(parser, "shape") else None
    return [] if whole is None or shape is None else [word for name in _names(whole, shape) for word in words(name)]


def _names(tree: Tree, shape: Tree) -> list[str]:
    """The labels that the shape of a program has constants for."""
    if tree.label != shape.label and len(tree.children) == len(shape.children):
        return [tree.label]
    return [name for pair in zip(tree.children, shape.children, strict=False) for name in _names(*pair)]


def linker(
    examples: Sequence[Mapping[str, Any]], schemas: Mapping[str, str], spec: ProgramSpec
) -> Callable[[str], frozenset[str]]:
    """A function from a question to the words of its database's names.

    They are those of its schema, if it is known, else those that any program of the pool names.
    """
    known = {str(each["source"]): str(each["schema"]) for each in examples if each.get("schema")} | dict(schemas)
    own = cache(schema_words)
    pool = frozenset(word for each in examples for word in program_words(str(each["target"]), spec.language))
    return lambda question: own(known[question]) if known.get(question) else pool
