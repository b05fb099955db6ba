"""What the runs of a table ask of the language model, at most, and how long it takes for an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any

from langchain_rcr.policy.prompt import arranged
from rcr_trainer import baselines
from rcr_trainer.evaluation.budget import estimate
from rcr_trainer.llm.cache import Estimate
from rcr_trainer.llm.faults import BudgetExceeded, TooLongError
from rcr_trainer.paper.sweep import Cell
from rcr_trainer.runs.tasks import divide, load_split, open_language_model

_FEW, _MOST = 3, 64
"""Prompts that tell how fast the language model is: at least so many at a time, in all."""


def budget(cells: Sequence[Cell]) -> Estimate | None:
    """What the language model of these runs costs at most; None where none is asked.

    It will be less: kept answers cost nothing, nor do prompts that several runs share.
    """
    asking = (cell.config for cell in cells if cell.variant and cell.config.llm.given)
    costs: list[Estimate] = []
    with ExitStack() as open_models:
        llm = None
        for (data, seed), configs in groupby(asking, lambda config: (config.data, config.seed)):
            split = load_split(data, seed)
            for config in configs:
                task = divide(config, split)
                llm = llm or open_models.enter_context(open_language_model(config, task, keep=False))
                costs += estimate(config, task, llm).values()
    return reduce(add, costs) if costs else None


def pace(cells: Sequence[Cell]) -> float | None:
    """Seconds an answer, by a few of the prompts that these runs ask, whose answers are kept; None: none is asked."""
    asking = (cell.config for cell in cells if cell.variant and cell.config.evaluation.asks(cell.config.llm))
    if (config := next(asking, None)) is None:
        return None
    task, k = divide(config, load_split(config.data, config.seed)), config.k
    plain = (baselines.get_baseline(name) for name in config.evaluation.selectors)
    selector = next((each for each in plain if each.shows and not each.needs), None)
    few, n = max(_FEW, config.llm.concurrency), min(len(task.test), config.evaluation.answer_queries or _MOST)
    asked = [task.test[i * len(task.test) // n] for i in range(n)]
    picks: Any = [range(k)] * n
    if selector is not None:
        pool = [{"source": each.source, "target": each.target} for each in task.pool]
        picks = selector(pool).pick([query.source for query in asked], k)
    shown = [arranged([task.pool[at].item for at in own], "reversed") for own in picks]
    prompts = [config.prompt.request(e, each.source, each.fields) for e, each in zip(shown, asked, strict=True)]
    with open_language_model(config, task) as llm:
        for start in range(0, n, few):
            begun = time.perf_counter()
            try:
                llm.generate(prompts[start : start + few])
            except (BudgetExceeded, TooLongError):
                return None
            if llm.stats.paid:
                return (time.perf_counter() - begun) / llm.stats.paid
    return None
