"""Evaluation reports with given figures, for the tests of what is made of them."""

from __future__ import annotations

from rcr_trainer.evaluation.report import EvaluationReport, SelectorScores


def scores(coverage=50.0, *, kind="plain", by_step=None, **figures):
    """A selector's figures; what isn't given is some constant."""
    by_step = [coverage] if by_step is None else by_step
    others = {
        "full_coverage": 12.3456,
        "specific_coverage": 45.6,
        "label_complete": 78.9,
        "duplicate_rate": 3.0,
        "hub_share": 23.4,
        "prompt_length": 321.4,
        "latency_ms": 1.23456,
        "latency_batch_ms": 0.01234,
    }
    return SelectorScores(kind=kind, coverage=coverage, coverage_by_step=by_step, **{**others, **figures})


def report(selectors, **about):
    """A report on them, each of whose kind is that of its name."""
    for name, figures in selectors.items():
        figures.kind = "oracle" if name == "oracle" else "trained" if name.startswith("rcr") else "plain"
    steps = len(next(iter(selectors.values())).coverage_by_step)
    defaults = {"k": 4, "n": 200, "programs": 150, "split": "toy", "seed": 0, "steps": steps, "pool_size": 300}
    return EvaluationReport(selectors=selectors, **{**defaults, **about})
