"""The stages of training with the arguments that tests vary, one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rcr_trainer import grpo, race, sft
from rcr_trainer.llm.cache import Answer
from rcr_trainer.rewards import Reward
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.runner import Job
from rcr_trainer.training.state import Result

from langchain_rcr.chains.answers import program_of
from langchain_rcr.policy.prompt import APPENDIX_D


def train_sft(model: Any, pool: Any, queries: Any, dev: Any, spec: Any, config: Any, **options: Any) -> Result:
    """`sft.train`; the options are those of `Job`."""
    return sft.train(Job(model, pool, queries, dev, spec, **options), config)


def train_grpo(
    model: Any, pool: Any, queries: Any, dev: Any, spec: Any, config: Any, reward: Any, llm: Any = None, **options: Any
) -> Result:
    """`race.run` and `grpo.train`; the options are those of `Job`."""
    reward = reward if isinstance(reward, Reward) else Reward.of(reward)
    job = Job(model, pool, queries, dev, spec, **options)
    environment = Environment(job, reward, llm, config)
    race.run(job, environment, config)
    return grpo.train(job, environment, config)


class StopError(Exception):
    """What `stop_at` raises."""


def stop_at(number: int) -> Any:
    """A log that ends the run before the epoch or step of this number is saved."""

    def log(at: int, _figures: Any) -> None:
        if at == number:
            raise StopError

    return log


class Parrot:
    """A language model that answers what a function makes of the prompt."""

    prompt = APPENDIX_D

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self.answer, self.prompts = answer, list[str]()

    def generate(self, prompts: Sequence[str]) -> list[Answer]:
        """The answers, with their programs."""
        self.prompts += prompts
        answers = [self.answer(prompt) for prompt in prompts]
        return [replace(each, program=program_of(each.text or "", "functional")) for each in answers]


def same_weights(one: Any, other: Any) -> bool:
    """Whether two policies have the same tensors, to the bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
