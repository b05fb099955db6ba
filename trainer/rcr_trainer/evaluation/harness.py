"""Runs selectors over queries with known gold programs: coverage, duplicates, time, and a language model's answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse

from langchain_rcr.basics.progress import track
from langchain_rcr.errors import InputError
from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.programs import ProgramSpec, implied_values
from langchain_rcr.programs.structures import is_label
from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.data import Example, shared
from rcr_trainer.data.coverage import PoolStructures, program_groups, recall_by_step
from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.exact_match import Answerer
from rcr_trainer.evaluation.metrics import (
    duplicate_rate,
    hub_share,
    paired_intervals,
    shown_of,
    specificity,
    weighted_recall,
    within_pool,
)
from rcr_trainer.evaluation.report import EvaluationReport, Gold, Kind, Metric, Picked, Picks, Question, SelectorScores

PickFunction: TypeAlias = Callable[[Sequence[str], int, Exclude, Sequence[str] | None], np.ndarray]
"""(queries, k, exclude, references) → (B, k) positions; the picks for k begin those for any larger k."""

LATENCY_QUERIES = 25
LATENCY_BATCH = 64
LATENCY_ROUNDS = 3
"""Times that each of these calls is made; the shortest counts."""


def evaluate(
    selectors: Mapping[str, PickFunction | Baseline],
    pool: Sequence[Example],
    queries: Sequence[Example],
    spec: ProgramSpec,
    *,
    k: int = 4,
    steps: int = 8,
    exclude: Exclude = None,
    gold: Gold = "all",
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
        k: picks that the headline figures are for.
        steps: picks that the curves go to; at least k, at most what every query has to pick from.
        exclude: for each query, the positions it may not pick.
        gold: with "pool" only the structures that some candidate has count, excluded ones included; queries that have
            none are left out and counted.
        answerer: a language model that is asked with each selector's k picks, once everything else is measured.
        keep: given the report and the k picks before the model is asked, so that nothing is lost with it, and again
            once it has answered.
        **about: fields of the report that only the caller knows.

    Raises:
        InputError: k is more than what is left to pick from, no query is left to count, or a selector picks wrongly
            (too few, outside the pool, excluded, or twice).
        LLMError: the language model can't be asked. A spent budget and prompts that are too long only leave selectors
            without answers.
    """
    from langchain_rcr.policy.triencoder import library_versions

    task = _Task(pool, queries, spec, checked_exclude(exclude, len(queries), len(pool), k), gold)
    steps = min(max(steps, k), len(pool) - max(entry.size for entry in task.excluded))
    named = track(list(selectors.items()), "comparing selectors")
    measured = {name: task.measure(name, selector, k, steps) for name, selector in named}
    task.time_all(selectors, k, {name: each.scores for name, each in measured.items()})
    for metric in _COMPARED:
        rates = {name: each.rates[metric] for name, each in measured.items()}
        for name, interval in paired_intervals(rates, task.programs).items():
            measured[name].scores.intervals[metric] = interval
    report = EvaluationReport(
        k=k,
        n=len(task.queries),
        programs=len(set(task.programs)),
        selectors={name: each.scores for name, each in measured.items()},
        steps=steps,
        pool_size=len(pool),
        skipped_queries=len(queries) - task.parsed,
        gold=gold,
        none_in_pool=task.parsed - len(task.queries),
        versions=library_versions(),
        **about,
    )
    report.repeated = len(shared(task.queries, pool)[0]) if report.part == "test" else 0
    report.advice = advise(report)
    picks = task.picks(measured, k)
    keep(report, picks)
    if answerer is not None:
        report = deepcopy(report)  # the one that was kept stays as it is
        answerer.answer_all(report, picks, spec)
        report.advice = advise(report)
        keep(report, picks)
    return report


_COMPARED: tuple[Metric, ...] = ("coverage", "full_coverage", "specific_coverage")


