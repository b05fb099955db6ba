"""The part of a database's schema that fits into a prompt: the tables that question and examples mention."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from langchain_rcr.basics.items import NAME, WORD, folded

_CREATE = re.compile(
    r"^[ \t]*CREATE\s+(?:\w+\s+){0,3}?(?:TABLE|VIEW)\s+(?:IF\s+NOT\s+EXISTS\s+)?", re.IGNORECASE | re.MULTILINE
)
# Else each letter of a long word, and each of many quotes or brackets, would be a start.
_IDENTIFIER = rf'(?<!")"(?:[^"]|"")++"|`[^`]+`|\[[^\[\]]+\]|(?<!\w){NAME}'
_NAME = re.compile(rf"(?:(?:{_IDENTIFIER})\s*\.\s*)*({_IDENTIFIER})")
_READ = re.compile(r"\b(?:FROM|JOIN)\s+(?:ONLY\s+|LATERAL\s+)?(?=[^\s(])", re.IGNORECASE)
_AND = re.compile(rf"(?:\s+(?:AS\s+)?(?:{_IDENTIFIER}))?\s*,\s*(?:ONLY\s+|LATERAL\s+)?(?=[^\s(])", re.IGNORECASE)
"""What is between two tables after the same FROM."""
_NO_TABLES = re.compile(
    r"'(?:[^']|'')*'|--[^\n]*|/\*.*?(?:\*/|\Z)|\bDISTINCT\s+FROM\b"
    r"|\b(?:EXTRACT|SUBSTRING|TRIM|OVERLAY)\s*\((?:[^()]|\([^()]*\))*?\bFROM\b",
    re.IGNORECASE | re.DOTALL,
)
"""What looks as if a table followed, but isn't: string literals, comments, FROM inside a function, a comparison."""
_CALL = re.compile(r"\s*\(")
_DEFINED = re.compile(rf"({_IDENTIFIER})(?:\s*\([^()]*\))?\s+AS\s*(?:(?:NOT\s+)?MATERIALIZED\s*)?\(", re.IGNORECASE)
_REFERENCES = re.compile(r"\bREFERENCES\s+", re.IGNORECASE)
_WORD = re.compile(WORD)
_BETWEEN = re.compile(r"[\d_]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_IN_PROGRAM, _IN_NAME, _NEXT_TO = 3.0, 2.0, 0.5
"""Weights of being named in an example's program, of a question word in the table's name, and of the score of a table
that it refers to; a question word in a column's name weighs 1."""
_OTHERS = "-- {count} more tables: {names}"


@dataclass(frozen=True, slots=True)
class _Table:
    text: str
    name: str
    words: frozenset[str]
    name_words: frozenset[str]
    references: frozenset[str]


def fitted(schema: str, budget: int, question: str = "", programs: Sequence[str] = ()) -> str:
    """A schema within a budget of characters: itself, if it fits or has no CREATE TABLE or CREATE VIEW statements.

    Each statement must begin on a new line. What is kept, in order, are the tables that the examples' programs name,
    those whose name or columns the question mentions, and then those that foreign keys link to these (the first tables
    if there are none); at least one, however long it is. Of all others the names are listed, as far as they fit.
    """
    if len(schema) <= budget:
        return schema
    front, tables = _tables(schema)
    if len(tables) < 2:
        return schema
    scores = _scores(tables, question, programs)
    chosen: set[int] = set()
    left = budget - len(front)
    for place in sorted(range(len(tables)), key=lambda place: -scores[place]):
        size = len(tables[place].text) + 1
        if (size <= left and (scores[place] > 0 or not max(scores))) or not chosen:
            chosen.add(place)
            left -= size
    kept = [table.text for place, table in enumerate(tables) if place in chosen]
    names = [table.name for place, table in enumerate(tables) if place not in chosen]
    left -= len(_OTHERS.format(count=len(names), names=""))
    shown = names[: bisect_left([*accumulate(len(name) + 2 for name in names)], left + 2)]
    others = _OTHERS.format(count=len(names), names=", ".join(shown)) if shown else ""
    return "\n".join(filter(None, [front, *kept, others]))


def of_others(schema: str, programs: Sequence[str]) -> bool:
    """Whether most of these programs query tables that a schema lacks, as programs of other databases do.

    False if no program reads a table, or the schema has no statements (`fitted`).
    """
    own = {table.name.lower() for table in _tables(schema)[1]}
    read = [tables for tables in map(_read, programs) if tables]
    return bool(own) and 2 * sum(not tables <= own for tables in read) > len(read)


def tables_read(schema: str, program: str, budget: int) -> str:
    """The tables of a schema that a query reads, within a number of characters (`fitted`); empty if none.

    Without lines of comment: sample values belong to a database that the question may not see.
    """
    read = _read(program)
    lines = [line for table in _tables(schema)[1] if table.name.lower() in read for line in table.text.splitlines()]
    return fitted("\n".join(line for line in lines if not line.lstrip().startswith("--")), budget)


def _read(program: str) -> set[str]:
    """The tables after FROM and JOIN, in lower case, except functions and those that the program defines (WITH)."""
    program = _NO_TABLES.sub(" ", program)
    tables = set()
    for begin in _READ.finditer(program):
        after: re.Match[str] | None = begin
        while after and (named := _NAME.match(program, after.end())):
            if not _CALL.match(program, named.end()):
                tables.add(named[1].strip('"`[]').lower())
            after = _AND.match(program, named.end())
    return tables - {match[1].strip('"`[]').lower() for match in _DEFINED.finditer(program)}


def words(text: str) -> list[str]:
    """The words of a text or of a name like "orderItems" or "order_items", in lower case and the singular."""
    found = _WORD.findall(folded(_BETWEEN.sub(" ", text)))
    return [f"{word[:-3]}y" if word.endswith("ies") and len(word) > 4 else _singular(word) for word in found]


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


@lru_cache(maxsize=256)
def _tables(schema: str) -> tuple[str, list[_Table]]:
    """What precedes the first statement, and the tables."""
    begins = [*_CREATE.finditer(schema)]
    ends = [*(match.start() for match in begins), len(schema)][1:]
    tables = []
    for match, end in zip(begins, ends, strict=True):
        text = schema[match.start() : end].strip()
        name = _name(schema, match.end())
        references = frozenset(_name(text, other.end()).lower() for other in _REFERENCES.finditer(text))
        tables.append(_Table(text, name, frozenset(words(text)), frozenset(words(name)), references))
    return schema[: begins[0].start()].strip() if begins else schema, tables


def _name(text: str, at: int) -> str:
    match = _NAME.match(text, at)
    return match[1].strip('"`[]') if match else ""


def _scores(tables: Sequence[_Table], question: str, programs: Iterable[str]) -> list[float]:
    """How strongly question and programs point to each table."""
    asked = set(words(question))
    named = {name.lower() for program in programs for name in (*re.findall(NAME, program), *_read(program))}
    having = Counter(word for table in tables for word in asked & table.words)
    rarity = {word: math.log((len(tables) + 1) / count) for word, count in having.items()}
    scores = [
        _IN_PROGRAM * (table.name.lower() in named)
        # `sum` would depend on the order of sets, which differs between processes.
        + math.fsum(rarity[word] * (_IN_NAME if word in table.name_words else 1.0) for word in asked & table.words)
        for table in tables
    ]
    place_of = {table.name.lower(): place for place, table in enumerate(tables)}
    spread = list(scores)
    for place, table in enumerate(tables):
        for other in (place_of[name] for name in table.references if name in place_of):
            spread[place] = max(spread[place], scores[place] + _NEXT_TO * scores[other])
            spread[other] = max(spread[other], scores[other] + _NEXT_TO * scores[place])
    return spread
