"""What every selector picked for every question, and what came of it: picks.jsonl.

The file has a line for each example that anyone picked, then a line for each question, in which examples are the
numbers of their lines, from 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from langchain_rcr.basics.files import atomic_file
from rcr_trainer.data import Example
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import Kind

FILE_NAME = "picks.jsonl"


@dataclass(slots=True)
class Picked:
    """One selector's picks for one question; from `answer` on None where no language model was asked.

    Args:
        kind: what the selector needs to pick.
        picks: the k examples, in pick order.
        covered: for each of the question's structures the number of the first pick that has it, from 1; 0: none has.
        answer: the program that the language model answered with, if any.
        exact: whether that is the gold program.
        jaccard: similarity of the local structures of answer and gold program (Eq. 7), 0 to 1.
        execution: whether both give the same result; None also where that can't be told.
    """

    kind: Kind
    picks: list[Example]
    covered: list[int]
    answer: str | None = None
    exact: bool | None = None
    jaccard: float | None = None
    execution: bool | None = None


@dataclass(slots=True)
class Question:
    """A question with the picks of all selectors.

    Args:
        id: of the question.
        question: its text.
        gold: its gold program.
        program: the same up to anonymised values, in a canonical form; intervals draw the questions of one together.
        structures: the gold program's structures that count, sorted.
        selectors: what each selector picked, by name.
        fields: the question's further fields; not in the file.
    """

    id: str
    question: str
    gold: str
    program: str
    structures: list[str]
    selectors: dict[str, Picked]
    fields: Mapping[str, Any] = field(default_factory=dict)


Picks: TypeAlias = Sequence[Question]
"""Every question has the same selectors."""

_QUESTION, _EXAMPLE = TypeAdapter(Question), TypeAdapter(Example)


def write_picks(directory: str | Path, picks: Picks) -> Path:
    """Write picks.jsonl into the directory, whole or not at all.

    Raises:
        InputError: it can't be written.
    """
    numbers: dict[Example, int] = {}
    lines = []
    for question in picks:
        line = _QUESTION.dump_python(question, exclude={"fields": True}, exclude_defaults=True)
        for name, own in question.selectors.items():
            line["selectors"][name]["picks"] = [numbers.setdefault(each, len(numbers)) for each in own.picks]
        lines.append(line)
    shown = [{"example": {"id": each.id, "source": each.source, "target": each.target}} for each in numbers]
    path = Path(directory) / FILE_NAME
    with atomic_file(path) as file:
        for line in [*shown, *lines]:
            file.write((json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
    return path


def read_picks(path: str | Path) -> list[Question]:
    """Read picks.jsonl, given its path or its directory.

    Raises:
        DataError: missing, unreadable, or not what `write_picks` wrote.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    examples: list[Example] = []
    picks: list[Question] = []
    number = 0
    try:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):  # noqa: B007
            line = json.loads(text)
            if "example" in line:
                examples.append(_EXAMPLE.validate_python(line["example"]))
                continue
            for own in line["selectors"].values():
                own["picks"] = [examples[each] for each in own["picks"]]
            picks.append(_QUESTION.validate_python(line))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}, line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except IndexError:
        raise DataError(f"{path} is damaged: it lacks examples that were picked") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not what an evaluation writes") from error
    if any(each.selectors.keys() != picks[0].selectors.keys() for each in picks):
        raise DataError(f"{path} is damaged: the selectors don't have the same questions")
    return picks
