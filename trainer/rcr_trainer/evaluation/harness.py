"""Runs selectors over queries with known gold programs: coverage, duplicates, time, and a language model's answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import sparse

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.programs.structures import is_label
from langchain_rcr.progress import track
from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.coverage import PoolStructures, checked_exclude, program_groups, recall_by_step
from rcr_trainer.data import Example, shared
from rcr_trainer.evaluation.advice import advise
from rcr_trainer.evaluation.exact_match import Answerer
from rcr_trainer.evaluation.intervals import paired_intervals
from rcr_trainer.evaluation.metrics import (
    duplicates_by_step,
    hub_share,
    percent_by_step,
    shown_of,
    specificity,
    weighted_recall,
    within_pool,
)
from rcr_trainer.evaluation.picks import Picks, rows_of
from rcr_trainer.evaluation.report import Choice, EvaluationReport, Gold, Kind, Metric, SelectorScores

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
    split: str,
    seed: int,
    part: str = "test",
    exclude: Exclude = None,
    gold: Gold = "all",
    left_out: Mapping[str, str] | None = None,
    trade_offs: Mapping[str, Choice] | None = None,
    answerer: Answerer | None = None,
    keep: Callable[[EvaluationReport, Picks], None] | None = None,
) -> EvaluationReport:
    """Measure every selector on the same queries and pool.

    Queries whose gold program doesn't parse (or has no structure) are left out and counted.

    Args:
        selectors: by name; the trained retriever is called `rcr`.
        pool: the candidates that positions refer to.
        queries: with their gold programs.
        spec: how programs are read.
        k: picks that the headline figures are for.
        steps: picks that the curves go to; at least k, at most what every query has to pick from.
        split: name of the data split, for the report.
        seed: of the run, for the report.
        part: which of the split's queries these are, for the report.
        exclude: per query, the positions it may not pick.
        gold: "pool" counts of each gold program only the structures that some candidate has, excluded ones included;
            queries that have none are left out and counted.
        left_out: selectors that could not be run, with the reason.
        trade_offs: how those of the selectors were chosen that have one.
        answerer: a language model that is asked with each selector's k picks, after everything else is measured.
        keep: given the report and the k picks before the model is asked, so that what is measured isn't lost with it,
            and again once it has answered.

    Raises:
        InputError: k is more than what is left to pick from, no query is left to count, or a selector breaks its word
            (a wrong shape, a position outside the pool, excluded, or picked twice).
        LLMError: what the answerer raises, save for BudgetExceeded, which leaves selectors without answers.
    """
    from langchain_rcr.policy import library_versions

    excluded = checked_exclude(exclude, len(queries), len(pool), k)
    structures = PoolStructures(spec, [example.target for example in [*pool, *queries]])
    candidates, needed = structures.matrix[: len(pool)], structures.matrix[len(pool) :]
    parsed = int(np.count_nonzero(np.diff(needed.indptr)))
    present = within_pool(needed, candidates)
    if gold == "pool":
        needed = present
    kept = np.flatnonzero(np.diff(needed.indptr)).tolist()
    if not kept:
        why = " and shares a structure with the pool" if parsed else ""
        raise InputError(f"none of the {len(queries)} queries has a gold program that parses{why}")
    excluded, counted = [excluded[i] for i in kept], [queries[i] for i in kept]
    steps = min(max(steps, k), len(pool) - max(entry.size for entry in excluded))
    task = _Task(
        questions=[query.source for query in counted],
        references=[query.target for query in counted],
        excluded=excluded,
        gold=needed[kept],
        present=present[kept],
        pool=candidates,
        rarity=specificity(candidates),
        labels=np.array([is_label(name) for name in structures.names], dtype=np.float64),
        lengths=np.array([len(example.source) + len(example.target) for example in pool]),
        programs=program_groups(spec, [example.target for example in pool]),
    )
    named = track(list(selectors.items()), "comparing selectors")
    measured = {name: task.measure(name, selector, k, steps) for name, selector in named}
    alone, together = task.time_all(selectors, k)
    for name, (scores, _, _) in measured.items():
        scores.latency_ms, scores.latency_batch_ms = alone[name], together[name]
    programs = [spec.key(query.target) for query in counted]
    for metric in _COMPARED:
        rates = {name: by_metric[metric] for name, (_, _, by_metric) in measured.items()}
        for name, interval in paired_intervals(rates, programs).items():
            measured[name][0].intervals[metric] = interval
    report = EvaluationReport(
        k=k,
        n=len(kept),
        programs=len(set(programs)),
        split=split,
        seed=seed,
        selectors={name: scores for name, (scores, _, _) in measured.items()},
        steps=steps,
        pool_size=len(pool),
        part=part,
        skipped_queries=len(queries) - parsed,
        gold=gold,
        none_in_pool=parsed - len(kept),
        left_out=dict(left_out or {}),
        trade_offs=dict(trade_offs or {}),
        repeated=len(shared(counted, pool)[0]) if part == "test" else 0,
        versions=library_versions(),
    )
    report.advice = advise(report)
    picks = {
        name: rows_of(
            name,
            scores.kind,
            positions[:, :k],
            pool=pool,
            queries=counted,
            programs=programs,
            gold=task.gold,
            pool_structures=candidates,
            names=structures.names,
        )
        for name, (scores, positions, _) in measured.items()
    }
    if keep is not None:
        keep(report, picks)
    if answerer is not None:
        report = deepcopy(report)  # the one that was kept stays as it is
        answerer.answer_all(report, picks, spec)
        report.advice = advise(report)
        if keep is not None:
            keep(report, picks)
    return report


_COMPARED: tuple[Metric, ...] = ("coverage", "full_coverage", "specific_coverage")


@dataclass(frozen=True, slots=True)
class _Task:
    """The B queries that count, and what picks from the pool of N are scored with; S structures.

    Args:
        questions: their texts.
        references: their gold programs.
        excluded: for each, the positions that it may not pick.
        gold: (B, S) the structures that count.
        present: (B, S) those of the gold programs that the pool has.
        pool: (N, S).
        rarity: (S,) the weights of specific coverage.
        labels: (S,) 1 for a single node, else 0.
        lengths: (N,) characters of question and program.
        programs: (N,) equal numbers for the same program.
    """

    questions: list[str]
    references: list[str]
    excluded: list[np.ndarray]
    gold: sparse.csr_array
    present: sparse.csr_array
    pool: sparse.csr_array
    rarity: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    programs: np.ndarray

    def measure(
        self, name: str, selector: PickFunction | Baseline, k: int, steps: int
    ) -> tuple[SelectorScores, np.ndarray, dict[Metric, np.ndarray]]:
        """Figures, the picks (B, steps) they are of, and by metric the rates (B,) of the first k, from 0 to 1."""
        kind: Kind = "trained"
        if isinstance(selector, Baseline):
            kind = "oracle" if selector.oracle else "plain"
        positions = self.pick(selector, slice(None), steps)
        self.check(name, positions, steps)
        picks = positions[:, :k]
        recall = recall_by_step(self.gold, self.pool, positions)
        shown = shown_of(self.present, self.pool, picks)
        specific = weighted_recall(self.present, shown, self.rarity)
        coverage, full = percent_by_step(recall), percent_by_step(recall == 1)
        duplicates = duplicates_by_step(self.programs, positions)
        scores = SelectorScores(
            kind=kind,
            coverage=float(coverage[k - 1]),
            full_coverage=float(full[k - 1]),
            specific_coverage=100 * float(specific.mean()),
            label_complete=100 * float((weighted_recall(self.present, shown, self.labels) == 1).mean()),
            duplicate_rate=float(duplicates[k - 1]),
            hub_share=hub_share(picks),
            prompt_length=float(self.lengths[picks].sum(axis=1).mean()),
            latency_ms=math.nan,  # see `time_all`
            latency_batch_ms=math.nan,
            coverage_by_step=coverage.tolist(),
            full_coverage_by_step=full.tolist(),
            duplicate_rate_by_step=duplicates.tolist(),
        )
        last = recall[:, k - 1]
        return scores, positions, {"coverage": last, "full_coverage": 1.0 * (last == 1), "specific_coverage": specific}

    def pick(self, selector: PickFunction | Baseline, part: slice, k: int) -> np.ndarray:
        pick = selector.pick if isinstance(selector, Baseline) else selector
        return np.asarray(pick(self.questions[part], k, self.excluded[part], self.references[part]))

    def time_all(
        self, selectors: Mapping[str, PickFunction | Baseline], k: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """By selector, milliseconds of a question alone, and of one among many together.

        Every selector takes its turn at each question, so that what else the machine does falls on all of them. Each
        has picked before: what it prepares at its first pick doesn't count.
        """
        count = len(self.questions)
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
        alone = {name: float(np.median(own[:-1])) for name, own in shortest.items()}
        return alone, {name: own[-1] / batch for name, own in shortest.items()}

    def check(self, name: str, positions: np.ndarray, steps: int) -> None:
        """A selector that repeats itself or picks what is excluded would be measured for something else."""
        expected = (len(self.questions), steps)
        if positions.shape != expected or not np.issubdtype(positions.dtype, np.integer):
            raise InputError(
                f"selector {name} gave {positions.dtype} of shape {positions.shape}, not positions of shape {expected}"
            )
        if positions.min() < 0 or positions.max() >= self.pool.shape[0]:
            raise InputError(f"selector {name} picked a position outside the pool of {self.pool.shape[0]}")
        ordered = np.sort(positions, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise InputError(f"selector {name} picked the same position twice for one query")
        for query, entry in enumerate(self.excluded):
            if np.isin(positions[query], entry).any():
                raise InputError(f"selector {name} picked an excluded position for {self.questions[query]!r:.80}")
