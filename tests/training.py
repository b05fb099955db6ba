"""The stages of training with the arguments that tests vary, one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rcr_trainer import grpo, race, sft
from rcr_trainer.llm.cache import Answer
from rcr_trainer.rewards.reward import Reward
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.registry import StageSettings
from rcr_trainer.training.runner import Job, Result, Runner

from langchain_rcr.chains.answers import program_of
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec


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


def train_line(state: Path, rounds: int = 1, log: Any = None, evaluate: Any = dict) -> Result:
    """A line's slope, trained by the common loop for some rounds of a step each."""
    model = torch.nn.Linear(64, 1)
    job = Job(model, (), (), (), ProgramSpec(), state_folder=state, log=log)  # type: ignore[arg-type]
    given = {"batch_size": 1, "lr": 0.1, "weight_decay": 0.0, "warmup": 0.0, "patience": None, "keep": "last"}
    config = StageSettings(epochs=rounds, **given)
    runner = Runner("sft", job, config, dict(model.named_parameters()), per_epoch=1, every=1, best_by="")

    def learn(_: int) -> dict[str, float]:
        model(torch.ones(64)).sum().backward()
        runner.step()
        runner.advance()
        return {}

    return runner.run(lambda number: number, learn, evaluate)


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
