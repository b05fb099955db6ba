"""Evaluation reports with given figures, for the tests of what is made of them."""

from __future__ import annotations

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
