"""What a language model makes of each selector's picks: prompts, its answers, their scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from langchain_rcr.policy.prompt import APPENDIX_D, Prompt, Request, arranged
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data import Example
from rcr_trainer.evaluation.metrics import paired_intervals
from rcr_trainer.evaluation.report import OURS, AnswersAsked, EvaluationReport, Metric, Picks, SelectorScores
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError
from rcr_trainer.rewards import Reward, correctness, score, structure_coverage

logger = logging.getLogger(__name__)

_ANSWERED: tuple[Metric, ...] = ("exact_match", "execution")


@dataclass(frozen=True, slots=True)
class Answerer:
    """A language model, as the harness sees it.

    Args:
        answer: asks it: prompts, each once → answers, whose `program` is None where they hold none. On BudgetExceeded
            the comparison goes on with what there is, on TooLongError with the next selector; any other error stops it.
        name: of the model, for the report.
        prompt: how it is asked.
        orders: of the picks in a prompt, by selector; by default the first, likest, pick comes last.
        queries: how many queries it is asked, evenly spaced; None: all.
        execution: scores answers by their results (`rcr_trainer.rewards.execution`), if there is a database.
        money: dollars for numbers of prompt and completion tokens; None without prices.
    """

    answer: Callable[[Sequence[Request]], Sequence[Answer]]
    name: str
    prompt: Prompt = APPENDIX_D
    orders: Mapping[str, str] = field(default_factory=dict)
    queries: int | None = None
    execution: Reward | None = None
    money: Callable[[int, int], float | None] = lambda prompt_tokens, completion_tokens: None

    def chosen(self, count: int) -> np.ndarray:
        """Which of `count` queries it is asked, ascending."""
        n = count if self.queries is None else min(self.queries, count)
        return np.arange(n) * count // n

    def answer_all(self, report: EvaluationReport, picks: Picks, spec: ProgramSpec) -> None:
        """Have the picks of all selectors answered, each prompt once, and put scores into report and picks.

        Once a budget is spent, the selectors before the first that isn't complete are scored. A selector with prompts
        that the model can't read is left out.
        """
        asked = [picks[i] for i in self.chosen(len(picks)).tolist()]
        n, names, keys = len(asked), list(picks[0].selectors), [each.program for each in asked]
        logger.info("%d answers for each of %s", n, ", ".join(names))
        given, missing, unpaid = self._answers({name: self._prompts(name, asked) for name in names})
        report.answers = AnswersAsked(self.name, n, len(set(keys)), missing, unpaid, self.orders.get(OURS, "reversed"))
        rates = {name: self._score(report.selectors[name], name, asked, own, spec) for name, own in given.items()}
        for column, metric in enumerate(_ANSWERED):
            own = {name: found[:, column] for name, found in rates.items()}
            # Whether a gold program runs doesn't depend on who picked.
            told = ~np.isnan(np.array([*own.values()]).reshape(-1, n)).any(axis=0)
            programs = [key for key, kept in zip(keys, told, strict=True) if kept]
            for name, interval in paired_intervals(
                {name: found[told] for name, found in own.items()}, programs
            ).items():
                report.selectors[name].intervals[metric] = interval

    def _prompts(self, name: str, asked: Picks) -> list[Request]:
        order = self.orders.get(name, "reversed")
        shown = [[pick.item for pick in arranged(each.selectors[name].picks, order)] for each in asked]
        return [self.prompt.request(e, each.question, each.fields) for e, each in zip(shown, asked, strict=True)]

    def _score(
        self, scores: SelectorScores, name: str, asked: Picks, answers: Sequence[Answer], spec: ProgramSpec
    ) -> np.ndarray:
        """Put the figures of one selector's answers into its scores and picks; (n, 2) rates of `_ANSWERED`."""
        programs = [answer.program for answer in answers]
        rows = [each.selectors[name] for each in asked]
        golds = [Example(each.id, each.question, each.gold, each.fields) for each in asked]
        shown = [row.picks for row in rows]
        exact = score(correctness(spec), programs, golds, shown)
        jaccard = score(structure_coverage(spec), programs, golds, shown)
        same = score(self.execution, programs, golds, shown) if self.execution else np.full(len(rows), np.nan)
        for i, row in enumerate(rows):
            row.answer, row.exact, row.jaccard = programs[i], bool(exact[i]), round(float(jaccard[i]), 4)
            row.execution = None if np.isnan(same[i]) else bool(same[i])
        n = len(rows)
        read, written = (sum(getattr(a, kind) for a in answers) for kind in ("prompt_tokens", "completion_tokens"))
        money = self.money(read, written)
        scores.exact_match, scores.jaccard = 100 * float(exact.mean()), 100 * float(jaccard.mean())
        scores.no_program = 100 * programs.count(None) / n
        scores.execution = None if np.isnan(same).all() else 100 * float(np.nanmean(same))
        scores.prompt_tokens, scores.completion_tokens = read / n, written / n
        scores.cost = None if money is None else 1000 * money / n
        return np.stack([exact, same], axis=1)

    def _answers(self, prompts: Mapping[str, Sequence[Request]]) -> tuple[dict[str, list[Answer]], str, bool]:
        """By selector an answer for each prompt; why some selectors have none; whether a budget is spent.

        One selector after the other, so that the first ones are complete when a budget is spent.
        """
        given: dict[Request, Answer] = {}
        answers: dict[str, list[Answer]] = {}
        reasons: list[str] = []
        unpaid = False
        for name, own in prompts.items():
            wanted = [prompt for prompt in dict.fromkeys(own) if prompt not in given]
            try:
                found = list(self.answer(wanted)) if wanted else []
            except TooLongError as error:
                logger.warning("no exact match for %s: %s", name, error)
                reasons.append(str(error))
                continue
            except BudgetExceeded as error:
                without = list(prompts)[list(prompts).index(name) :]
                logger.warning("no exact match for %s: %s", ", ".join(without), error)
                reasons.append(str(error))
                unpaid = True
                break
            given.update(zip(wanted, found, strict=True))
            answers[name] = [given[prompt] for prompt in own]
        return answers, "; ".join(dict.fromkeys(reasons)), unpaid
