"""Runs as one HTML file that needs nothing else: tables, and a browser of the questions.

The picks are in it once, as JSON; the script shows one question at a time, and writes texts as texts only. A content
security policy allows this script alone, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
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
    shown,
)
from rcr_trainer.evaluation.table import gap_text, label, notes, title
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
    every = report.selectors.values()
    figures = [each for each in FIGURES if any(getattr(scores, each) is not None for scores in every)]
    return {
        "id": name,
        "name": run.config.name,
        "about": " ".join([f"{title(report)}, seed {report.seed}.", *notes(report)]),
        "advice": report.advice,
        "table": Table(
            ["selector", *(FIGURES[each][0] for each in figures)],
            _rows(report, lambda own: [shown(own, each) for each in figures]),
        ),
        "intervals": _intervals_of(report),
        "coverage": Table(
            ["picks", *map(str, range(1, report.steps + 1))],
            _rows(report, lambda own: [f"{each:.1f}" for each in own.coverage_by_step]),
        ),
    }


def _rows(report: EvaluationReport, cells: Callable[[SelectorScores], list[str]]) -> list[tuple[str, list[str]]]:
    """A row of a table for each selector."""
    return [
        ("ours" if name == OURS else own.kind, [label(name, own.kind), *cells(own)])
        for name, own in report.selectors.items()
    ]


def _json(value: Any) -> str:
    """JSON that can stand inside a <script>: no "<" that could end it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _intervals_of(report: EvaluationReport) -> Table | None:
    """Ours less each other selector, with the 95 % interval; None where there are too few programs for intervals."""
    ours = report.selectors.get(OURS)
    metrics = [m for m in _COMPARED if any(m in s.intervals for s in report.selectors.values())]
    if ours is None or not metrics:
        return None

    def gap(scores: SelectorScores, metric: Metric) -> str:
        points = (getattr(ours, metric) or 0) - (getattr(scores, metric) or 0)
        return gap_text(points, scores.intervals[metric]) if metric in scores.intervals else "–"

    rows = _rows(report, lambda own: [gap(own, metric) for metric in metrics])
    others = [row for row, name in zip(rows, report.selectors, strict=True) if name != OURS]
    return Table(["ours less", *(FIGURES[metric][0].removesuffix(", %") for metric in metrics)], others)


def _summary(names: Sequence[str], reports: Sequence[EvaluationReport]) -> Table:
    """A row a run: ours and the best plain selector, in what both have."""
    compared: tuple[Metric, ...] = ("exact_match", "full_coverage", "coverage")
    rows = []
    for run, report in zip(names, reports, strict=True):
        cells = [run, report.split, str(report.seed), str(report.k)]
        ours = report.selectors.get(OURS)
        for metric in compared:
            best = report.best_plain(metric)
            cells += [shown(ours, metric), "–" if best is None else f"{best[1]:.1f} ({best[0]})"]
        rows.append(("plain", cells))
    titles = [f"{who} {FIGURES[metric][0]}" for metric in compared for who in ("our", "best plain")]
    return Table(["run", "split", "seed", "k", *titles], rows)


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
            numbers = [examples.setdefault((pick.source, pick.target), len(examples)) for pick in own.picks]
            steps = "".join(_DIGITS[min(own.covered[at], len(_DIGITS) - 1)] for at in order)
            scores = None if own.exact is None else [own.answer, own.exact, own.jaccard, own.execution]
            picked.append([numbers, steps, scores])
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
