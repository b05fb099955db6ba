"""The baselines built for one pool, and their trade-offs chosen on development queries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from langchain_rcr.basics.progress import track
from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec
from rcr_trainer import baselines
from rcr_trainer.baselines.base import Baseline, Exclude, Resources, TradeOff
from rcr_trainer.data import Example
from rcr_trainer.data.coverage import recall, structure_matrices
from rcr_trainer.evaluation.report import Choice
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError, UnscoredError

_POOL_QUERIES = 200
"""About as many of the pool's examples stand in for development queries."""


@dataclass(slots=True)
class PlainSelectors:
    """Baselines by name; the other fields are those of the report."""

    selectors: dict[str, Baseline] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    trade_offs: dict[str, Choice] = field(default_factory=dict)
    unpaid: bool = False


def plain_selectors(
    pool: Sequence[Example],
    resources: Resources,
    *,
    dev: Sequence[Example] = (),
    k: int = 4,
    exclude_dev: Exclude = None,
    names: Collection[str] | None = None,
) -> PlainSelectors:
    """Build the baselines for one pool.

    One is left out that lacks a resource, can't load its model or can't learn (the language model scores no texts, or
    its budget is spent).

    Args:
        pool: the candidates.
        resources: what the baselines need. Each embeds the questions of pool and dev again, so `embed` should keep
            their vectors.
        dev: queries on which trade-offs are chosen.
        k: picks that they are chosen for, and that `select_examples` returns.
        exclude_dev: for each dev query, the positions it may not pick.
        names: those to build; None: all. Nothing is spent on the others.
    """
    examples = [{"source": example.source, "target": example.target, **example.fields} for example in pool]
    plain = PlainSelectors()
    wanted = [name for name in baselines.names() if names is None or name in names]
    for name in track(wanted, "preparing plain selectors"):
        baseline = baselines.get_baseline(name)
        if reason := resources.missing(baseline):
            plain.left_out[name] = reason
            continue
        try:
            selector = baseline(examples, k=k, **vars(resources))
            if "score" in baseline.needs:
                selector.pick([], k)  # It learns before it picks.
        except (InputError, UnscoredError, BudgetExceeded, TooLongError) as error:
            plain.left_out[name] = str(error)
            plain.unpaid |= isinstance(error, BudgetExceeded)
            continue
        plain.selectors[name] = selector
        if baseline.trade_off is not None:
            plain.trade_offs[name] = choose(selector, pool, dev, resources.spec, k, exclude=exclude_dev)
    return plain


def choose(
    selector: Baseline,
    pool: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    k: int,
    *,
    exclude: Exclude = None,
) -> Choice:
    """Give a selector the value of its trade-off with the highest coverage on dev; the first of equals.

    Where no dev query counts, the pool's own examples are the queries, each barred from its own question; where the
    pool is too small for that, the selector keeps its value. The arguments are those of `plain_selectors`.
    """
    parameter, grid = cast("TradeOff", selector.trade_off)
    pool_structures, needed = structure_matrices(spec, [e.target for e in pool], [e.target for e in dev])
    queries, chosen_on = dev, "dev"
    kept = np.flatnonzero(np.diff(needed.indptr)).tolist()
    if not kept:
        queries, needed, chosen_on = pool, pool_structures, "pool"
        usable = np.flatnonzero(np.diff(pool_structures.indptr))
        kept = usable[:: max(1, len(usable) // _POOL_QUERIES)].tolist()
        sources = np.array([example.source for example in pool], dtype=object)
        exclude = [np.flatnonzero(sources == source) for source in sources]
    questions = [queries[i].source for i in kept]
    exclude = None if exclude is None else [exclude[i] for i in kept]
    if not kept or (chosen_on == "pool" and k > len(pool) - max(map(len, exclude or []))):
        return Choice(parameter, getattr(selector, parameter), chosen_on="nothing")
    coverage = {}
    for value in grid:
        setattr(selector, parameter, value)
        picks = selector.pick(questions, k, exclude)
        coverage[value] = 100 * float(recall(needed[kept], pool_structures, picks).mean())
    best = max(coverage, key=lambda value: coverage[value])
    setattr(selector, parameter, best)
    return Choice(parameter, best, coverage, len(kept), chosen_on)
