"""A table of its runs' results, as Markdown, JSON and plots; the paper's own figures stand beside ours."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from langchain_rcr.basics.files import write_bytes
from rcr_trainer.evaluation.metrics import paired_intervals
from rcr_trainer.evaluation.report import FIGURES, OURS, Interval
from rcr_trainer.evaluation.table import gap_text, markdown_rows
from rcr_trainer.paper.splits import COVR
from rcr_trainer.paper.sweep import Outcome
from rcr_trainer.paper.tables import IN_PLACE, Table, paper_figure, published

MEAN = "mean"
_SHOWN = ("exact_match", "jaccard", "execution", "coverage", "full_coverage", "prompt_tokens", "latency_ms", "cost")
_METRICS = {name: FIGURES[name] for name in _SHOWN} | {"pick_seconds": ("s to pick for all questions", 2)}
"""The columns of the second table: title and decimals."""
# Okabe and Ito's palette and some more, distinguishable with any colour vision, each with its marker for print.
_STYLES = (
    *(("#0072B2", "s"), ("#56B4E9", "D"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "X"), ("#000000", "P")),
    *(("#8C6D31", "*"), ("#5B5EA6", "h"), ("#9B2335", "p"), ("#2E8B6F", "d")),
)


@dataclass(frozen=True)
class Result:
    """A table that is ready to be written."""

    name: str
    table: Table
    outcomes: Sequence[Outcome]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[str]:
        """The labels: the paper's first, then the others in order of appearance, those left out last."""
        found = dict.fromkeys([*(outcome.row.label for outcome in self.outcomes), *self.left_out])
        first = list(published()["tables"].get(self.name, {"rows": ()})["rows"])
        return sorted(found, key=lambda label: [*first, label].index(label))

    @property
    def reference(self) -> str:
        """The row that intervals compare the others with."""
        wanted, found = self.table.reference, {outcome.row.label for outcome in self.outcomes}
        return IN_PLACE if wanted not in found and IN_PLACE in found else wanted

    @property
    def columns(self) -> list[str]:
        """The splits by the paper's names; all of COVR's are one column."""
        return list(dict.fromkeys(_column(outcome) for outcome in self.outcomes))

    @property
    def metric(self) -> str:
        """What the first table shows: exact match or, if nothing was answered, what the figure shows."""
        answered = any(outcome.metrics.get("exact_match") is not None for outcome in self.outcomes)
        return "exact_match" if answered else next(iter(self.table.panels), "coverage")

    def values(self, label: str, column: str, metric: str) -> list[float]:
        """A figure by seed, each the mean over the column's splits; for MEAN, over all splits."""
        by_seed: dict[int, list[float]] = {}
        for outcome in self.outcomes:
            value = outcome.metrics.get(metric)
            if outcome.row.label == label and column in (_column(outcome), MEAN) and value is not None:
                by_seed.setdefault(outcome.seed, []).append(value)
        return [mean(values) for values in by_seed.values()]

    @cached_property
    def gaps(self) -> dict[str, tuple[float, Interval | None]]:
        """By row, how many more points of exact match the reference row has, with the 95 % interval.

        Over the questions of all splits and seeds answered in both; a program is drawn with all its questions.
        """
        answered: dict[str, dict[tuple[str, int, str], tuple[str, bool]]] = {}
        for outcome in self.outcomes:
            own = answered.setdefault(outcome.row.label, {})
            own |= {(outcome.split, outcome.seed, id): found for id, found in outcome.answered.items()}
        ours, gaps = answered.pop(self.reference, {}), {}
        for label, theirs in answered.items():
            if both := [key for key in ours if key in theirs]:
                named = {OURS: ours, label: theirs}
                rates = {name: np.array([own[key][1] for key in both], dtype=float) for name, own in named.items()}
                interval = paired_intervals(rates, [(key[0], ours[key][0]) for key in both]).get(label)
                gaps[label] = (100 * float((rates[OURS] - rates[label]).mean()), interval)
        return gaps

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.md, NAME.json and, for a figure, NAME.png; returns their paths."""
        files = {"md": self.markdown().encode(), "json": self.json().encode()}
        if any(map(self._series, self.table.panels)):
            files["png"] = self._plot()
        for ending, content in files.items():
            write_bytes(folder / f"{self.name}.{ending}", content)
        return [folder / f"{self.name}.{ending}" for ending in files]

    def markdown(self) -> str:
        """Rows by splits, with the paper's figures in brackets; then every metric over all splits."""
        splits = [*self.columns, MEAN] if len(self.columns) > 1 else self.columns
        (heading, digits), published = _METRICS[self.metric], self.metric == "exact_match"
        shown = {key: about for key, about in _METRICS.items() if any(self.values(row, MEAN, key) for row in self.rows)}
        head = [title for title, _ in shown.values()]
        if self.gaps:
            head.append(f"{self.reference} less this, points of exact match (95 % interval)")
        first, means = [], []
        for label in self.rows:
            ours = [cell(self.values(label, column, self.metric), digits) for column in splits]
            papers = [paper_figure(self.name, label, column) if published else None for column in splits]
            beside = [one if paper is None else f"{one} [{paper:.1f}]" for one, paper in zip(ours, papers, strict=True)]
            first.append([label, *beside])
            cells = [cell(self.values(label, MEAN, key), digits) for key, (_, digits) in shown.items()]
            if self.gaps:
                cells.append(gap_text(*self.gaps[label]) if label in self.gaps else "–")
            means.append([label, *cells])
        lines = [f"# {self.table.title}", "", self._note(), "", f"## {heading}", ""]
        lines += markdown_rows([self.name, *map(self._heading, splits)], first)
        lines += ["", "## Means over the splits", "", *markdown_rows([self.name, *head], means)]
        lines += self._fewer()
        lines += [f"\n{name} left out: {reason.rstrip('.')}." for name, reason in self.left_out.items()]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """The figures of each row in each run, the paper's exact match beside them, and `gaps`."""
        runs = []
        for outcome in self.outcomes:
            paper = paper_figure(self.name, outcome.row.label, _column(outcome))
            figures = {metric: value for metric, value in outcome.metrics.items() if value is not None}
            about = {"row": outcome.row.label, "split": outcome.split, "seed": outcome.seed, "paper": paper}
            runs.append(about | figures)
        gaps = {row: {"points": points, "interval": ends} for row, (points, ends) in self.gaps.items()}
        return json.dumps({"table": self.name, "runs": runs, "gaps": gaps}, ensure_ascii=False, indent=2) + "\n"

    def _plot(self) -> bytes:
        """A panel for each metric of the table against x, a line for each series: mean over seeds and COVR's splits."""
        from matplotlib.figure import Figure

        panels = {metric: lines for metric in self.table.panels if (lines := self._series(metric))}
        figure = Figure(figsize=(4.6 * len(panels), 4.2), dpi=200, layout="constrained")
        for number, (metric, found) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), number)
            for (series, points), (colour, marker) in zip(found.items(), cycle(_STYLES), strict=False):
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=series, linewidth=1.5)
            axes.set_title(self.table.panels[metric], loc="left", fontsize=9)
            axes.set_xlabel(self.table.x)
            axes.grid(axis="y", color="black", alpha=0.15, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower left", ncols=2 * len(panels), frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    def _series(self, metric: str) -> dict[str, list[tuple[float, float]]]:
        """By series, its points (x, y); if there are several columns, one series for each."""
        found: dict[tuple[str, str], dict[float, str]] = {}
        for outcome in self.outcomes:
            if outcome.row.x is not None and outcome.metrics.get(metric) is not None:
                found.setdefault((outcome.row.series, _column(outcome)), {})[outcome.row.x] = outcome.row.label
        return {
            series if len(self.columns) == 1 else f"{series}, {column}": [
                (x, mean(self.values(label, column, metric))) for x, label in sorted(labels.items())
            ]
            for (series, column), labels in found.items()
        }

    def _fewer(self) -> list[str]:
        """A line on rows that lack runs which others have, say after an interruption."""
        runs = Counter(each.row.label for each in self.outcomes if each.metrics.get(self.metric) is not None)
        most = max(runs.values(), default=0)
        fewer = ", ".join(f"{label} {count}" for label, count in runs.items() if count < most)
        return [f"\nFewer than the {most} runs of other rows, so not to be compared: {fewer}."] if fewer else []

    def _heading(self, column: str) -> str:
        """The column's name and, if it lacks some, how many of COVR's ten splits it has."""
        splits = {outcome.split for outcome in self.outcomes if _column(outcome) == column}
        return f"{column} ({len(splits)} of {len(COVR)})" if splits < set(COVR) and splits else column

    def _note(self) -> str:
        """The seeds, and the source of the paper's figures."""
        own = published()["tables"].get(self.name)
        seeds = ", ".join(map(str, sorted({outcome.seed for outcome in self.outcomes})))
        over = f"Seeds {seeds}: mean ± standard deviation" if "," in seeds else f"Seed {seeds}"
        beside = f" In brackets: the paper's ({own['where']})." if own and self.metric == "exact_match" else ""
        return f"{over}.{beside}"


def cell(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation; for a single value, only that."""
    if not values:
        return "–"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _column(outcome: Outcome) -> str:
    split = "covr" if outcome.split.startswith("covr-") else outcome.split
    return str(published()["splits"].get(split, split))
