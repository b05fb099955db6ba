"""Runs selectors over queries with known gold programs: coverage, duplicates, time, and a language model's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import compress, product
from typing import Any, TypeAlias

import numpy as np

from langchain_rcr.basics.extras import library_versions
from langchain_rcr.basics.progress import track
from langchain_rcr.errors import InputError
from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt, Request, arranged
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.data import Example, shared
from rcr_trainer.data.coverage import row_blocks
from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.metrics import paired_intervals
from rcr_trainer.evaluation.report import (
    OURS,
    AnswersAsked,
    EvaluationReport,
    Kind,
    Metric,
    Picked,
    Picks,
    Question,
    SelectorScores,
)
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError
from rcr_trainer.rewards import Reward, correctness, score, structure_coverage

logger = logging.getLogger(__name__)

PickFunction: TypeAlias = Callable[[Sequence[str], int, Exclude, Sequence[str] | None], np.ndarray]
"""(queries, k, exclude, references) → (B, k) positions; the picks for k begin those for any larger k."""
Selector: TypeAlias = PickFunction | Baseline
Selectors: TypeAlias = Mapping[str, Selector]
Barred: TypeAlias = list[np.ndarray]
"""For each query of a block, the positions it may not pick."""

LATENCY_QUERIES = 25
LATENCY_BATCH = 64
LATENCY_ROUNDS = 3
"""Repetitions of each timed call; the shortest counts."""
_RATES: dict[Metric, Callable[[Picked], float | None]] = {
    "coverage": lambda own: np.count_nonzero(own.covered) / len(own.covered),
    "full_coverage": lambda own: all(own.covered),
    "exact_match": lambda own: own.exact,
    "execution": lambda own: own.execution,
}
"""A question's rates, from 0 to 1; None where unknown."""


def evaluate(
    selectors: Selectors,
    pool: Sequence[Example],
    queries: Sequence[Example],
    spec: ProgramSpec,
    *,
    k: int = 4,
    exclude: Exclude = None,
    answerer: Answerer | None = None,
    keep: Callable[[EvaluationReport, Picks], None] = lambda report, picks: None,
    **about: Any,
) -> EvaluationReport:
    """Measure every selector on the same queries and pool.

    Queries whose gold program doesn't parse (or has no structure) are left out and counted.

    Args:
        selectors: by name; the trained retriever is `rcr`.
        pool: the candidates that positions refer to.
        queries: with their gold programs.
        spec: how programs are read.
        k: picks per query.
        exclude: for each query, the positions it may not pick; read a block of queries at a time.
        answerer: a language model, asked with each selector's k picks once everything else is measured.
        keep: called with the report and the k picks before the model is asked, so that nothing is lost if it fails, and
            again once it has answered.
        **about: fields of the report that only the caller knows.

    Raises:
        InputError: k is more than what is left to pick from, no query is left to count, or a selector picks wrongly
            (too few, outside the pool, excluded, or twice).
        LLMError: the language model can't be asked. A spent budget or too long a prompt only leaves selectors without
            answers.
    """
    kept = [i for i, query in enumerate(queries) if spec.structures(query.target)]
    if not kept:
        raise InputError(f"none of the {len(queries)} queries has a gold program that parses")
    asked = [queries[i] for i in kept]
    picks = [
        Question(q.id, q.source, q.target, spec.key(q.target), sorted(spec.structures(q.target)), {}, q.fields, q.home)
        for q in asked
    ]

    def barred(part: slice) -> Barred:
        own = [() if exclude is None else exclude[i] for i in kept[part]]
        return checked_exclude(own, len(own), len(pool), k)

    for block in row_blocks(len(picks), len(pool)):
        excluded = barred(block)
        for name, selector in track(list(selectors.items()), "comparing selectors"):
            _put_picks(name, selector, picks[block], pool, k, excluded, spec)
    report = EvaluationReport(
        k=k,
        n=len(picks),
        programs=len({each.program for each in picks}),
        selectors={name: _unrated([each.selectors[name] for each in picks]) for name in selectors},
        pool_size=len(pool),
        skipped_queries=len(queries) - len(picks),
        versions=library_versions(),
        **about,
    )
    _put_times(report, selectors, picks, barred)
    _put_rates(report, picks, "coverage", "full_coverage")
    report.repeated = len(shared(asked, pool)[0]) if report.part == "test" else 0
    report.advice = advise(report)
    keep(report, picks)
    if answerer is not None:
        report = deepcopy(report)  # `keep` has the first one
        answerer.answer_all(report, picks, spec)
        report.advice = advise(report)
        keep(report, picks)
    return report


