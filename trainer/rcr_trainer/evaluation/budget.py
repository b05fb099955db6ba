"""What a run would work on, and the most its language model would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial, reduce
from heapq import nlargest
from operator import add

from langchain_rcr.families import get_family
from langchain_rcr.policy.prompt import Prompt, Request
from rcr_trainer.data.examples import Example
from rcr_trainer.evaluation.plain import count_selectors, texts_at_most
from rcr_trainer.grpo import calls_at_most
from rcr_trainer.llm.cache import AnswerCache, Estimate, limits
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.runs.tasks import Task, account, answers_file, build_reward, open_language_model
from rcr_trainer.settings import Settings
from rcr_trainer.training.registry import TIMES

SECONDS = 1
"""Assumed per answer: right for a short one from a server; a model on this machine may need many times that."""


def plan(config: Settings, task: Task) -> list[str]:
    """Lines on what a run would work on, and the most its language model would cost. Nothing is asked."""
    together = config.llm.batch_size if config.llm.kind == "local" else config.llm.concurrency

    def time(cost: Estimate) -> str:
        return spoken(cost.use.calls * SECONDS / together)

    lines = [f"pool {len(task.pool)}, training {len(task.queries)}, dev {len(task.dev)}, test {len(task.test)}"]
    if config.grpo.enabled:
        lines.append(f"GRPO: {len(task.reinforced)} queries, reward {'+'.join(config.reward.names)}")
    if config.evaluation.asks(config.llm):
        asked, selectors = f"{_answered(config, task)} {config.evaluation.split}", count_selectors(config, task)
        lines.append(f"evaluation: {asked} queries, answered with {selectors} selectors' picks")
    if texts := texts_at_most(config, task):
        lines.append(f"baselines: at most {texts:,} texts scored, to learn from")
    stages = estimate(config, task)
    if not stages:
        return [*lines, "no language model is asked"] if config.grpo.enabled else lines
    total = reduce(add, stages.values())
    if len(stages) > 1:
        lines += [f"  {name}: {cost}, {time(cost)}" for name, cost in stages.items()]
    lines.append(f"language model: {total}, {time(total)} (at {SECONDS} s an answer, {together} at a time)")
    use = total.use
    if (path := answers_file(config)).exists():
        with closing(AnswerCache(path)) as kept:
            lines.append(f"{path} keeps {len(kept):,} answers, none of which is asked for again")
            use += kept.spent(account(config))
    for (what, most, used), (*_, own) in zip(limits(config.llm, use), limits(config.llm, total.use), strict=True):
        before = f" (spent so far: {used - own:,.6g})" if used > own else ""
        said = "the run may stop there, and can be resumed" if used > most else "enough"
        lines.append(f"llm.budget_{what} = {most:,}{before}: {said}")
    return lines


def estimate(config: Settings, task: Task, llm: LanguageModel | None = None) -> dict[str, Estimate]:
    """The most a run's language model costs, by stage; only stages that ask it."""
    asked = [each for each in _asked(config, task) if each[1]]
    if not asked:
        return {}
    with nullcontext(llm) if llm is not None else open_language_model(config, task, keep=False) as model:
        return {
            stage: model.estimate_calls(calls, longest_prompt(model, task.pool, queries, shown))
            for stage, calls, shown, queries in asked
        }


def _answered(config: Settings, task: Task) -> int:
    """How many queries the comparison asks the language model."""
    count = len(task.held_out(config.evaluation.split))
    return min(count, config.evaluation.answer_queries or count)


def spoken(seconds: float) -> str:
    """A duration in hours or minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, seconds / 60):.0f} min"


def _asked(config: Settings, task: Task) -> Iterator[tuple[str, int, int, Sequence[Example]]]:
    """Each stage that asks the language model: the most calls, how many examples a prompt shows, which queries."""
    grpo, evaluation = config.grpo, config.evaluation
    times = max(TIMES) if grpo.enabled and grpo.race and grpo.prompt_tokens else 1
    most = evaluation.k or config.model.k * times
    if grpo.enabled and build_reward(config, task.spec).needs_llm:
        shown = grpo.k or config.model.k * times
        races = grpo.prompt_tokens is not None or bool(get_family(config.model.family).changes)
        for stage, calls in calls_at_most(grpo, len(task.reinforced), len(task.dev), races=races).items():
            yield stage, calls, shown, task.dev if stage == "development" else task.reinforced
    if evaluation.asks(config.llm):
        calls = _answered(config, task) * count_selectors(config, task)
        yield "evaluation", calls, most, task.held_out(evaluation.split)
    if texts := texts_at_most(config, task):
        tried = config.llm.kind != "local"  # see `try_scoring`
        yield "baselines", texts + tried, most, task.pool


def longest_prompt(llm: LanguageModel, pool: Sequence[Example], queries: Sequence[Example], shown: int) -> Request:
    """A prompt with at least as many tokens as any that shows `shown` examples of the pool and asks one of the queries.

    It has the longest examples, with the tables that they read, and the longest query, each measured by itself: no
    tokenizer in use has a token that spans the line break between two of them.
    """
    prompt = llm.prompt
    if len({str(each.fields.get("schema")) for each in (*pool, *queries)}) > 1:
        pool = [_with_tables(prompt, each, max(shown, 1)) for each in pool]
    longest = nlargest(shown, pool, key=lambda each: llm.count_tokens(prompt.shown(each)))
    ways = (prompt.model_copy(update={"others": {}}), prompt.elsewhere)
    asked = (partial(way.request, question=each.source, fields=each.fields) for each in queries for way in ways)
    return max(asked, key=lambda ask: llm.count_tokens(ask([])))(longest)


def _with_tables(prompt: Prompt, example: Example, shown: int) -> Example:
    """The example with the tables that a prompt shows where it is from another database."""
    tables = prompt.tables(example.target, str(example.fields.get("schema") or ""), shown)
    return replace(example, source=f"{example.source}\n{tables}".rstrip()) if tables else example
