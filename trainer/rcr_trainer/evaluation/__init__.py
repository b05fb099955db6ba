"""How well selectors cover what a query's gold program needs, and what a language model makes of their picks."""

from __future__ import annotations

from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.exact_match import Answerer, AnswerFunction
from rcr_trainer.evaluation.harness import PickFunction, evaluate
from rcr_trainer.evaluation.metrics import (
    coverage_by_step,
    duplicates_by_step,
    full_coverage_by_step,
    recall_by_step,
)
from rcr_trainer.evaluation.plain import PlainSelectors, choose, plain_selectors
from rcr_trainer.evaluation.plot import plot_coverage
from rcr_trainer.evaluation.report import AnswersAsked, Choice, EvaluationReport, SelectorScores
from rcr_trainer.evaluation.table import build_table, write_table

__all__ = [
    "AnswerFunction",
    "Answerer",
    "AnswersAsked",
    "Choice",
    "EvaluationReport",
    "PickFunction",
    "PlainSelectors",
    "SelectorScores",
    "advise",
    "build_table",
    "choose",
    "coverage_by_step",
    "duplicates_by_step",
    "evaluate",
    "full_coverage_by_step",
    "plain_selectors",
    "plot_coverage",
    "recall_by_step",
    "write_table",
]
