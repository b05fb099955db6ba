"""What every selector picked for every question, and what came of it: the lines of picks.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import TypeAdapter, ValidationError
from scipy import sparse

from langchain_rcr.files import atomic_file
from rcr_trainer.data import Example
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.metrics import shown_of
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

_ADAPTER = TypeAdapter(Picked)
_LEFT_OUT: Any = {"fields": True, "picks": {"__all__": {"fields", "group"}}}
"""Of picks.jsonl: the schema of a database, say, once for each question and selector."""


def rows_of(
    name: str,
    kind: Kind,
    positions: np.ndarray,
    *,
    pool: Sequence[Example],
    queries: Sequence[Example],
    programs: Sequence[str],
    gold: sparse.csr_array,
    pool_structures: sparse.csr_array,
    names: Sequence[str],
) -> list[Picked]:
    """The picks of a selector, not answered yet.

    Args:
        name: the selector's.
        kind: the selector's.
        positions: (B, k) its picks.
        pool: the N candidates.
        queries: the B questions with their gold programs.
        programs: these in their canonical form (`ProgramSpec.key`).
        gold: (B, S) the structures of the gold programs that count.
        pool_structures: (N, S) those of the candidates.
        names: of the S structures, sorted.
    """
    k = positions.shape[1]
    # How many of the beginnings of the picks show each structure: all k of them if the first pick has it.
    shown = [shown_of(gold, pool_structures, positions[:, : t + 1]) for t in range(k)]
    times = sparse.csr_array(sum(shown[1:], shown[0]))
    rows = []
    for i, query in enumerate(queries):
        own = slice(times.indptr[i], times.indptr[i + 1])
        first = dict(zip(times.indices[own].tolist(), (k + 1 - times.data[own]).astype(int).tolist(), strict=True))
        covered = {names[j]: first[j] for j in sorted(first)}
        needed = gold.indices[gold.indptr[i] : gold.indptr[i + 1]].tolist()
        missing = [names[j] for j in sorted(needed) if j not in first]
        picks = [pool[p] for p in positions[i].tolist()]
        about = (query.id, query.source, query.target, programs[i])
        rows.append(Picked(*about, name, kind, picks, covered, missing, fields=query.fields))
    return rows


def write_picks(directory: str | Path, picks: Picks) -> Path:
    """Write picks.jsonl into the directory, whole or not at all: a line for each question and selector.

    The selectors' lines for one question stand together, in the selectors' order.

    Raises:
        InputError: it can't be written.
    """
    path = Path(directory) / FILE_NAME
    with atomic_file(path) as file:
        for rows in zip(*picks.values(), strict=True):
            for row in rows:
                file.write(_ADAPTER.dump_json(row, exclude=_LEFT_OUT) + b"\n")
    return path


def read_picks(path: str | Path) -> dict[str, list[Picked]]:
    """Read picks.jsonl, given its path or its directory; by selector, in the order of the questions.

    Raises:
        DataError: missing, unreadable, or not what `write_picks` wrote.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    picks: dict[str, list[Picked]] = {}
    for row in _read(path):
        picks.setdefault(row.selector, []).append(row)
    asked = [[row.id for row in rows] for rows in picks.values()]
    if any(ids != asked[0] for ids in asked):
        raise DataError(f"{path} is damaged: the selectors don't have the same questions")
    return picks


def _read(path: Path) -> Iterator[Picked]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _ADAPTER.validate_json(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(map(str, first["loc"]))
                    reason = f"{where + ': ' if where else ''}{first['msg']}"
                    raise DataError(f"{path}, line {number}: {reason}") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
