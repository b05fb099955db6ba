"""Coverage by step, one line per selector, as a PNG."""

from __future__ import annotations

import io
from itertools import cycle
from pathlib import Path

from langchain_rcr.files import write_bytes
from rcr_trainer.evaluation.report import OURS, EvaluationReport
from rcr_trainer.evaluation.table import label

# Okabe and Ito's palette and some more, told apart with any colour vision; each with a marker of its own for print
# without colour.
_OURS, _ORACLE = ("#D55E00", "o"), ("#777777", "")
_STYLES = (
    *(("#0072B2", "s"), ("#56B4E9", "D"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "X"), ("#000000", "P")),
    *(("#8C6D31", "*"), ("#5B5EA6", "h"), ("#9B2335", "p"), ("#2E4A3F", "d")),
)


def plot_coverage(report: EvaluationReport, path: str | Path) -> Path:
    """Draw coverage of the gold program against the number of picks, and write it as a PNG.

    Args:
        report: the evaluation.
        path: of the PNG; written whole or not at all.

    Raises:
        DataError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=160, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = cycle(_STYLES)
    # The legend lists the lines from top to bottom, as they end.
    for name, scores in sorted(report.selectors.items(), key=lambda item: -item[1].coverage_by_step[-1]):
        ours, oracle = name == OURS, scores.kind == "oracle"
        colour, marker = _OURS if ours else _ORACLE if oracle else next(styles)
        axes.plot(
            range(1, report.steps + 1),
            scores.coverage_by_step,
            label=label(name, scores.kind),
            color=colour,
            marker=marker,
            linestyle="--" if oracle else "-",
            linewidth=2.8 if ours else 1.5,
            zorder=4 if ours else 3,
        )
    axes.axvline(report.k, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=1)
    axes.set_title(
        f"split {report.split}: {report.n} {report.part} queries, pool of {report.pool_size}", loc="left", fontsize=11
    )
    axes.set_xlabel(f"examples picked (the table has k = {report.k})")
    axes.set_ylabel("coverage of the gold program's structures (%)")
    axes.set_xticks(range(1, report.steps + 1))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_bytes(path, buffer.getvalue())
    return Path(path)
