"""Both stages of training with the arguments that tests vary, one by one."""

from typing import Any

from rcr_trainer import grpo, sft
from rcr_trainer.rewards import Reward
from rcr_trainer.training.runner import Job
from rcr_trainer.training.state import Result


def train_sft(model: Any, pool: Any, queries: Any, dev: Any, spec: Any, config: Any, **options: Any) -> Result:
    """`sft.train`; the options are those of `Job`."""
    return sft.train(Job(model, pool, queries, dev, spec, **options), config)


def train_grpo(
    model: Any, pool: Any, queries: Any, dev: Any, spec: Any, config: Any, reward: Any, llm: Any = None, **options: Any
) -> Result:
    """`grpo.train`; the options are those of `Job`."""
    reward = reward if isinstance(reward, Reward) else Reward.of(reward)
    return grpo.train(Job(model, pool, queries, dev, spec, **options), config, reward, llm)
