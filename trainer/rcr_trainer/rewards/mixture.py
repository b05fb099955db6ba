"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rcr_trainer.data import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.base import Reward


class Mixture:
    """The weighted sum of rewards; an answer that one of them can't score can't be scored.

    Args:
        parts: reward → weight, above 0.

    Raises:
        ConfigError: no part, or a weight that is not above 0.
    """

    def __init__(self, parts: Mapping[Reward, float]) -> None:
        if not parts or not all(weight > 0 for weight in parts.values()):
            message = f"a mixed reward needs parts with weights above 0, not {sorted(parts.values())}"
            raise ConfigError(message)
        self._parts = dict(parts)
        self.name = " + ".join(f"{weight:g} {reward.name}" for reward, weight in parts.items())
        self.needs_llm = any(reward.needs_llm for reward in parts)
        self.maximum = sum(weight * reward.maximum for reward, weight in parts.items())
        self.minimum = sum(weight * float(getattr(reward, "minimum", 0.0)) for reward, weight in parts.items())

    def __call__(
        self,
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        queries: Sequence[str],
        contexts: Sequence[Sequence[Example]],
    ) -> list[float | None]:
        """See `Reward`."""
        columns = [
            (weight, reward(predictions, references, queries=queries, contexts=contexts))
            for reward, weight in self._parts.items()
        ]
        lengths = {reward.name: len(values) for reward, (_, values) in zip(self._parts, columns, strict=True)}
        if set(lengths.values()) != {len(references)}:
            message = f"scores for {len(references)} answers: {lengths}"
            raise ValueError(message)
        weights = [weight for weight, _ in columns]
        rows = zip(*(values for _, values in columns), strict=True)
        return [_sum(weights, row) for row in rows]


def _sum(weights: Sequence[float], row: Sequence[float | None]) -> float | None:
    total = 0.0
    for weight, value in zip(weights, row, strict=True):
        if value is None:
            return None
        total += weight * value
    return total
