"""The report in Markdown: its table, which the command line shows too, and report.md, question by question."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from langchain_rcr.errors import printable
from langchain_rcr.programs.tree import is_label
from rcr_trainer.baselines import NO_EXAMPLES
from rcr_trainer.evaluation.advice import gap_to
from rcr_trainer.evaluation.report import FIGURES, OURS, WITHOUT_RL, EvaluationReport, Interval, Metric, Picks, Question

_NOTES = {OURS: "ours", WITHOUT_RL: "SFT"}
_COLUMNS = ("exact_match", "execution", "coverage", "full_coverage", "prompt_length", "latency_ms")
"""The figures in the table of a comparison."""
_COMPARED: tuple[Metric, ...] = ("exact_match", "execution", "full_coverage")
"""The figures whose intervals are shown."""


def table(report: EvaluationReport) -> list[str]:
    """What the command line shows: what is compared, a row for each selector, and notes."""
    every = report.selectors.values()
    columns = [name for name in _COLUMNS if any(getattr(scores, name) is not None for scores in every)]
    rows = []
    for name, scores in report.selectors.items():
        note = "of coverage" if scores.kind == "oracle" else _NOTES.get(name)
        figures = [(getattr(scores, column), FIGURES[column][1]) for column in columns]
        shown = ("–" if value is None else f"{value:,.{digits}f}" for value, digits in figures)
        rows.append([f"{name} ({note})" if note else name, *shown])
    queries = f"split {report.split}: {report.n} {report.part} queries of {report.programs} programs"
    title = f"{queries}, pool of {report.pool_size}, k = {report.k}"
    lines = [title, "", *markdown_rows(["selector", *(FIGURES[column][0] for column in columns)], rows, aligned=True)]
    if said := notes(report):
        lines += ["", *said]
    return [*map(printable, lines)]


def report_text(name: str, report: EvaluationReport, picks: Picks) -> str:
    """The text of report.md: the table, the verdict, intervals, and the outcome of two selectors' picks by question."""
    lines = [f"# {name}, seed {report.seed}", "", *table(report), "", report.advice, ""]
    if gaps := _intervals(report):
        lines += ["## Our lead over each, points (95 % interval)", "", *gaps, ""]
    rival = report.best_plain(report.right) or report.best_plain()
    beside = "without examples" if rival == NO_EXAMPLES else f"with the picks of {rival}, the best plain selector"
    lines.append(f"## Questions{f' (also {beside})' if rival else ''}")
    for question in picks:
        lines += ["", *_question(question, [name for name in (OURS, rival) if name in question.selectors])]
    return printable("\n".join(lines) + "\n")


def gap_text(points: float, interval: Interval | None) -> str:
    """A difference with its interval, never −0.0."""
    gap, *ends = (f"{round(value, 1) + 0.0:+.1f}" for value in (points, *(interval or ())))
    return f"{gap} ({' to '.join(ends)})" if ends else gap


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]], *, aligned: bool = False) -> list[str]:
    """The lines of a Markdown table, numbers flush right after the first column; `aligned` pads the source text."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*cells, strict=True)]
    sides = [str.ljust, *[str.rjust] * (len(head) - 1)]
    lines = [
        f"| {' | '.join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))} |"
        for row in cells
    ]
    rule = ["-" * max(3, widths[0] + 2), *(f"{'-' * max(3, width + 1)}:" for width in widths[1:])]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def notes(report: EvaluationReport) -> list[str]:
    """What else one has to know about a comparison, a sentence each."""
    lines = [f"Other settings than the run's own: {', '.join(report.changed)}."] if report.changed else []
    answers, ours = report.answers, report.selectors.get(OURS)
    if answers is not None:
        lines.append(f"Exact match: {answers.n} queries of {answers.programs} programs, answered by {answers.model}.")
        if 0 < answers.told < answers.n:
            lines.append(f"Same rows: the {answers.told} of them whose gold program gives a result to compare.")
        if ours and ours.no_program:
            lines.append(f"{ours.no_program:.1f} % of rcr's answers hold no program.")
        if answers.missing:
            without = [name for name, scores in report.selectors.items() if scores.exact_match is None]
            lines.append(f"No exact match for {', '.join(without)}: {answers.missing}.")
    for name, choice in report.trade_offs.items():
        how = f"best of {len(choice.coverage)} on {choice.chosen_on}" if choice.coverage else "default"
        lines.append(f"{name}: {choice.parameter} = {choice.value:g} ({how}).")
    if report.skipped_queries:
        lines.append(f"{report.skipped_queries} queries left out: their gold program doesn't parse.")
    return [*lines, *(f"{name} left out: {reason.rstrip('.')}." for name, reason in report.left_out.items())]


def _intervals(report: EvaluationReport) -> list[str]:
    """A table of our lead over each other selector; empty if there are too few programs for intervals."""
    others = {name: scores.intervals for name, scores in report.selectors.items() if name != OURS}
    metrics = [metric for metric in _COMPARED if any(metric in intervals for intervals in others.values())]

    def lead(name: str, metric: Metric) -> str:
        gap = gap_to(name, report, metric)
        return gap_text(gap.points, gap.interval) if gap and gap.interval else "–"

    head = ["lead over", *(FIGURES[metric][0].removesuffix(" %") for metric in metrics)]
    rows = [[name, *(lead(name, metric) for metric in metrics)] for name in others]
    return markdown_rows(head, rows) if metrics else []


def _question(question: Question, selectors: Sequence[str]) -> Iterator[str]:
    yield f"### {_code(question.id)} {_code(question.question)}"
    yield ""
    yield f"gold: {_code(question.gold)}"
    for name in selectors:
        yield ""
        yield f"{name}: {_outcome(question, name)}"
        yield ""
        for pick in question.selectors[name].picks:
            yield f"1. {_code(pick.source)} → {_code(pick.target)}"


def _outcome(question: Question, selector: str) -> str:
    """The answer, if one was asked for, and what the picks lack: how many structures, and which labels."""
    own = question.selectors[selector]
    missing = [name for name, step in zip(question.structures, own.covered, strict=True) if not step]
    lacks = f"its picks lack {len(missing)} of {len(question.structures)} structures"
    if labels := [_code(name) for name in missing if is_label(name)]:
        lacks += f", {', '.join(labels)} among them"
    if own.exact is None:
        return lacks
    verdict = "right" if own.exact else "other, with the same result" if own.execution else "wrong"
    answer = f"{verdict}: {_code(own.answer) if own.answer else 'no program'}"
    return f"{answer}; {lacks}" if own.picks else answer


def _code(text: str) -> str:
    """A text as inline code in Markdown, on one line, so that nothing in it reads as markup."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"
