"""What a reward is, how it is called, and the test that it must pass before a run trusts it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from langchain_rcr.basics.rows import BoolArray, DoubleArray
from langchain_rcr.errors import RCRError
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_CLOSE = 1e-6  # also of rewards in float32
_FEW = 8  # examples that find most mistakes, before the rest is paid for: a reward may ask a judge
_SAID = ("needs_llm", "maximum", "minimum", "reads_fields")
"""The attributes that a user's callable may set."""


class RewardError(RCRError):
    """A reward raised an exception or returned something other than a score; the message names the example."""


@dataclass(frozen=True, eq=False)
class Reward:
    """What a set of picks is worth; called with a batch of answers.

    Args:
        name: for logs and messages.
        function: scores B answers, with the arguments of `__call__`.
        needs_llm: it reads `predictions`; if it doesn't, a run needs no language model.
        maximum: the score of the gold program.
        minimum: the score of no program.
        likelihood: it is the probability that the model writes the gold program; `function` isn't called.
        reads_fields: `function` also takes `fields`.
    """

    name: str
    function: Callable[..., Sequence[float | None]]
    needs_llm: bool = True
    maximum: float = 1.0
    minimum: float = 0.0
    likelihood: bool = False
    reads_fields: bool = False

    def __call__(
        self,
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        queries: Sequence[str],
        contexts: Sequence[Sequence[Example]],
        fields: Sequence[Mapping[str, Any]] = (),
    ) -> list[float | None]:
        """Score B answers.

        Args:
            predictions: the programs that the language model wrote; None, which scores the minimum, for an empty,
                refused, truncated or malformed answer.
            references: the gold programs.
            queries: the questions.
            contexts: for each question, the examples in its prompt, in order.
            fields: the questions' further fields, such as `db_id`, for a reward that reads them (`reads_fields`).

        Returns:
            B scores; None where nothing can be scored, and so nothing is learned. An exception is a bug and stops the
            run.
        """
        more = {"fields": fields} if self.reads_fields else {}
        return list(self.function(predictions, references, queries=queries, contexts=contexts, **more))

    @classmethod
    def of(cls, given: Callable[..., Any]) -> Reward:
        """Wrap a user's callable, or an instance of a class of these; its attributes may set the other fields."""
        given = given() if isinstance(given, type) else given
        name = getattr(given, "name", getattr(given, "__name__", type(given).__name__))
        said = {each: getattr(given, each) for each in _SAID if hasattr(given, each)}
        for end in ("maximum", "minimum"):
            if not isinstance(said.get(end, 0), Real):
                raise ConfigError(f"reward '{name}': its {end} must be a number, not {said[end]!r:.80}")
        return cls(str(name), given, **said)

    @classmethod
    def per_answer(
        cls, name: str, one: Callable[[str | None, str, Sequence[Example]], float | None], *, needs_llm: bool = True
    ) -> Reward:
        """A reward that scores each answer by itself: `one` gets the answer, the gold program and the picks."""

        def function(
            predictions: Sequence[str | None], references: Sequence[str], *, contexts: Any, **_: Any
        ) -> list[float | None]:
            return [one(*row) for row in zip(predictions, references, contexts, strict=True)]

        return cls(name, function, needs_llm)


def score(
    reward: Reward,
    predictions: Sequence[str | None],
    examples: Sequence[Example],
    contexts: Sequence[Sequence[Example]],
) -> DoubleArray:
    """Call a reward: (B,) scores, NaN where it gave None.

    A `RewardError` says that it raised an exception that isn't the project's own, or gave anything but B finite numbers
    or None.
    """
    try:
        targets, sources = [example.target for example in examples], [example.source for example in examples]
        fields = [example.fields for example in examples]
        values = reward(predictions, targets, queries=sources, contexts=contexts, fields=fields)
    except RCRError:
        raise
    except Exception as error:
        if len(examples) > 1:
            # One by one, to find the example that caused it.
            for prediction, example, context in zip(predictions, examples, contexts, strict=True):
                score(reward, [prediction], [example], [context])
        which = _named(examples[0]) if len(examples) == 1 else f"a batch of {len(examples)} (first: {examples[0].id})"
        logger.exception("reward %s", reward.name)
        raise RewardError(f"reward '{reward.name}' raised {type(error).__name__} on {which}: {error}") from error
    if len(values) != len(examples):
        raise RewardError(f"reward '{reward.name}' gave {len(values)} scores for {len(examples)} answers")
    for value, example in zip(values, examples, strict=True):
        if value is not None and not (isinstance(value, Real | np.bool_) and math.isfinite(value)):
            given = f"reward '{reward.name}' gave {value!r:.80} on {_named(example)}"
            raise RewardError(f"{given}: neither a finite number nor None")
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def check_reward(reward: Reward, examples: Sequence[Example], *, quick: bool = False) -> BoolArray:
    """Check that a reward tells right from wrong; and which gold programs (Q,) it can score.

    Each gold program, with the example itself in the prompt, must earn the maximum. No program, and an empty one, must
    earn the minimum with no examples in the prompt, tried on a few questions. A `quick` check tries gold programs, too,
    on these alone, if it can score any of them.
    """
    if reward.likelihood:
        return np.ones(len(examples), dtype=np.bool_)
    if not reward.maximum > reward.minimum:
        what = f"its maximum, {reward.maximum}, must be above its minimum, {reward.minimum}"
        raise ConfigError(f"reward '{reward.name}': {what}")
    few, rest = examples[:_FEW], examples[_FEW:]
    scorable = _scorable(reward, few)
    for nothing, what in ((None, "no program"), ("", "an empty program")):
        empty = score(reward, [nothing] * len(few), few, [[]] * len(few))
        _demand(reward, empty, reward.minimum, few, what)
    if rest and not (quick and scorable.any()):
        scorable = np.append(scorable, _scorable(reward, rest))
    if not scorable.any():
        raise ConfigError(
            f"reward '{reward.name}' can score none of the {len(examples)} gold programs: "
            "is the program language, the database or the executor the right one?"
        )
    return scorable


def _scorable(reward: Reward, examples: Sequence[Example]) -> BoolArray:
    """Which gold programs (Q,) a reward can score; a `ConfigError` if it gives one less than the maximum."""
    gold = score(reward, [e.target for e in examples], examples, [[e] for e in examples])
    _demand(reward, gold, reward.maximum, examples, "its gold program")
    return ~np.isnan(gold)


def _demand(reward: Reward, scores: DoubleArray, wanted: float, examples: Sequence[Example], what: str) -> None:
    wrong = np.flatnonzero(np.abs(scores - wanted) > _CLOSE)  # a comparison with NaN is False
    if len(wrong):
        first = wrong[0]
        raise ConfigError(
            f"reward '{reward.name}' gives {scores[first]:g} to {what} on {_named(examples[first])}, where it must "
            f"give {wanted:g} ({len(wrong)} of {len(examples)} examples); a reward on another scale has the attributes "
            "maximum, for gold programs, and minimum, for none"
        )


def _named(example: Example) -> str:
    return f"example {example.id} ({' '.join(example.source.split())!r:.100})"
