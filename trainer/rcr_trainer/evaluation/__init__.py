"""How well selectors cover what a query's gold program needs, and what a language model makes of their picks."""

from __future__ import annotations

from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.exact_match import Answerer
from rcr_trainer.evaluation.harness import PickFunction, evaluate
from rcr_trainer.evaluation.plain import PlainSelectors, choose, plain_selectors
from rcr_trainer.evaluation.report import (
    AnswersAsked,
    Choice,
    EvaluationReport,
    Picked,
    Question,
    SelectorScores,
    read_picks,
    write_picks,
)
from rcr_trainer.evaluation.table import write_table

__all__ = [
    "Answerer",
    "AnswersAsked",
    "Choice",
    "EvaluationReport",
    "PickFunction",
    "Picked",
    "PlainSelectors",
    "Question",
    "SelectorScores",
    "advise",
    "choose",
    "evaluate",
    "plain_selectors",
    "read_picks",
    "write_picks",
    "write_table",
]
