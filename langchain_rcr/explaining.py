"""Why these picks: what the question asked for and what earlier picks changed, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_rcr.errors import MissingExtraError
from langchain_rcr.files import atomic_file
from langchain_rcr.index.base import FloatArray, Reader, Search
from langchain_rcr.selection import Options, select
from langchain_rcr.state import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Structures = Callable[[str], Collection[str]]
"""The local structures of a program; none where it doesn't parse."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate at one step.

    Args:
        id: of the example.
        source: its question.
        target: its program.
        logit: relevance + context.
        relevance: the logit that it has for the question alone, before anything is picked.
        context: what the picks before this step added to its logit, or took away.
        probability: π among the candidates left at this step.
    """

    id: str
    source: str
    target: str
    logit: float
    relevance: float
    context: float
    probability: float


@dataclass(frozen=True, slots=True)
class Step:
    """One pick and what it was picked from.

    Args:
        pick: the candidate picked.
        runner_ups: the best of the others at this step, best first. One may have a larger logit than the pick: beams
            and constraints (same program, token budget) pass candidates over.
        covered: local structures of the pick's program that no earlier pick has, sorted; empty without programs that
            parse.
    """

    pick: Scored
    runner_ups: tuple[Scored, ...]
    covered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How the picks for a question came about. `str()` is a table for the terminal.

    Args:
        query: the question.
        steps: in the order of picking.
    """

    query: str
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"Picks for: {self.query}", f"{'step':>4}  {'logit':>8} = {'relevance':>9} {'+ context':>9}  {'π':>6}"]
        for number, step in enumerate(self.steps, start=1):
            lines.append(_line(str(number), step.pick))
            lines += [_line("·", other) for other in step.runner_ups]
            if step.covered:
                names = shorten(", ".join(step.covered), 90, placeholder=" …")
                lines.append(f"{'':>4}  {len(step.covered)} structures more: {names}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw relevance and context of each pick and its runner-ups as bars into a picture (PNG, SVG or PDF, by name).

        Raises:
            MissingExtraError: matplotlib is not installed.
            ValueError: the file's ending is of no picture.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("matplotlib", "plot") from error
        rows = [(number, one) for number, step in enumerate(self.steps, 1) for one in (step.pick, *step.runner_ups)]
        figure = Figure(figsize=(11, 1.2 + 0.32 * max(1, len(rows))), layout="constrained")
        _draw(figure.add_subplot(), rows, self.query)
        ending = Path(path).suffix.removeprefix(".") or "png"
        with atomic_file(path) as file:
            figure.savefig(file, format=ending)


async def explain(
    query: str,
    vector: FloatArray,
    state: State[Any],
    options: Options,
    reader: Reader,
    *,
    runner_ups: int,
    keys: tuple[str, str],
    structures: Structures | None,
) -> Explanation:
    """Select for one question, and explain every step.

    Args:
        query: the question.
        vector: E_x of it, (1, D) float32.
        state: how picks compose.
        options: of the selection.
        reader: the pool.
        runner_ups: candidates shown at each step beside the pick.
        keys: of an example's question and program.
        structures: of a program; None: nothing is said of structures.
    """
    ((*picks,),) = (await select(vector, state, options, reader)).hits
    current, start = state.start(vector), state.start(vector).vector()
    steps: list[Step] = []
    seen: set[str] = set()
    for number, pick in enumerate(picks):
        here = current.vector()
        before = np.array([one.key for one in picks[:number]], dtype=np.int64)
        hits = await reader.search(Search(here, runner_ups + 1, [before], options.tau))
        pairs = zip(hits.keys[0].tolist(), hits.rows[0], strict=False)
        others = [(key, row) for key, row in pairs if key != pick.key][:runner_ups]
        shown = [(pick.key, pick.row), *others]
        vectors = await reader.candidates(np.array([key for key, _ in shown], dtype=np.int64))
        total = 0.0 if hits.log_partition is None else float(hits.log_partition[0])
        logits, relevance = vectors @ here[0], vectors @ start[0]
        scored = [
            Scored(
                row.id,
                row.example[keys[0]],
                row.example.get(keys[1]) or "",
                float(logit),
                float(alone),
                float(logit - alone),
                min(1.0, float(np.exp(logit / options.tau - total))),
            )
            for (_, row), logit, alone in zip(shown, logits, relevance, strict=True)
        ]
        has = frozenset(structures(scored[0].target)) if structures else frozenset()
        steps.append(Step(scored[0], tuple(scored[1:]), tuple(sorted(has - seen))))
        seen |= has
        current = current.update(pick.context[None])
    return Explanation(query, tuple(steps))


def _line(mark: str, one: Scored) -> str:
    text = shorten(one.source, 70, placeholder=" …")
    return f"{mark:>4}  {one.logit:8.3f} = {one.relevance:9.3f} {one.context:+9.3f}  {one.probability:6.1%}  {text}"


def _draw(axes: Axes, rows: Sequence[tuple[int, Scored]], query: str) -> None:
    at = np.arange(len(rows))
    is_pick = np.array([n == 0 or rows[n - 1][0] != number for n, (number, _) in enumerate(rows)], dtype=bool)
    relevance = np.array([one.relevance for _, one in rows])
    context = np.array([one.context for _, one in rows])
    for some, alpha, names in ((is_pick, 1.0, ("relevance", "earlier picks")), (~is_pick, 0.45, (None, None))):
        axes.barh(at[some], relevance[some], color="tab:blue", alpha=alpha, label=names[0])
        left = relevance[some]
        axes.barh(at[some], context[some], left=left, height=0.5, color="tab:red", alpha=alpha, label=names[1])
    axes.plot(relevance + context, at, "k|", markersize=10, label="logit")
    labels = [
        f"{f'{number}. ' if pick else ''}{shorten(one.source, 60, placeholder=' …')}".replace("$", r"\$")
        for (number, one), pick in zip(rows, is_pick, strict=True)
    ]
    axes.set_yticks(at, labels)
    axes.invert_yaxis()
    axes.set_xlabel("logit")
    axes.set_title(shorten(query, 100, placeholder=" …").replace("$", r"\$"), loc="left")
    axes.legend(loc="lower right")
