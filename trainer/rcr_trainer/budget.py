"""What a run would work on, and what its language model would cost at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING

from langchain_rcr.policy.prompt import Request
from rcr_trainer.pipeline import load_checked
from rcr_trainer.settings import Settings
from rcr_trainer.tasks import Task, build_reward, open_language_model

if TYPE_CHECKING:
    from rcr_trainer.data import Example
    from rcr_trainer.llm.cache import Estimate
    from rcr_trainer.llm.model import LanguageModel


def plan(config: Settings) -> list[str]:
    """What a run would work on, and what its language model would cost at most, a line each. Nothing is asked.

    Raises:
        RCRError: as `load_checked`.
    """
    from rcr_trainer.evaluation.resources import count_selectors, texts_at_most

    _, task = load_checked(config)
    lines = [f"pool {len(task.pool)}, training {len(task.queries)}, dev {len(task.dev)}, test {len(task.test)}"]
    if config.grpo.enabled:
        lines.append(f"GRPO: {len(task.reinforced)} queries, reward {'+'.join(config.reward.names)}")
    evaluation = config.evaluation
    if evaluation.asks(config.llm):
        held_out, selectors = task.held_out(evaluation.split), count_selectors(config)
        asked = min(len(held_out), evaluation.answer_queries or len(held_out))
        lines.append(f"evaluation: {asked} {evaluation.split} queries, answered with {selectors} selectors' picks")
    if texts := texts_at_most(config, task):
        lines.append(f"baselines: at most {texts:,} texts scored, to learn from")
    if (cost := estimate(config, task)) is not None:
        return [*lines, f"language model: {cost}"]
    return [*lines, "no language model is asked"] if config.grpo.enabled else lines


def estimate(config: Settings, task: Task, llm: LanguageModel | None = None) -> Estimate | None:
    """What the language model of a run costs at most; None where none is asked.

    Args:
        config: of the run.
        task: its data.
        llm: the language model, if it is open; else it is opened.

    Raises:
        ConfigError: the language model can't be opened.
    """
    asked = list(_asked(config, task))
    calls = sum(count for count, _, _ in asked)
    if not calls:
        return None
    shown, queries = max(k for _, k, _ in asked), [query for _, _, own in asked for query in own]
    with nullcontext(llm) if llm is not None else open_language_model(config, task, keep=False) as model:
        return model.estimate_calls(calls, longest_prompt(model, task.pool, queries, shown))


def _asked(config: Settings, task: Task) -> Iterator[tuple[int, int, Sequence[Example]]]:
    """Who asks the language model: how often at most, with how many examples in a prompt, about which queries."""
    from rcr_trainer.evaluation.resources import count_selectors, texts_at_most

    grpo, evaluation = config.grpo, config.evaluation
    if grpo.enabled and build_reward(config, task.spec).needs_llm:
        from langchain_rcr.families import get_family
        from rcr_trainer.grpo import calls_at_most

        races = bool(get_family(config.model.family).changes)
        calls = calls_at_most(grpo, len(task.reinforced), len(task.dev), races=races)
        yield calls, grpo.k, [*task.reinforced, *task.dev]
    if evaluation.asks(config.llm):
        held_out = task.held_out(evaluation.split)
        count = min(len(held_out), evaluation.answer_queries or len(held_out))
        yield count * count_selectors(config), evaluation.k, held_out
    if texts := texts_at_most(config, task):
        tried = config.llm.kind != "local"  # see `try_scoring`
        yield texts + tried, evaluation.k, task.pool


def longest_prompt(llm: LanguageModel, pool: Sequence[Example], queries: Sequence[Example], shown: int) -> Request:
    """A prompt with at least as many tokens as any that shows `shown` examples of the pool and asks one of the queries.

    It is the one of the longest examples and query, each measured by itself: no tokenizer in use has a token that spans
    the line break between two of them.
    """
    prompt = llm.prompt
    longest = nlargest(shown, [e.item for e in pool], key=lambda item: llm.count_tokens(prompt.shown(item)))
    asked = (partial(prompt.request, question=query.source, fields=query.fields) for query in queries)
    return max(asked, key=lambda ask: llm.count_tokens(ask([])))(longest)
