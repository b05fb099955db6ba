"""What a language model makes of each selector's picks: prompts, its programs, exact match."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from langchain_rcr.errors import InputError
from langchain_rcr.items import compose
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data import Example
from rcr_trainer.evaluation.intervals import paired_intervals
from rcr_trainer.evaluation.report import AnswersAsked, EvaluationReport
from rcr_trainer.llm.faults import BudgetExceeded
from rcr_trainer.rewards import correctness, score, structure_coverage

logger = logging.getLogger(__name__)

AnswerFunction: TypeAlias = Callable[[Sequence[str]], Sequence[str | None]]
"""Prompts → the programs that they were answered with; None: no program."""


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

    def answer_all(
        self,
        report: EvaluationReport,
        picks: Mapping[str, np.ndarray],
        pool: Sequence[Example],
        queries: Sequence[Example],
        spec: ProgramSpec,
    ) -> None:
        """Have the picks of all selectors answered, together and each prompt once, and score the answers.

        Once a budget is spent, the selectors whose prompts are all answered are scored, in their order up to the
        first that isn't.

        Args:
            report: gets the figures, and why some selectors have none.
            picks: by selector (B, k) positions in the pool, in the order in which the prompt shows them.
            pool: the candidates.
            queries: the B queries with their gold programs, all of which parse.
            spec: how programs are read.

        Raises:
            InputError: the function gave another number of programs than it was given prompts.
        """
        asked = self.chosen(len(queries)).tolist()
        n = len(asked)
        golds = [queries[i] for i in asked]
        shown = {name: [[pool[p] for p in positions[i]] for i in asked] for name, positions in picks.items()}
        prompts = {
            name: [
                compose([example.item for example in row], gold.source) for row, gold in zip(rows, golds, strict=True)
            ]
            for name, rows in shown.items()
        }
        logger.info("%d answers for each of %s", n, ", ".join(picks))
        programs, missing = self._programs(prompts)
        keys = [spec.key(gold.target) for gold in golds]
        report.answers = AnswersAsked(self.name, self.simulated, n, len(set(keys)), missing)
        exact = {name: score(correctness(spec), answers, golds, shown[name]) for name, answers in programs.items()}
        for name, answers in programs.items():
            scores = report.selectors[name]
            scores.exact_match = 100 * float(exact[name].mean())
            scores.jaccard = 100 * float(score(structure_coverage(spec), answers, golds, shown[name]).mean())
            scores.no_program = 100 * answers.count(None) / n
        for name, interval in paired_intervals(exact, keys).items():
            report.selectors[name].intervals["exact_match"] = interval

    def _programs(self, prompts: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str | None]], str]:
        """By selector a program per prompt, and why some selectors have none ("" where all have)."""
        given: dict[str, str | None] = {}

        def fetch(names: Sequence[str]) -> None:
            wanted = list(dict.fromkeys(prompt for name in names for prompt in prompts[name]))
            found = list(self.answer(wanted))
            if len(found) != len(wanted):
                raise InputError(f"the answer function gave {len(found)} programs for {len(wanted)} prompts")
            given.update(zip(wanted, found, strict=True))

        done, reason = list(prompts), ""
        try:
            fetch(done)
        except BudgetExceeded as error:
            # Asked in the selectors' order, and every answer kept: those of the first ones may be complete.
            done, reason = [], str(error)
            for name in prompts:
                try:
                    fetch([name])
                except BudgetExceeded:
                    break
                done.append(name)
            without = ", ".join(name for name in prompts if name not in done)
            logger.warning("no exact match for %s: %s", without, reason)
        return {name: [given[prompt] for prompt in prompts[name]] for name in done}, reason
