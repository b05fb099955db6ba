"""Reward by running: the answer is right where it gives the same result as the gold program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from langchain_rcr.databases.many import Databases
from langchain_rcr.databases.results import Result
from langchain_rcr.errors import ProgramError
from langchain_rcr.programs import ProgramSpec, about, get_parser
from rcr_trainer.rewards.reward import Reward

Execute = Callable[[str], Any]
"""Runs a program and gives its result: rows as a list, or any value. Raises ProgramError for one that can't be run."""

_REMEMBERED = 1 << 16


def execution(execute: Execute | Databases, spec: ProgramSpec) -> Reward:
    """1 where answer and gold program give the same result, else 0.

    An answer that can't be run, or whose result can't be compared, scores 0; a gold program like that can't be scored.
    A list is compared as a multiset of rows, and in order where the gold program's outermost query has an ORDER BY; a
    tuple is always compared in order. Of rows that are tuples the order of columns doesn't matter. Numbers are equal to
    12 significant digits, whatever their types. Each program is run once, on each database.

    Args:
        execute: runs one program; or the databases that the questions' fields name.
        spec: its language tells whether order matters (SQL).
    """

    @lru_cache(maxsize=_REMEMBERED)
    def result(program: str, where: str) -> Result | None:
        """None if the program can't be run, or its result can't be compared."""
        try:
            return Result.of(execute.run(program, where) if isinstance(execute, Databases) else execute(program))
        except ProgramError:
            return None

    parse, is_ordered = get_parser(spec.language).parse, about(spec.language).is_ordered
    ordered = lru_cache(maxsize=_REMEMBERED)(lambda program: (tree := parse(program)) is not None and is_ordered(tree))

    def one(prediction: str | None, reference: str, where: str) -> float | None:
        gold = result(reference, where)
        if gold is None:
            return None
        found = result(prediction, where) if prediction and prediction.strip() else None
        if found is None:
            return 0.0
        return float(found.in_order == gold.in_order if ordered(reference) else found.rows == gold.rows)

    def function(
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        fields: Sequence[Mapping[str, Any]] = (),
        **_: Any,
    ) -> list[float | None]:
        where = [execute.path(each) for each in fields] if isinstance(execute, Databases) else [""] * len(references)
        scores: list[float | None] = [None] * len(references)
        for n in sorted(range(len(references)), key=where.__getitem__):  # few databases are open at a time
            scores[n] = one(predictions[n], references[n], where[n])
        return scores

    return Reward("execution", function, reads_fields=isinstance(execute, Databases))
