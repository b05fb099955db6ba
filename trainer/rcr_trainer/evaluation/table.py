"""The report as a table of at most 100 columns; duplicates and the time in batches are in evaluation.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from langchain_rcr.basics.section import printable
from rcr_trainer.evaluation.report import FIGURES, OURS, WITHOUT_RL, EvaluationReport, Interval, Kind, shown

WIDTH = 100
_NOTES = {OURS: "ours", WITHOUT_RL: "SFT"}
_STYLES = {"trained": "green", "oracle": "dim"}
_HEADINGS = {name: heading for name, (_, _, heading) in FIGURES.items() if heading}


def build_table(report: EvaluationReport) -> Table:
    """A rich table, a row a selector; what it is about stands in the title and the caption."""
    every = report.selectors.values()
    columns = [name for name in _HEADINGS if any(getattr(scores, name) is not None for scores in every)]
    is_crowded = len(columns) >= len(_HEADINGS) - 1
    if len(columns) == len(_HEADINGS):
        columns.remove("hub_share")  # there is no room
    table = Table(
        title=printable(title(report)),
        caption=printable("\n".join(notes(report))),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        padding=(0, 0) if is_crowded else (0, 1),
    )
    table.add_column("selector", no_wrap=True)
    for name in columns:
        table.add_column(_HEADINGS[name], justify="right", no_wrap=True)
    for name, scores in report.selectors.items():
        table.add_row(
            label(name, scores.kind),
            *(shown(scores, column) for column in columns),
            style="bold green" if name == OURS else _STYLES.get(scores.kind),
        )
    return table


def label(name: str, kind: Kind) -> str:
    """A selector's name with a note on what it is."""
    name = printable(name)
    note = "of coverage" if kind == "oracle" else _NOTES.get(name)
    return f"{name} ({note})" if note else name


def write_table(report: EvaluationReport, stream: TextIO) -> None:
    """Write the table: with colours on a terminal, as plain text elsewhere."""
    terminal = stream.isatty()
    console = Console(
        file=stream, force_terminal=terminal, no_color=None if terminal else True, width=WIDTH, markup=False
    )
    console.print(build_table(report), highlight=False)


def gap_text(points: float, interval: Interval | None) -> str:
    """A difference with its interval, never −0.0."""
    gap, *ends = (f"{round(value, 1) + 0.0:+.1f}" for value in (points, *(interval or ())))
    return f"{gap} ({' to '.join(ends)})" if ends else gap


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, numbers flush right behind the first column."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]]


def title(report: EvaluationReport) -> str:
    """What was compared, in a line."""
    queries = f"split {report.split}: {report.n} {report.part} queries of {report.programs} programs"
    return f"{queries}, pool of {report.pool_size}, k = {report.k}"


def notes(report: EvaluationReport) -> list[str]:
    """What else has to be known of a comparison, a sentence each."""
    lines = [f"The run's own settings are others: {', '.join(report.changed)}."] if report.changed else []
    answers, ours = report.answers, report.selectors.get(OURS)
    if answers is not None:
        lines.append(f"Exact match: {answers.n} queries of {answers.programs} programs, answered by {answers.model}.")
        if ours and ours.no_program:
            lines.append(f"{ours.no_program:.1f} % of rcr's answers hold no program.")
        if answers.missing:
            without = [name for name, scores in report.selectors.items() if scores.exact_match is None]
            lines.append(f"No exact match for {', '.join(without)}: {answers.missing}.")
    for name, choice in report.trade_offs.items():
        how = f"best of {len(choice.coverage)} on {choice.chosen_on}" if choice.coverage else "default"
        lines.append(f"{name}: {choice.parameter} = {choice.value:g} ({how}).")
    if report.gold == "pool":
        lines.append("Of the gold programs only what the pool has counts.")
    if report.repeated:
        lines.append(f"{report.repeated} queries are in the pool, too, with question and program.")
    if report.skipped_queries:
        lines.append(f"{report.skipped_queries} queries left out: their gold program doesn't parse.")
    if report.none_in_pool:
        lines.append(f"{report.none_in_pool} queries left out: the pool has nothing of their gold program.")
    return [*lines, *(f"{name} left out: {reason.rstrip('.')}." for name, reason in report.left_out.items())]
