"""What a language model makes of each selector's picks: prompts, its programs, exact match."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from langchain_rcr.errors import InputError
from langchain_rcr.items import Item, compose
from rcr_trainer.data import Example
from rcr_trainer.evaluation.metrics import paired_error
from rcr_trainer.evaluation.report import OURS
from rcr_trainer.llm import BudgetExceeded
from rcr_trainer.programs import ProgramSpec
from rcr_trainer.rewards import Correctness, StructureCoverage, score

logger = logging.getLogger(__name__)

AnswerFunction: TypeAlias = Callable[[Sequence[str]], Sequence[str | None]]
"""Prompts → the programs that they were answered with; None: no program."""


class AnswerScores(NamedTuple):
    """The figures of `SelectorScores` that a language model's answers give."""

    exact_match: float
    jaccard: float
    no_program: float
    exact_match_error: float | None = None


@dataclass(frozen=True, slots=True)
class Answerer:
    """A language model, as the harness sees it.

    Args:
        answer: asks it; each prompt comes once. It may raise BudgetExceeded, on which the comparison goes on with
            what there is; any other error stops it.
        name: of the model, for the report.
        simulated: it is no language model, but the offline simulator of one.
        queries: how many queries it is asked, spread evenly over those that count; None: all.
    """

    answer: AnswerFunction
    name: str
    simulated: bool = False
    queries: int | None = None

    def chosen(self, count: int) -> np.ndarray:
        """(n,) int64, ascending: which of so many queries it is asked."""
        n = count if self.queries is None else min(self.queries, count)
        return np.arange(n) * count // n


def ask(
    picks: Mapping[str, np.ndarray],
    pool: Sequence[Example],
    queries: Sequence[Example],
    spec: ProgramSpec,
    answer: AnswerFunction,
) -> tuple[dict[str, AnswerScores], str]:
    """Have the picks of all selectors answered, together and each prompt once, and score the answers.

    Args:
        picks: by selector (n, k) positions in the pool, in the order in which the prompt shows them.
        pool: the candidates.
        queries: the n queries with their gold programs, all of which parse.
        spec: how programs are read.
        answer: see `Answerer`.

    Returns:
        Scores by selector, and why some have none ("" where all have): once a budget is spent, the selectors whose
        prompts are all answered are scored, in their order up to the first that isn't.

    Raises:
        InputError: the function gave another number of programs than it was given prompts.
    """
    shown = {name: [[pool[i] for i in row] for row in positions.tolist()] for name, positions in picks.items()}
    prompts = {name: [_prompt(*pair) for pair in zip(rows, queries, strict=True)] for name, rows in shown.items()}
    programs: dict[str, str | None] = {}

    def fetch(names: Sequence[str]) -> None:
        wanted = list(dict.fromkeys(prompt for name in names for prompt in prompts[name]))
        given = list(answer(wanted))
        if len(given) != len(wanted):
            raise InputError(f"the answer function gave {len(given)} programs for {len(wanted)} prompts")
        programs.update(zip(wanted, given, strict=True))

    done, reason = list(picks), ""
    logger.info("%d answers for each of %s", len(queries), ", ".join(done))
    try:
        fetch(done)
    except BudgetExceeded as error:
        # Asked in the selectors' order, and every answer kept: those of the first ones may be complete.
        done, reason = [], str(error)
        for name in picks:
            try:
                fetch([name])
            except BudgetExceeded:
                break
            done.append(name)
        missing = ", ".join(name for name in picks if name not in done)
        logger.warning("no exact match for %s: %s", missing, reason)
    rewards = (Correctness(spec), StructureCoverage(spec))
    given = {name: [programs[prompt] for prompt in prompts[name]] for name in done}
    exact, similar = ({name: score(reward, given[name], queries, shown[name]) for name in done} for reward in rewards)
    errors = {name: paired_error(exact[OURS], exact[name]) for name in done if name != OURS and OURS in exact}
    scores = {
        name: AnswerScores(
            exact_match=100 * float(exact[name].mean()),
            jaccard=100 * float(similar[name].mean()),
            no_program=100 * given[name].count(None) / len(queries),
            exact_match_error=errors.get(name),
        )
        for name in done
    }
    return scores, reason


def _prompt(shown: Sequence[Example], query: Example) -> str:
    return compose([Item(example.source, example.target) for example in shown], query.source)
