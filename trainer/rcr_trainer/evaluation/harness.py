"""Runs selectors over queries with known gold programs: coverage, duplicates, time, and a language model's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
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

LATENCY_QUERIES = 25
LATENCY_BATCH = 64
LATENCY_ROUNDS = 3
"""Repetitions of each timed call; the shortest counts."""
Rates: TypeAlias = Mapping[Metric, np.ndarray]
"""By metric, each question's rate, (B,), from 0 to 1; NaN where it is unknown."""


def evaluate(
    selectors: Mapping[str, PickFunction | Baseline],
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
        exclude: for each query, the positions it may not pick.
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
    task = _Task(pool, queries, spec, checked_exclude(exclude, len(queries), len(pool), k))
    scores: dict[str, SelectorScores] = {}
    rates: dict[str, Rates] = {}
    for name, selector in track(list(selectors.items()), "comparing selectors"):
        scores[name], rates[name] = task.measure(name, selector, k)
    task.time_all(selectors, k, scores)
    programs = [each.program for each in task.picks]
    _put_intervals(scores, rates, programs, [each.home for each in task.picks])
    report = EvaluationReport(
        k=k,
        n=len(task.queries),
        programs=len(set(programs)),
        selectors=scores,
        pool_size=len(pool),
        skipped_queries=len(queries) - len(task.queries),
        versions=library_versions(),
        **about,
    )
    report.repeated = len(shared(task.queries, pool)[0]) if report.part == "test" else 0
    report.advice = advise(report)
    keep(report, task.picks)
    if answerer is not None:
        report = deepcopy(report)  # `keep` has the first one
        answerer.answer_all(report, task.picks, spec)
        report.advice = advise(report)
        keep(report, task.picks)
    return report


def _put_intervals(
    scores: Mapping[str, SelectorScores], rates: Mapping[str, Rates], programs: Sequence[str], homes: Sequence[str]
) -> None:
    """Put the interval of each metric into the scores, over the questions for which every selector's rate is told."""
    for metric in next(iter(rates.values()), ()):
        own = {name: each[metric] for name, each in rates.items()}
        told = ~np.isnan(np.array([*own.values()])).any(axis=0)
        clusters = (list(compress(keys, told)) for keys in (programs, homes))
        for name, interval in paired_intervals({name: each[told] for name, each in own.items()}, *clusters).items():
            scores[name].intervals[metric] = interval


class _Task:
    """The B queries that count, and what selectors pick for them from the pool, without answers yet (`picks`)."""

    def __init__(
        self, pool: Sequence[Example], queries: Sequence[Example], spec: ProgramSpec, excluded: list[np.ndarray]
    ) -> None:
        self.pool, self.structures = pool, (structures := cache(spec.structures))
        kept = [i for i, query in enumerate(queries) if structures(query.target)]
        if not kept:
            raise InputError(f"none of the {len(queries)} queries has a gold program that parses")
        self.queries, self.excluded = [queries[i] for i in kept], [excluded[i] for i in kept]
        self.picks = [
            Question(q.id, q.source, q.target, spec.key(q.target), sorted(structures(q.target)), {}, q.fields, q.home)
            for q in self.queries
        ]

    def measure(self, name: str, selector: PickFunction | Baseline, k: int) -> tuple[SelectorScores, Rates]:
        """Keep the picks that a selector shows; returns its figures, and what they cover."""
        kind: Kind = "trained"
        shown = k
        if isinstance(selector, Baseline):
            kind = "oracle" if selector.oracle else "plain"
            shown = k if selector.shows else 0
        found = []
        positions = self.pick(selector, slice(None), k)
        for question, own, barred in zip(self.picks, positions, self.excluded, strict=True):
            # The figures of a selector that repeats picks or picks what is excluded would mean something else.
            sound = np.setdiff1d(own, barred)
            if len(sound) != k or sound[0] < 0 or sound[-1] >= len(self.pool):
                raise InputError(
                    f"selector {name} picked {own.tolist()} for {question.question!r:.80}, not {k} positions of "
                    f"{len(self.pool)}, each once and none of those excluded"
                )
            picked, first = [self.pool[position] for position in own[:shown]], dict[str, int]()
            for step, example in enumerate(picked, 1):
                first |= dict.fromkeys(self.structures(example.target) - first.keys(), step)
            found.append(Picked(kind, picked, [first.get(each, 0) for each in question.structures]))
            question.selectors[name] = found[-1]
        covered = np.array([np.count_nonzero(each.covered) / len(each.covered) for each in found])
        full = 1.0 * (covered == 1)
        scores = SelectorScores(
            kind=kind,
            coverage=100 * float(covered.mean()),
            full_coverage=100 * float(full.mean()),
            prompt_length=float(np.mean([sum(len(e.source) + len(e.target) for e in each.picks) for each in found])),
            latency_ms=0.0,  # see `time_all`
            latency_batch_ms=0.0,
        )
        return scores, {"coverage": covered, "full_coverage": full}

    def pick(self, selector: PickFunction | Baseline, part: slice, k: int) -> np.ndarray:
        pick = selector.pick if isinstance(selector, Baseline) else selector
        own = self.queries[part]
        questions, references = [query.source for query in own], [query.target for query in own]
        return np.asarray(pick(questions, k, self.excluded[part], references))

    def time_all(
        self, selectors: Mapping[str, PickFunction | Baseline], k: int, scores: Mapping[str, SelectorScores]
    ) -> None:
        """Time a question alone and one in a batch, in ms, for every selector that shows picks; put it into the scores.

        Selectors take turns at each question, so that other load on the machine falls on all of them. Each has picked
        before, so what it prepares at its first pick doesn't count.
        """
        timed = {name: selector for name, selector in selectors.items() if getattr(selector, "shows", True)}
        count = len(self.queries)
        batch = min(LATENCY_BATCH, count)
        sample = np.linspace(0, count - 1, min(LATENCY_QUERIES, count)).astype(int).tolist()
        parts = [*(slice(i, i + 1) for i in sample), slice(batch)]
        times = np.empty((len(parts), LATENCY_ROUNDS, len(timed)))
        for own, part in zip(times, track(parts, "timing selectors"), strict=True):
            for turn, (at, selector) in product(range(LATENCY_ROUNDS), enumerate(timed.values())):
                start = time.perf_counter()
                self.pick(selector, part, k)
                own[turn, at] = 1000 * (time.perf_counter() - start)
        for name, own in zip(timed, times.min(axis=1).T, strict=True):
            scores[name].latency_ms, scores[name].latency_batch_ms = float(np.median(own[:-1])), float(own[-1] / batch)


# ---------------------------------------------------------------- a language model's answers


@dataclass(frozen=True, slots=True)
class Answerer:
    """A language model, as the harness sees it.

    Args:
        answer: asks it: prompts, each once → answers, whose `program` is None where they hold none. On BudgetExceeded
            the comparison continues with what there is, on TooLongError with the next selector; other errors stop it.
        name: of the model, for the report.
        prompt: how it is asked.
        orders: of the picks in a prompt, by selector; by default the first pick, the most similar, comes last.
        queries: how many queries it is asked, evenly spaced; None: all.
        execution: scores answers by their results (`rcr_trainer.rewards.execution`), if there is a database.
        money: dollars for these numbers of prompt and completion tokens; None without prices.
    """

    answer: Callable[[Sequence[Request]], Sequence[Answer]]
    name: str
    prompt: Prompt = APPENDIX_D
    orders: Mapping[str, str] = field(default_factory=dict)
    queries: int | None = None
    execution: Reward | None = None
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
        n, names, programs = len(asked), list(picks[0].selectors), [each.program for each in asked]
        logger.info("%d answers for each of %s", n, ", ".join(names))
        given, missing, unpaid = self._answers({name: self._prompts(name, asked) for name in names})
        report.answers = AnswersAsked(
            self.name, n, len(set(programs)), missing, unpaid, self.orders.get(OURS, "reversed")
        )
        rates = {name: self._score(report.selectors[name], name, asked, own, spec) for name, own in given.items()}
        report.answers.told = max((int((~np.isnan(each["execution"])).sum()) for each in rates.values()), default=0)
        _put_intervals(report.selectors, rates, programs, [each.home for each in asked])

    def _prompts(self, name: str, asked: Picks) -> list[Request]:
        order = self.orders.get(name, "reversed")
        shown = [arranged(each.selectors[name].picks, order) for each in asked]
        return [self.prompt.request(e, each.question, each.fields) for e, each in zip(shown, asked, strict=True)]

    def _score(
        self, scores: SelectorScores, name: str, asked: Picks, answers: Sequence[Answer], spec: ProgramSpec
    ) -> Rates:
        """Put the figures of one selector's answers into its scores and picks."""
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
        # Whether a gold program runs doesn't depend on the selector.
        return {"exact_match": exact, "execution": same}

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