def _picked(selector: Selector, asked: Picks, k: int, excluded: Barred) -> np.ndarray:
    """Positions (B, k)."""
    pick = selector.pick if isinstance(selector, Baseline) else selector
    return np.asarray(pick([each.question for each in asked], k, excluded, [each.gold for each in asked]))


def _put_picks(
    name: str, selector: Selector, asked: Picks, pool: Sequence[Example], k: int, excluded: Barred, spec: ProgramSpec
) -> None:
    """Keep the picks that a selector shows, and which of them cover what."""
    kind: Kind = "trained"
    shows = True
    if isinstance(selector, Baseline):
        kind, shows = "oracle" if selector.oracle else "plain", selector.shows
    for question, own, barred in zip(asked, _picked(selector, asked, k, excluded), excluded, strict=True):
        # The figures of a selector that repeats picks or picks what is excluded would mean something else.
        sound = np.setdiff1d(own, barred)
        if len(sound) != k or sound[0] < 0 or sound[-1] >= len(pool):
            raise InputError(
                f"selector {name} picked {own.tolist()} for {question.question!r:.80}, not {k} positions of "
                f"{len(pool)}, each once and none of those excluded"
            )
        shown, first = [pool[position] for position in own if shows], dict[str, int]()
        for step, example in enumerate(shown, 1):
            first |= dict.fromkeys(spec.structures(example.target) - first.keys(), step)
        question.selectors[name] = Picked(kind, shown, [first.get(each, 0) for each in question.structures])


def _unrated(own: Sequence[Picked]) -> SelectorScores:
    """A selector's scores, still without rates and times."""
    lengths = [sum(len(each.source) + len(each.target) for each in picked.picks) for picked in own]
    return SelectorScores(own[0].kind, 0.0, 0.0, float(np.mean(lengths)), 0.0, 0.0)


def _put_rates(report: EvaluationReport, asked: Picks, *metrics: Metric) -> None:
    """Put the means of these rates into the report, and their intervals over the questions where all are known."""
    programs, homes = [each.program for each in asked], [each.home for each in asked]
    for metric in metrics:
        rates = {}
        for name, scores in report.selectors.items():
            own = np.array([_RATES[metric](each.selectors[name]) for each in asked], dtype=np.float64)
            if not np.isnan(own).all():
                setattr(scores, metric, 100 * float(np.nanmean(own)))
                rates[name] = own
        known = ~np.isnan(np.array([*rates.values()]).reshape(-1, len(asked))).any(axis=0)
        clusters = (list(compress(keys, known)) for keys in (programs, homes))
        for name, interval in paired_intervals({name: own[known] for name, own in rates.items()}, *clusters).items():
            report.selectors[name].intervals[metric] = interval


def _put_times(
    report: EvaluationReport, selectors: Selectors, asked: Picks, barred: Callable[[slice], Barred]
) -> None:
    """Time a question alone and one in a batch, in ms, for every selector that shows picks.

    Selectors take turns at each question, so that other load on the machine falls on all of them. Each has picked
    before, so what it prepares at its first pick doesn't count.
    """
    timed = {name: selector for name, selector in selectors.items() if getattr(selector, "shows", True)}
    count = len(asked)
    batch = min(LATENCY_BATCH, count)
    sample = np.linspace(0, count - 1, min(LATENCY_QUERIES, count)).astype(int).tolist()
    parts = [*(slice(i, i + 1) for i in sample), slice(batch)]
    times = np.empty((len(parts), LATENCY_ROUNDS, len(timed)))
    for own, part in zip(times, track(parts, "timing selectors"), strict=True):
        excluded = barred(part)
        for turn, (at, selector) in product(range(LATENCY_ROUNDS), enumerate(timed.values())):
            start = time.perf_counter()
            _picked(selector, asked[part], report.k, excluded)
            own[turn, at] = 1000 * (time.perf_counter() - start)
    for name, own in zip(timed, times.min(axis=1).T, strict=True):
        scores = report.selectors[name]
        scores.latency_ms, scores.latency_batch_ms = float(np.median(own[:-1])), float(own[-1] / batch)


