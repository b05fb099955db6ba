"""Evaluation reports with given figures, for the tests of what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

from rcr_trainer.evaluation.report import EvaluationReport, SelectorScores


def scores(coverage=50.0, *, kind="plain", **figures):
    """A selector's figures; what isn't given is some constant."""
    others = {
        "full_coverage": 12.3456,
        "prompt_length": 321.4,
        "latency_ms": 1.23456,
        "latency_batch_ms": 0.01234,
    }
    return SelectorScores(kind=kind, coverage=coverage, **{**others, **figures})


def report(selectors, **about):
    """A report on them, each of whose kind is that of its name."""
    for name, figures in selectors.items():
        figures.kind = "oracle" if name == "oracle" else "trained" if name.startswith("rcr") else "plain"
    defaults = {"k": 4, "n": 200, "programs": 150, "split": "toy", "seed": 0, "pool_size": 300}
    return EvaluationReport(selectors=selectors, **{**defaults, **about})


def logged(folder: Path, stage: str | None = None):
    """What a run has logged, of one stage or all; of a step logged twice (after a kill) the later."""
    file = folder / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return list({(row["stage"], row["step"]): row for row in rows if stage in (None, row["stage"])}.values())
