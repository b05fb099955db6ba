"""Coverage by step and the curves of training, as PNG files or as SVG to put into a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_rcr.basics.files import write_bytes
from langchain_rcr.basics.section import printable
from rcr_trainer.evaluation.report import OURS, EvaluationReport
from rcr_trainer.evaluation.table import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette and some more, told apart with any colour vision, each with its marker for print.
_OURS, _ORACLE = ("#D55E00", "o"), ("#777777", "")
STYLES = (
    *(("#0072B2", "s"), ("#56B4E9", "D"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "X"), ("#000000", "P")),
    *(("#8C6D31", "*"), ("#5B5EA6", "h"), ("#9B2335", "p"), ("#2E8B6F", "d")),
)
CURVES: dict[str, dict[str, str]] = {
    "sft": {"loss": "loss", "dev_coverage": "coverage of the development queries (%)"},
    "grpo": {
        "reward": "reward",
        "dev_reward": "reward of the development queries",
        "dev_coverage": "coverage of the development queries (%)",
        "kl": "KL divergence from SFT's policy",
    },
}
"""By stage the metrics whose curves are drawn, with their titles."""


def coverage_figure(report: EvaluationReport) -> Figure:
    """Coverage of the gold program against the number of picks, a line for each selector with its name at the end."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    styles = cycle(STYLES)
    lines = []
    for name, scores in sorted(report.selectors.items(), key=lambda item: item[1].coverage_by_step[-1]):
        ours, oracle = name == OURS, scores.kind == "oracle"
        colour, marker = _OURS if ours else _ORACLE if oracle else next(styles)
        lines += axes.plot(
            range(1, report.steps + 1),
            scores.coverage_by_step,
            label=_plain(label(name, scores.kind)),
            color=colour,
            marker=marker,
            linestyle="--" if oracle else "-",
            clip_on=False,  # markers at 100 %
            linewidth=2.8 if ours else 1.5,
            zorder=4 if ours else 3,
        )
    axes.axvline(report.k, color="black", alpha=0.4, linewidth=0.8, linestyle=":", zorder=1)
    title = f"split {report.split}: {report.n} {report.part} queries, pool of {report.pool_size}"
    axes.set_title(_plain(title), loc="left", fontsize=9)
    axes.set_xlabel(f"examples picked (the table has k = {report.k})")
    axes.set_ylabel("coverage of the gold program's structures (%)")
    axes.set_xticks(range(1, report.steps + 1))
    axes.set_ylim(top=min(100, axes.get_ylim()[1]))
    tidy(axes)
    _label_ends(axes, lines)
    return figure


def _plain(text: str) -> str:
    """Escape text from Matplotlib's math mode."""
    return printable(text).replace("$", r"\$")


def _label_ends(axes: Any, lines: Sequence[Any]) -> None:
    """Write each line's label at its end, in its colour, as near as they can stand without overlapping.

    Args:
        axes: of the lines.
        lines: in ascending order of their last values.
    """
    import numpy as np
    from scipy.optimize import isotonic_regression

    (low, high), size = axes.get_ylim(), 8
    height = 0.8 * axes.figure.get_figheight() * 72  # of the axes, in points
    gaps = np.arange(len(lines)) * (high - low) * 1.4 * size / height
    ends = np.array([line.get_ydata()[-1] for line in lines])
    # The positions nearest to the ends, by least squares, of which each is a gap above the one before.
    places = isotonic_regression(ends - gaps).x + gaps
    for line, end, place in zip(lines, ends, places, strict=True):
        axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], end),
            (20, (place - end) / (high - low) * height),
            textcoords="offset points",
            arrowprops={
                **{"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.6},
                **{"relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 3},
            },
            color=line.get_color(),
            fontsize=size,
            fontweight="bold" if line.get_linewidth() > 2 else "normal",
            va="center",
        )


def learning_figures(metrics: Sequence[Mapping[str, Any]], stage: str) -> dict[str, Figure]:
    """The curves of a stage of training, by title; those with two points or more.

    Args:
        metrics: the stage's rows (`Run.metrics`), in the order of their steps.
        stage: a key of CURVES.
    """
    from matplotlib.ticker import MaxNLocator

    figures = {}
    for metric, title in CURVES[stage].items():
        points = [(row["step"], row[metric]) for row in metrics if metric in row]
        if len(points) < 2:
            continue
        figures[title] = figure = new_figure(3.8, 2.6)
        axes = figure.add_subplot()
        axes.plot(*zip(*points, strict=True), color=_OURS[0], marker="o" if len(points) <= 30 else "", markersize=4)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("optimiser steps")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
    return figures


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=200, layout="constrained")


def tidy(axes: Any) -> None:
    """Horizontal grid lines, no frame above and on the right."""
    axes.grid(axis="y", color="black", alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure as a PNG, whole or not at all.

    Raises:
        DataError: the file can't be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
    return Path(path)


def to_svg(figure: Figure, title: str) -> str:
    """A figure as an <svg> element that scales with the page; what is black has the colour of the text around it.

    Args:
        figure: its other colours must show on dark and on light.
        title: what a screen reader says of it.
    """
    from html import escape

    import matplotlib as mpl

    buffer = io.StringIO()
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0)
    # Texts stay texts. The salt makes the ids of a figure depend on its content alone.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rcr", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2]
    # A third larger than on paper where there is room.
    size = f'viewBox="0 0 {width} {height}" style="max-width:{1.33 * float(width):.0f}pt"'
    head = f'<svg {size} fill="currentColor" role="img" aria-label="{escape(title)}">'
    svg = head + svg[svg.index(">") + 1 :]
    # Groups' ids repeat from figure to figure; those of clip paths and markers are digests that are referred to.
    return re.sub(r'<g id="[^"]*">', "<g>", svg)
