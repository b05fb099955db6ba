"""What every selector picked for every question, and what came of it: picks.jsonl.

The file has the examples that anyone picked, a line each, then a line for each question with its structures and, by
selector, the numbers of the picked examples, from 0, and for each structure the number of the first pick that has it,
from 1, or 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from langchain_rcr.files import atomic_file
from rcr_trainer.data import Example
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import Kind

FILE_NAME = "picks.jsonl"


@dataclass(slots=True)
class Picked:
    """The picks of one selector for one question.

    Args:
        id: of the question.
        question: its text.
        gold: its gold program.
        program: the same up to anonymised values, in a canonical form; intervals draw the questions of one together.
        selector: who picked.
        kind: what the selector needs to pick.
        picks: the k examples, in the order of picking.
        covered: the gold program's structures that some pick has, of those that count, each with the number of the
            first such pick, from 1; sorted by name.
        missing: those that none has; sorted.
        answer: the program that the language model answered with; None: it was not asked, or gave none.
        exact: whether that is the gold program; None: it was not asked.
        jaccard: similarity of the local structures of answer and gold program (Eq. 7), 0 to 1; None: not asked.
        execution: whether both programs give the same result; None: not asked, no database, or it can't be told.
        fields: the question's further fields; not in the file.
    """

    id: str
    question: str
    gold: str
    program: str
    selector: str
    kind: Kind
    picks: list[Example]
    covered: dict[str, int]
    missing: list[str]
    answer: str | None = None
    exact: bool | None = None
    jaccard: float | None = None
    execution: bool | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Picks: TypeAlias = Mapping[str, Sequence[Picked]]
"""By selector, one for each question; every selector has the same questions in the same order."""


@dataclass(slots=True)
class _Own:
    """What a line says of one selector; see `Picked`."""

    kind: Kind
    picks: list[int]
    covered: list[int]
    answer: str | None = None
    exact: bool | None = None
    jaccard: float | None = None
    execution: bool | None = None


@dataclass(slots=True)
class _Line:
    """A question in the file; see `Picked`."""

    id: str
    question: str
    gold: str
    program: str
    structures: list[str]
    selectors: dict[str, _Own]


@dataclass(slots=True)
class _ExampleLine:
    example: Example


_LINE, _EXAMPLE = TypeAdapter(_Line), TypeAdapter(_ExampleLine)
_LEFT_OUT: Any = {"example": {"fields", "group"}}
"""Of an example's line: the schema of a database, say."""


def write_picks(directory: str | Path, picks: Picks) -> Path:
    """Write picks.jsonl into the directory, whole or not at all.

    Raises:
        InputError: it can't be written.
    """
    path = Path(directory) / FILE_NAME
    numbers: dict[Example, int] = {}
    lines = []
    for rows in zip(*picks.values(), strict=True):
        first = rows[0]
        names = sorted([*first.covered, *first.missing])
        own = {
            row.selector: _Own(
                row.kind,
                [numbers.setdefault(example, len(numbers)) for example in row.picks],
                [row.covered.get(name, 0) for name in names],
                *(row.answer, row.exact, row.jaccard, row.execution),
            )
            for row in rows
        }
        lines.append(_Line(first.id, first.question, first.gold, first.program, names, own))
    with atomic_file(path) as file:
        for example in numbers:
            file.write(_EXAMPLE.dump_json(_ExampleLine(example), exclude=_LEFT_OUT) + b"\n")
        for line in lines:
            file.write(_LINE.dump_json(line, exclude_defaults=True) + b"\n")
    return path


def read_picks(path: str | Path) -> dict[str, list[Picked]]:
    """Read picks.jsonl, given its path or its directory; by selector, in the order of the questions.

    Raises:
        DataError: missing, unreadable, or not what `write_picks` wrote.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    examples: list[Example] = []
    picks: dict[str, list[Picked]] = {}
    for line in _read(path):
        if isinstance(line, _ExampleLine):
            examples.append(line.example)
            continue
        picks = picks or {name: [] for name in line.selectors}
        if picks.keys() != line.selectors.keys():
            raise DataError(f"{path} is damaged: the selectors don't have the same questions")
        for name, own in line.selectors.items():
            if max(own.picks, default=0) >= len(examples):
                raise DataError(f"{path} is damaged: it lacks examples that were picked")
            first = dict(zip(line.structures, own.covered, strict=True))
            picks[name].append(
                Picked(
                    *(line.id, line.question, line.gold, line.program, name, own.kind),
                    [examples[number] for number in own.picks],
                    {structure: at for structure, at in first.items() if at},
                    [structure for structure, at in first.items() if not at],
                    *(own.answer, own.exact, own.jaccard, own.execution),
                )
            )
    return picks


def _read(path: Path) -> Iterator[_ExampleLine | _Line]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                kind: TypeAdapter[Any] = _EXAMPLE if line.startswith(b'{"example":') else _LINE
                try:
                    yield kind.validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(map(str, first["loc"]))
                    reason = f"{where + ': ' if where else ''}{first['msg']}"
                    raise DataError(f"{path}, line {number}: {reason}") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
