"""Runs selectors over queries with known gold programs: coverage, duplicates, time, and a language model's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, product
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from langchain_rcr.basics.progress import bar, track
from langchain_rcr.errors import InputError
from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.policy.prompt import Request, arranged
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.data.arrays import row_blocks
from rcr_trainer.data.check import shared
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.metrics import paired_intervals
from rcr_trainer.evaluation.report import OURS, AnswersAsked, EvaluationReport, Kind, Metric, Picked, Picks, Question
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.rewards.ours import correctness, structure_coverage
from rcr_trainer.rewards.reward import Reward, score

logger = logging.getLogger(__name__)

PickFunction: TypeAlias = Callable[[Picks, int, Exclude], np.ndarray]
"""(questions, k, exclude) → (B, k) positions; the picks for k begin those for any larger k."""
Selector: TypeAlias = PickFunction | Baseline
Selectors: TypeAlias = Mapping[str, Selector]

LATENCY_QUERIES = 25
LATENCY_BATCH = 64
LATENCY_ROUNDS = 3  # repetitions of each timed call; the shortest counts
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
    **about: Any,
) -> tuple[EvaluationReport, Picks]:
    """Measure every selector (the trained retriever is `rcr`) on the same queries and pool.

    Queries whose gold program doesn't parse (or has no structure) are left out and counted. Positions refer to the
    pool; those that a query may not pick (`exclude`) are read a block of queries at a time. `about` are further fields
    of the report, `split` and `seed` among them.

    Returns:
        The report, still without a language model's answers (`answer`), and each query that counts with all k picks.

    Raises:
        InputError: k is more than what is left to pick from, `exclude` has another length than the queries, no query
            is left to count, or a selector picks wrongly (too few, outside the pool, excluded, or twice).
    """
    exclude = [()] * len(queries) if exclude is None else exclude
    if len(exclude) != len(queries):
        raise InputError(f"exclude has {len(exclude)} entries for {len(queries)} queries")
    kept = [i for i, query in enumerate(queries) if spec.structures(query.target)]
    if not kept:
        raise InputError(f"none of the {len(queries)} queries has a gold program that parses")
    asked = [queries[i] for i in kept]
    picks = [
        Question(q.id, q.source, q.target, spec.key(q.target), sorted(spec.structures(q.target)), {}, q.fields, q.home)
        for q in asked
    ]

    def barred(part: slice) -> list[np.ndarray]:
        own = [exclude[i] for i in kept[part]]
        return checked_exclude(own, len(own), len(pool), k)

    blocks = [*row_blocks(len(picks), len(pool))]
    with bar("comparing selectors", len(blocks) * len(selectors)) as shown:
        for block in blocks:
            excluded = barred(block)
            for name, selector in selectors.items():
                _put_picks(name, selector, picks[block], pool, k, excluded, spec)
                shown.update()
    report = EvaluationReport.of(picks, k=k, pool_size=len(pool), skipped_queries=len(queries) - len(picks), **about)
    _put_times(report, selectors, picks, barred)
    _put_rates(report, picks, "coverage", "full_coverage")
    report.repeated = len(shared(asked, pool)[0]) if report.part == "test" else 0
    report.advice = advise(report)
    return report, picks


def _picked(selector: Selector, asked: Picks, k: int, excluded: list[np.ndarray]) -> np.ndarray:
    """Positions (B, k)."""
    if isinstance(selector, Baseline):
        return selector.pick([each.question for each in asked], k, excluded, [each.gold for each in asked])
    return np.asarray(selector(asked, k, excluded))


def _put_picks(
    name: str,
    selector: Selector,
    asked: Picks,
    pool: Sequence[Example],
    k: int,
    excluded: list[np.ndarray],
    spec: ProgramSpec,
) -> None:
    """Keep the picks that a selector shows, and which of them cover what."""
    kind: Kind = "trained"
    shows = True
    if isinstance(selector, Baseline):
        kind, shows = "oracle" if selector.oracle else "plain", selector.shows
    positions = _picked(selector, asked, k, excluded)
    if positions.shape[:1] != (len(asked),):
        raise InputError(f"selector {name} gave an array of shape {positions.shape}, not ({len(asked)}, {k})")
    for question, own, barred in zip(asked, positions, excluded, strict=True):
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
    report: EvaluationReport, selectors: Selectors, asked: Picks, barred: Callable[[slice], list[np.ndarray]]
) -> None:
    """Time a question alone and one in a batch, in ms, for every selector that shows picks.

    Selectors take turns at each question, so that other load on the machine falls on all of them. Each has picked
    before, so what it prepares at its first pick doesn't count. A question's encoding counts: a space makes it one
    whose vector nobody has kept.
    """
    asked = [replace(each, question=f"{each.question} ") for each in asked]
    timed = {name: selector for name, selector in selectors.items() if getattr(selector, "shows", True)}
    count = len(asked)
    batch = min(LATENCY_BATCH, count)
    parts = [*(slice(at, at + 1) for at in spread(count, LATENCY_QUERIES)), slice(batch)]
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


def answer(
    report: EvaluationReport,
    picks: Picks,
    spec: ProgramSpec,
    llm: LanguageModel,
    *,
    orders: Mapping[str, str] = MappingProxyType({}),
    queries: int | None = None,
    execution: Reward | None = None,
) -> None:
    """Ask a language model with the picks of all selectors, and put its answers into report and picks.

    Each prompt is asked once, one selector after the other, so that the first ones are complete when a budget is spent.
    A selector most of whose prompts are too long for the model is left out.

    Prompts show the first pick, the most similar, last, unless `orders` says otherwise for a selector. `queries` is how
    many queries are asked, evenly spaced (None: all). `execution` scores answers by their results, if there is a
    database.

    Raises:
        LLMError: it can't be asked. A spent budget or too long a prompt is no error.
    """
    asked, names = [picks[at] for at in spread(len(picks), queries)], list(report.selectors)
    golds = [Example(each.id, each.question, each.gold, each.fields) for each in asked]
    rewards = [correctness(spec), structure_coverage(spec), *([execution] if execution else [])]
    logger.info("%d answers for each of %s", len(asked), ", ".join(names))
    given: dict[Request, Answer] = {}
    reasons: dict[str, None] = {}
    unpaid = False
    for at, name in enumerate(names):
        shown = [arranged(each.selectors[name].picks, orders.get(name, "reversed")) for each in asked]
        prompts = [llm.prompt.request(e, each.question, each.fields) for e, each in zip(shown, asked, strict=True)]
        wanted = [own for own in dict.fromkeys(prompts) if own not in given]
        try:
            given |= zip(wanted, llm.generate(wanted) if wanted else (), strict=True)
            long = [given[own].reason for own in prompts].count("too_long")
            if 2 * long > len(prompts):
                raise TooLongError(f"{long} of {len(prompts)} prompts are longer than the model reads")
        except (BudgetExceeded, TooLongError) as error:
            reasons[str(error)] = None
            unpaid = isinstance(error, BudgetExceeded)
            logger.warning("no exact match for %s: %s", ", ".join(names[at:] if unpaid else [name]), error)
            if unpaid:
                break
            continue
        scores, answers = report.selectors[name], [given[own] for own in prompts]
        rows, programs = [each.selectors[name] for each in asked], [each.program for each in answers]
        exact, jaccard, *same = (score(each, programs, golds, [row.picks for row in rows]) for each in rewards)
        for i, row in enumerate(rows):
            row.answer, row.exact, row.jaccard = programs[i], bool(exact[i]), round(float(jaccard[i]), 4)
            row.execution = bool(same[0][i]) if same and np.isfinite(same[0][i]) else None
        scores.jaccard, scores.no_program = 100 * float(jaccard.mean()), 100 * programs.count(None) / len(asked)
        read, written = (sum(getattr(a, kind) for a in answers) for kind in ("prompt_tokens", "completion_tokens"))
        scores.prompt_tokens, scores.completion_tokens = read / len(asked), written / len(asked)
        cost = llm.money(read, written)
        scores.cost = None if cost is None else 1000 * cost / len(asked)
    # Whether a gold program runs doesn't depend on the selector.
    told = sum(any(own.execution is not None for own in each.selectors.values()) for each in asked)
    different, order = len({each.program for each in asked}), orders.get(OURS, "reversed")
    report.answers = AnswersAsked(llm.name, len(asked), different, "; ".join(reasons), unpaid, order, told)
    _put_rates(report, asked, "exact_match", "execution")
    report.advice = advise(report)


def spread(count: int, most: int | None) -> list[int]:
    """`most` of these many numbers, evenly spaced, ascending; None: all of them."""
    n = count if most is None else min(most, count)
    return [at * count // n for at in range(n)]
