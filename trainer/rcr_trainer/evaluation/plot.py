"""Coverage by step, one line per selector, as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from langchain_rcr.errors import MissingExtraError
from langchain_rcr.files import write_bytes
from rcr_trainer.evaluation.report import ORACLE, OURS, EvaluationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with any colour vision; each with a marker of its own for print without colour.
_STYLES = {
    OURS: ("#D55E00", "o"),
    "mmr": ("#0072B2", "s"),
    "dense": ("#56B4E9", "D"),
    "bm25": ("#009E73", "^"),
    "fixed": ("#CC79A7", "v"),
    "random": ("#E69F00", "X"),
    ORACLE: ("#777777", ""),
}
_SPARE = [("#000000", "P"), ("#8C6D31", "*"), ("#5B5EA6", "h"), ("#9B2335", "p"), ("#2E4A3F", "d")]
_LABELS = {OURS: "rcr (ours)", ORACLE: "oracle (sees gold)"}


def plot_coverage(report: EvaluationReport, path: str | Path) -> Path:
    """Draw coverage of the gold program against the number of picks, and write it as a PNG.

    Args:
        report: the evaluation.
        path: of the PNG; written whole or not at all.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "train") from error
    figure = Figure(figsize=(7.5, 4.6), dpi=160, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_lines(axes, report)
    axes.set_title(
        f"split {report.split}: {report.n} {report.part} queries, pool of {report.pool_size}", loc="left", fontsize=11
    )
    axes.set_xlabel("examples picked")
    axes.set_ylabel("coverage of the gold program's structures (%)")
    axes.set_xticks(range(1, report.steps + 1))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_bytes(path, buffer.getvalue())
    return Path(path)


def _draw_lines(axes: Axes, report: EvaluationReport) -> None:
    spare = iter(_SPARE * (1 + len(report.selectors) // len(_SPARE)))
    steps = np.arange(1, report.steps + 1)
    ends = {}
    for name, scores in report.selectors.items():
        colour, marker = _STYLES[name] if name in _STYLES else next(spare)
        ours = name == OURS
        axes.plot(
            steps,
            scores.coverage_by_step,
            color=colour,
            marker=marker,
            linestyle="--" if name == ORACLE else "-",
            linewidth=2.8 if ours else 1.5,
            markersize=7 if ours else 5,
            zorder=4 if ours else 3,
        )
        ends[name] = (scores.coverage_by_step[-1], colour)
    axes.axvline(report.k, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=1)
    axes.annotate(
        f"k = {report.k}",
        (report.k, 0.99),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        va="top",
        color="#777777",
        fontsize=9,
    )
    curves = [scores.coverage_by_step for scores in report.selectors.values()]
    low, high = float(np.min(curves)), float(np.max(curves))
    margin = max(2.0, 0.05 * (high - low))
    axes.set_ylim(max(0, low - margin), min(102, high + margin))
    gap = 0.044 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    names = sorted(ends, key=lambda name: ends[name][0])
    for name, height in zip(names, spread([ends[name][0] for name in names], gap), strict=True):
        axes.annotate(
            _LABELS.get(name, name),
            (steps[-1], height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=ends[name][1],
            fontweight="bold" if name == OURS else "normal",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as it takes to stand at least a gap apart.

    Heights in the way of each other form a group, centred on their mean, that lies at gaps of exactly `gap`.
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _centred(groups[-1], gap)[0] - _centred(groups[-2], gap)[-1] < gap:
            last = groups.pop()
            groups[-1] += last
    return [moved for group in groups for moved in _centred(group, gap)]


def _centred(group: Sequence[float], gap: float) -> list[float]:
    middle = sum(group) / len(group)
    return [middle + gap * (i - (len(group) - 1) / 2) for i in range(len(group))]
