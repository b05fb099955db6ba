"""Runs as one HTML file that needs nothing else: tables, and a browser of the questions.

The picks are in it once, as JSON; the script shows one question at a time, and writes texts as texts only. A content
security policy allows this script alone, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import write_text
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import (
    FIGURES,
    OURS,
    PICKS,
    REPORT,
    EvaluationReport,
    Metric,
    Question,
    SelectorScores,
    read_picks,
)
from rcr_trainer.evaluation.table import gap_text, label
from rcr_trainer.runs.folder import Run

_HERE = Path(__file__).parent
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_COMPARED: tuple[Metric, ...] = ("exact_match", "execution", "full_coverage", "specific_coverage")
"""The figures whose intervals are shown."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page: headings, and rows of texts, each with its style ("" for none)."""

    headings: list[str]
    rows: Sequence[tuple[str, list[str]]]


def write_page(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the page of runs that have been evaluated, whole or not at all.

    Raises:
        DataError: a run has no evaluation, or no picks.jsonl.
        InputError: the file can't be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    for run in runs:
        if not (run.path / REPORT).is_file():
            raise DataError(
                f"{run.path} has no {REPORT}: `rcr-train run {run.path / 'config.yaml'} --resume` does all that is "
                f"missing, `rcr-train evaluate {run.path}` the comparison alone, once the training is done"
            )
        if not (run.path / PICKS).is_file():
            raise DataError(f"{run.path} has no {PICKS}: `rcr-train evaluate {run.path}` writes it")
    reports = [EvaluationReport.read(run.path) for run in runs]
    names = [run.config.name for run in runs]
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html").render(
        sections=[_section(f"run-{n}", run, report) for n, (run, report) in enumerate(zip(runs, reports, strict=True))],
        summary=_summary(names, reports) if len(runs) > 1 else None,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_json([{"name": name, **_data_of(read_picks(run.path))} for name, run in zip(names, runs, strict=True)]),
    )
    write_text(path, page)
    return Path(path)


def _section(name: str, run: Run, report: EvaluationReport) -> dict[str, Any]:
    """What the template shows of one run."""
    changed = f"; the run's own settings are others: {', '.join(report.changed)}" if report.changed else ""
    about = f"split {report.split}, {report.n} {report.part} queries of {report.programs} programs, "
    return {
        "id": name,
        "name": run.config.name,
        "about": f"{about}pool of {report.pool_size}, k = {report.k}, seed {report.seed}{changed}",
        "answers": _on_answers(report),
        "advice": report.advice,
        "table": _table_of(report),
        "intervals": _intervals_of(report),
        "coverage": _coverage_of(report),
    }


def _json(value: Any) -> str:
    """JSON that can stand inside a <script>: no "<" that could end it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _table_of(report: EvaluationReport) -> Table:
    every = report.selectors.values()
    columns = {
        name: about for name, about in FIGURES.items() if any(getattr(scores, name) is not None for scores in every)
    }
    rows = [
        (
            "ours" if name == OURS else scores.kind,
            [label(name, scores.kind), *(_shown(scores, column, digits) for column, (_, digits) in columns.items())],
        )
        for name, scores in report.selectors.items()
    ]
    return Table(["selector", *(text for text, _ in columns.values())], rows)


def _coverage_of(report: EvaluationReport) -> Table:
    """Coverage, %, by the number of picks."""
    rows = [
        (
            "ours" if name == OURS else own.kind,
            [label(name, own.kind), *(f"{each:.1f}" for each in own.coverage_by_step)],
        )
        for name, own in report.selectors.items()
    ]
    return Table(["picks", *map(str, range(1, report.steps + 1))], rows)


def _intervals_of(report: EvaluationReport) -> Table | None:
    """Ours less each other selector, with the 95 % interval; None where there are too few programs for intervals."""
    ours = report.selectors.get(OURS)
    metrics = [m for m in _COMPARED if any(m in s.intervals for s in report.selectors.values())]
    if ours is None or not metrics:
        return None
    rows = []
    for name, scores in report.selectors.items():
        cells = []
        for metric in metrics:
            interval = scores.intervals.get(metric)
            gap = (getattr(ours, metric) or 0) - (getattr(scores, metric) or 0)
            cells.append("–" if interval is None else gap_text(gap, interval))
        if name != OURS:
            rows.append((scores.kind, [label(name, scores.kind), *cells]))
    return Table(["ours less", *(FIGURES[metric][0].removesuffix(", %") for metric in metrics)], rows)


def _summary(names: Sequence[str], reports: Sequence[EvaluationReport]) -> Table:
    """A row a run: ours and the best plain selector, in what both have."""
    compared: tuple[Metric, ...] = ("exact_match", "full_coverage", "coverage")
    rows = []
    for run, report in zip(names, reports, strict=True):
        cells = [run, report.split, str(report.seed), str(report.k)]
        ours = report.selectors.get(OURS)
        for metric in compared:
            best = report.best_plain(metric)
            cells += [_shown(ours, metric, 1), "–" if best is None else f"{best[1]:.1f} ({best[0]})"]
        rows.append(("plain", cells))
    titles = [f"{who} {FIGURES[metric][0]}" for metric in compared for who in ("our", "best plain")]
    return Table(["run", "split", "seed", "k", *titles], rows)


def _shown(scores: SelectorScores | None, name: str, digits: int) -> str:
    value = None if scores is None else getattr(scores, name)
    return "–" if value is None else f"{value:,.{digits}f}"


def _on_answers(report: EvaluationReport) -> str:
    answers = report.answers
    if answers is None:
        return "No language model was asked."
    missing = f" Some selectors have no answers: {answers.missing}." if answers.missing else ""
    return f"{answers.n} questions of {answers.programs} programs were answered by {answers.model}.{missing}"


def _data_of(questions: Sequence[Question]) -> dict[str, Any]:
    """What the browser of questions needs: texts, examples and structures once, everything else as numbers."""
    structures: dict[str, int] = {}
    examples: dict[tuple[str, str], int] = {}
    rows = []
    for each in questions:
        # The smallest structures first.
        order = sorted(range(len(each.structures)), key=lambda at: _size(each.structures[at]))
        picked = []
        for own in each.selectors.values():
            shown = [examples.setdefault((pick.source, pick.target), len(examples)) for pick in own.picks]
            steps = "".join(_DIGITS[min(own.covered[at], len(_DIGITS) - 1)] for at in order)
            scores = None if own.exact is None else [own.answer, own.exact, own.jaccard, own.execution]
            picked.append([shown, steps, scores])
        needed = [structures.setdefault(each.structures[at], len(structures)) for at in order]
        rows.append([each.id, each.question, each.gold, needed, picked])
    return {
        "selectors": [[name, own.kind, label(name, own.kind)] for name, own in questions[0].selectors.items()],
        "structures": list(structures),
        "examples": list(examples),
        "questions": rows,
    }


def _size(structure: str) -> tuple[int, str]:
    return structure.count(" -> ") + structure.count(" <-> "), structure