# ---------------------------------------------------------------- a language model's answers


@dataclass(frozen=True, slots=True)
class Answerer:
    """A language model, as the harness sees it."""

    # Asks it: prompts, each once → answers, whose `program` is None where they hold none. On BudgetExceeded the
    # comparison continues with what there is, on TooLongError with the next selector; other errors stop it.
    answer: Callable[[Sequence[Request]], Sequence[Answer]]
    name: str  # of the model, for the report
    prompt: Prompt = APPENDIX_D  # how it is asked
    # Of the picks in a prompt, by selector; by default the first pick, the most similar, comes last.
    orders: Mapping[str, str] = field(default_factory=dict)
    queries: int | None = None  # how many queries it is asked, evenly spaced; None: all
    # Scores answers by their results (`rcr_trainer.rewards.execution`), if there is a database.
    execution: Reward | None = None
    # Dollars for these numbers of prompt and completion tokens; None without prices.
    money: Callable[[int, int], float | None] = lambda prompt_tokens, completion_tokens: None

    def chosen(self, count: int) -> np.ndarray:
        """The numbers of the queries it is asked, of `count`, ascending."""
        n = count if self.queries is None else min(self.queries, count)
        return np.arange(n) * count // n

    def answer_all(self, report: EvaluationReport, picks: Picks, spec: ProgramSpec) -> None:
        """Have the picks of all selectors answered, each prompt once, and put scores into report and picks.

        Once a budget is spent, only selectors that are already complete are scored. A selector with prompts too long
        for the model is left out.
        """
        asked = [picks[i] for i in self.chosen(len(picks)).tolist()]
        n, names = len(asked), list(report.selectors)
        logger.info("%d answers for each of %s", n, ", ".join(names))
        given, missing, unpaid = self._answers({name: self._prompts(name, asked) for name in names})
        for name, answers in given.items():
            self._score(report.selectors[name], name, asked, answers, spec)
        report.answers = AnswersAsked(
            self.name,
            n,
            len({each.program for each in asked}),
            missing,
            unpaid,
            self.orders.get(OURS, "reversed"),
            # Whether a gold program runs doesn't depend on the selector.
            sum(any(own.execution is not None for own in each.selectors.values()) for each in asked),
        )
        _put_rates(report, asked, "exact_match", "execution")

    def _prompts(self, name: str, asked: Picks) -> list[Request]:
        order = self.orders.get(name, "reversed")
        shown = [arranged(each.selectors[name].picks, order) for each in asked]
        return [self.prompt.request(e, each.question, each.fields) for e, each in zip(shown, asked, strict=True)]

    def _score(
        self, scores: SelectorScores, name: str, asked: Picks, answers: Sequence[Answer], spec: ProgramSpec
    ) -> None:
        """Put one selector's answers into the picks, and their figures, all but the rates, into its scores."""
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
        scores.jaccard, scores.no_program = 100 * float(jaccard.mean()), 100 * programs.count(None) / n
        scores.prompt_tokens, scores.completion_tokens = read / n, written / n
        scores.cost = None if money is None else 1000 * money / n

    def _answers(self, prompts: Mapping[str, Sequence[Request]]) -> tuple[dict[str, list[Answer]], str, bool]:
        """By selector, an answer for each prompt; why some selectors have none; whether a budget is spent.

        One selector at a time, so that the first ones are complete when a budget is spent.
        """
        given: dict[Request, Answer] = {}
        answers: dict[str, list[Answer]] = {}
        reasons: list[str] = []
        unpaid = False
        for at, (name, own) in enumerate(prompts.items()):
            wanted = [prompt for prompt in dict.fromkeys(own) if prompt not in given]
            try:
                found = list(self.answer(wanted)) if wanted else []
            except TooLongError as error:
                logger.warning("no exact match for %s: %s", name, error)
                reasons.append(str(error))
                continue
            except BudgetExceeded as error:
                logger.warning("no exact match for %s: %s", ", ".join([*prompts][at:]), error)
                reasons.append(str(error))
                unpaid = True
                break
            given.update(zip(wanted, found, strict=True))
            answers[name] = [given[prompt] for prompt in own]
        return answers, "; ".join(dict.fromkeys(reasons)), unpaid