@dataclass(frozen=True, slots=True)
class _Measured:
    """A selector's figures, the picks that it shows (B, steps), and by metric the rates (B,) of k, from 0 to 1."""

    scores: SelectorScores
    positions: np.ndarray
    rates: dict[Metric, np.ndarray]


class _Task:
    """The B queries that count, and what picks from the pool of N are scored with; S structures.

    Args:
        pool: the candidates.
        queries: with their gold programs; those that don't count are left out.
        spec: how programs are read.
        excluded: for each query, the positions that it may not pick.
        gold: which structures count.
    """

    def __init__(
        self,
        pool: Sequence[Example],
        queries: Sequence[Example],
        spec: ProgramSpec,
        excluded: list[np.ndarray],
        gold: Gold,
    ) -> None:
        structures = PoolStructures(spec, [example.target for example in [*pool, *queries]])
        self.names = structures.names
        self.pool, needed = structures.matrix[: len(pool)], structures.matrix[len(pool) :]
        self.parsed, present = int(np.count_nonzero(np.diff(needed.indptr))), within_pool(needed, self.pool)
        if gold == "pool":
            needed = present
        kept = np.flatnonzero(np.diff(needed.indptr)).tolist()
        if not kept:
            why = " and shares a structure with the pool" if self.parsed else ""
            raise InputError(f"none of the {len(queries)} queries has a gold program that parses{why}")
        self.examples, self.queries = pool, [queries[i] for i in kept]
        self.programs = [spec.key(query.target) for query in self.queries]
        self.excluded = [excluded[i] for i in kept]
        self.gold, self.present = needed[kept], present[kept]  # (B, S): what counts, and what the pool has
        self.groups = program_groups(spec, [example.target for example in pool])
        self.implied = _implied(spec, pool, self.queries)

    def measure(self, name: str, selector: PickFunction | Baseline, k: int, steps: int) -> _Measured:
        """What a selector picks, and what that covers."""
        kind: Kind = "trained"
        if isinstance(selector, Baseline):
            kind = "oracle" if selector.oracle else "plain"
        positions = self.pick(selector, slice(None), steps)
        self.check(name, positions, steps)
        recall = recall_by_step(self.gold, self.pool, positions)
        if isinstance(selector, Baseline) and not selector.shows:
            positions, recall = positions[:, :0], np.zeros_like(recall)
        picks = positions[:, :k]
        shown = shown_of(self.present, self.pool, picks)
        specific = weighted_recall(self.present, shown, specificity(self.pool))
        labels = weighted_recall(self.present, shown, np.array([float(is_label(each)) for each in self.names]))
        values = weighted_recall(self.implied[0], shown_of(*self.implied, picks), np.ones(self.implied[0].shape[1]))
        implied = np.diff(self.implied[0].indptr) > 0
        lengths = np.array([len(example.source) + len(example.target) for example in self.examples])
        coverage, last = 100 * recall.mean(axis=0), recall[:, k - 1]
        scores = SelectorScores(
            kind=kind,
            coverage=float(coverage[k - 1]),
            full_coverage=100 * float((last == 1).mean()),
            specific_coverage=100 * float(specific.mean()),
            label_complete=100 * float((labels == 1).mean()),
            implied_shown=100 * float((values[implied] == 1).mean()) if implied.any() else None,
            duplicate_rate=duplicate_rate(self.groups, picks),
            hub_share=hub_share(picks) if len(self.examples) >= 100 else None,  # of few examples ten are many
            prompt_length=float(lengths[picks].sum(axis=1).mean()),
            latency_ms=math.nan,  # see `time_all`
            latency_batch_ms=math.nan,
            coverage_by_step=coverage.tolist(),
        )
        rates: dict[Metric, np.ndarray] = {"coverage": last, "full_coverage": 1.0 * (last == 1)}
        return _Measured(scores, positions, {**rates, "specific_coverage": specific})

    def picks(self, measured: Mapping[str, _Measured], k: int) -> list[Question]:
        """The first k picks of all selectors, not answered yet, as picks.jsonl has them."""
        found = []
        for i, (query, program) in enumerate(zip(self.queries, self.programs, strict=True)):
            needed = sorted(self.gold.indices[self.gold.indptr[i] : self.gold.indptr[i + 1]].tolist())
            about = (query.id, query.source, query.target, program, [self.names[j] for j in needed])
            found.append(Question(*about, {}, query.fields))
        for name, each in measured.items():
            positions = each.positions[:, :k]
            # How many of the beginnings of the picks show each structure: all k of them if the first pick has it.
            shown = [shown_of(self.gold, self.pool, positions[:, : t + 1]) for t in range(k)]
            times = sparse.csr_array(sum(shown[1:], shown[0]))
            for i, question in enumerate(found):
                own = slice(times.indptr[i], times.indptr[i + 1])
                count = {self.names[j]: int(n) for j, n in zip(times.indices[own], times.data[own], strict=True)}
                covered = [k + 1 - count[structure] if structure in count else 0 for structure in question.structures]
                picks = [self.examples[position] for position in positions[i].tolist()]
                question.selectors[name] = Picked(each.scores.kind, picks, covered)
        return found

    def pick(self, selector: PickFunction | Baseline, part: slice, k: int) -> np.ndarray:
        pick = selector.pick if isinstance(selector, Baseline) else selector
        own = self.queries[part]
        questions, references = [query.source for query in own], [query.target for query in own]
        return np.asarray(pick(questions, k, self.excluded[part], references))

    def time_all(
        self, selectors: Mapping[str, PickFunction | Baseline], k: int, scores: Mapping[str, SelectorScores]
    ) -> None:
        """Put into the scores the milliseconds of a question alone, and of one among many together.

        Selectors take turns at each question, so that what else the machine does falls on all of them. Each has picked
        before, so what it prepares at its first pick doesn't count.
        """
        count = len(self.queries)
        batch = min(LATENCY_BATCH, count)
        sample = np.linspace(0, count - 1, min(LATENCY_QUERIES, count)).astype(int).tolist()
        shortest: dict[str, list[float]] = {name: [] for name in selectors}
        for part in track([*(slice(i, i + 1) for i in sample), slice(batch)], "timing selectors"):
            times: dict[str, list[float]] = {name: [] for name in selectors}
            for _ in range(LATENCY_ROUNDS):
                for name, selector in selectors.items():
                    start = time.perf_counter()
                    self.pick(selector, part, k)
                    times[name].append(1000 * (time.perf_counter() - start))
            for name, own in times.items():
                shortest[name].append(min(own))
        for name, own in shortest.items():
            scores[name].latency_ms, scores[name].latency_batch_ms = float(np.median(own[:-1])), own[-1] / batch

    def check(self, name: str, positions: np.ndarray, steps: int) -> None:
        """A selector that repeats itself or picks what is excluded would be measured for something else."""
        for query, picks, barred in zip(self.queries, positions, self.excluded, strict=True):
            sound = np.setdiff1d(picks, barred)
            if len(sound) != steps or sound[0] < 0 or sound[-1] >= self.pool.shape[0]:
                raise InputError(
                    f"selector {name} picked {picks.tolist()} for {query.source!r:.80}, not {steps} positions of "
                    f"{self.pool.shape[0]}, each once and none of those excluded"
                )


def _implied(
    spec: ProgramSpec, pool: Sequence[Example], queries: Sequence[Example]
) -> tuple[sparse.csr_array, sparse.csr_array]:
    """(B, V) and (N, V) which of the values that the pool's questions imply each gold program and candidate has."""
    values = implied_values([(example.source, example.target) for example in pool], spec)
    labels = PoolStructures(replace(spec, implied=values, max_size=1), [example.target for example in pool])
    own = np.flatnonzero(np.isin(labels.names, values))
    return labels.rows([query.target for query in queries])[:, own], labels.matrix[:, own]
