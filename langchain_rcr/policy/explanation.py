"""Explains a selection: what the question asked for and what earlier picks changed, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import FloatArray
from langchain_rcr.errors import printable
from langchain_rcr.families.state import State
from langchain_rcr.index.base import Reader
from langchain_rcr.policy.selection import Options, select

Structures = Callable[[str], Collection[str]]
"""The local structures of a program; none where it doesn't parse."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate at one step."""

    id: str  # the example's
    source: str  # its question
    target: str  # its program
    logit: float  # relevance + context
    relevance: float  # its logit for the question alone, before anything is picked
    context: float  # what the picks before this step added to its logit (negative: subtracted from it)
    probability: float  # π among the candidates left at this step


@dataclass(frozen=True, slots=True)
class Step:
    """One pick and what it was picked from."""

    pick: Scored
    # The best of the others, best first; beams and constraints may skip one with a larger logit than the pick's.
    runner_ups: tuple[Scored, ...]
    covered: tuple[str, ...]  # structures of its program that no earlier pick has, sorted; empty if it doesn't parse


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the picks for a question were picked. `str()` is a table for the terminal, without control characters."""

    query: str
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"Picks for: {' '.join(self.query.split())}",
            f"{'step':>4}  {'logit':>8} = {'relevance':>9} {'+ context':>9}  {'π':>6}",
        ]
        for number, step in enumerate(self.steps, start=1):
            lines.append(_line(str(number), step.pick))
            lines += [_line("·", other) for other in step.runner_ups]
            if step.covered:
                lines.append(f"{'':>4}  adds {len(step.covered)} structures: {_short(', '.join(step.covered), 90)}")
        return printable("\n".join(lines))


async def explain(
    query: str,
    vector: FloatArray,
    state: State[Any],
    options: Options,
    reader: Reader,
    *,
    runner_ups: int,
    item: Callable[[Mapping[str, Any]], Item],
    structures: Structures | None,
) -> Explanation:
    """Select for one question, and explain every step.

    Without `structures`, which gives a program's local structures, `covered` stays empty.
    """
    picks = await select(vector, state, options, reader)
    current, start = state.start(vector), state.start(vector).vector()
    keys = picks.positions[:, picks.positions[0] >= 0]
    steps: list[Step] = []
    seen: set[str] = set()
    for number, key in enumerate(keys[0].tolist()):
        here = current.vector()
        hits = await reader.search(here, runner_ups + 1, keys[:, :number], options.tau)
        others = [other for other in hits.keys[0].tolist() if other not in (key, -1)][:runner_ups]
        shown = np.array([key, *others], dtype=np.int64)
        vectors = await reader.candidates(shown)
        total = 0.0 if hits.log_partition is None else float(hits.log_partition[0])
        logits, relevance = vectors @ here[0], vectors @ start[0]
        probabilities = np.minimum(1, np.exp(logits / options.tau - total))
        numbers = np.stack((logits, relevance, logits - relevance, probabilities), axis=1).tolist()
        rows = [hits.rows[each] for each in shown.tolist()]
        scored = [Scored(row.id, *item(row.example)[:2], *values) for row, values in zip(rows, numbers, strict=True)]
        has = frozenset(structures(scored[0].target)) if structures else frozenset()
        steps.append(Step(scored[0], tuple(scored[1:]), tuple(sorted(has - seen))))
        seen |= has
        current = current.update(hits.contexts(keys[:, number]))
    return Explanation(query, tuple(steps))


def _line(mark: str, one: Scored) -> str:
    text = _short(one.source, 70)
    return f"{mark:>4}  {one.logit:8.3f} = {one.relevance:9.3f} {one.context:+9.3f}  {one.probability:6.1%}  {text}"


def _short(text: str, most: int) -> str:
    """On one line of at most `most` characters. Not `textwrap.shorten`, which needs spaces between words."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 2]} …"
