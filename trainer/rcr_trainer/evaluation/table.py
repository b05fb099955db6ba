"""The report as a table for terminals of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from langchain_rcr.errors import InputError, MissingExtraError
from rcr_trainer.evaluation.report import ORACLE, OURS, EvaluationReport

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80
_NOTES = {OURS: "rcr (ours)", ORACLE: "oracle (sees gold)"}


def build_table(report: EvaluationReport) -> Table:
    """A rich table: selectors by rows, ours and the oracle marked; what it is about in the title and the caption.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich import box
        from rich.table import Table
    except ImportError as error:
        raise MissingExtraError("rich", "train") from error
    table = Table(
        title=f"split {report.split}: {report.n} {report.part} queries, pool of {report.pool_size}, k = {report.k}",
        caption=_caption(report),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("selector", no_wrap=True)
    for heading in ("coverage\n%", "full\ncover. %", "dupli-\ncates %", "ms per\nquery", "ms, 64\nat once"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, scores in report.selectors.items():
        table.add_row(
            _NOTES.get(name, name),
            *(f"{rate:.1f}" for rate in (scores.coverage, scores.full_coverage, scores.duplicate_rate)),
            *(_milliseconds(value) for value in (scores.latency_ms, scores.latency_batch_ms)),
            style={OURS: "bold green", ORACLE: "dim"}.get(name),
        )
    return table


def write_table(report: EvaluationReport, stream: TextIO) -> None:
    """Write the table to a stream: with colours on a terminal, as plain text of at most 80 columns elsewhere.

    Raises:
        MissingExtraError: rich is not installed.
    """
    table = build_table(report)
    from rich.console import Console

    terminal = stream.isatty()
    console = Console(
        file=stream,
        force_terminal=terminal,
        no_color=None if terminal else True,
        width=None if terminal else WIDTH,
    )
    console.print(table, highlight=False)


def _caption(report: EvaluationReport) -> str:
    lines = []
    if OURS in report.selectors:
        try:
            name, best = report.best_plain()
            gap = report.selectors[OURS].coverage - best
            lines.append(f"rcr covers {gap:+.1f} points against the best plain selector, {name}.")
        except InputError:
            pass
    if report.mmr is not None:
        how = f"best of {len(report.mmr.coverage)} on {report.mmr.chosen_on}" if report.mmr.coverage else "default"
        lines.append(f"mmr: lambda = {report.mmr.lambda_mult:g} ({how}).")
    if report.skipped_queries:
        lines.append(f"{report.skipped_queries} queries left out: their gold program doesn't parse.")
    lines += [f"{name} left out: {reason}." for name, reason in report.left_out.items()]
    return "\n".join(lines)


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
