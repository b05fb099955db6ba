"""The stages of training with the arguments that tests vary, one by one."""

from typing import Any

from rcr_trainer import grpo, race, sft
from rcr_trainer.rewards import Reward
from rcr_trainer.training.environment import Environment
from rcr_trainer.training.runner import Job
from rcr_trainer.training.state import Result


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
