"""A reward by name, by `module:callable`, as an object, or as a weighted mixture of these."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.base import Reward
from rcr_trainer.rewards.execution import Execute, Execution
from rcr_trainer.rewards.programs import ContextCoverage, Correctness, StructureCoverage

_BY_SPEC: dict[str, Callable[[ProgramSpec], Reward]] = {
    "structure_coverage": StructureCoverage,
    "correctness": Correctness,
    "context_coverage": ContextCoverage,
}
NAMES = (*_BY_SPEC, "execution")
"""The rewards that the project brings."""


def make_reward(
    reward: str | Callable[..., Any] | Mapping[Any, float],
    spec: ProgramSpec,
    *,
    database: str | None = None,
    execute: str | Execute | None = None,
    timeout_s: float = 5.0,
    max_rows: int = 10_000,
) -> Reward:
    """A reward.

    Args:
        reward: one of NAMES; `module:callable` (found in the working directory too) or the callable itself, called
            like a `Reward`; or a mapping from any of these to weights, for their weighted sum. A class is made into
            an object without arguments.
        spec: how programs are read.
        database: for `execution`: a SQLite file or `postgresql://…`.
        execute: for `execution` instead: what runs a program, as an object or `module:callable`.
        timeout_s: for `execution` on a database: seconds a program may take.
        max_rows: for `execution` on a database: rows it may give.

    Raises:
        ConfigError: no such reward, nothing to execute on, or a database that can't be opened.
        MissingExtraError: PostgreSQL without psycopg.
    """
    if isinstance(reward, Mapping):
        options: dict[str, Any] = {"timeout_s": timeout_s, "max_rows": max_rows}
        parts = {
            make_reward(part, spec, database=database, execute=execute, **options): w for part, w in reward.items()
        }
        return Mixture(parts)
    if not isinstance(reward, str):
        return _own(reward)
    if reward in _BY_SPEC:
        return _BY_SPEC[reward](spec)
    if reward == "execution":
        return Execution(_executor(database, execute, timeout_s, max_rows), spec)
    if ":" in reward:
        return _own(load(reward, "reward"))
    near = difflib.get_close_matches(reward, NAMES, 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    message = f"unknown reward '{reward}': {hint}known are {', '.join(NAMES)}, or give your own as module:callable"
    raise ConfigError(message)


def _executor(database: str | None, execute: str | Execute | None, timeout_s: float, max_rows: int) -> Execute:
    if (database is None) == (execute is None):
        message = "reward 'execution' needs either reward.database or reward.executor to run programs"
        raise ConfigError(message)
    if database is not None:
        from rcr_trainer.rewards.databases import open_database

        return open_database(database, timeout_s=timeout_s, max_rows=max_rows)
    found: Execute = load(execute, "executor") if isinstance(execute, str) else execute  # type: ignore[assignment]
    return found


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
        total: list[float | None] = [0.0] * len(references)
        for reward, weight in self._parts.items():
            scores = reward(predictions, references, queries=queries, contexts=contexts)
            if len(scores) != len(references):
                message = f"{reward.name} gave {len(scores)} scores for {len(references)} answers"
                raise ValueError(message)
            total = [None if a is None or b is None else a + weight * b for a, b in zip(total, scores, strict=True)]
        return total


class _Function:
    """A plain function as a `Reward`."""

    needs_llm, maximum = True, 1.0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        for attribute in ("name", "needs_llm", "maximum", "minimum"):
            if hasattr(function, attribute):
                setattr(self, attribute, getattr(function, attribute))
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> list[float | None]:
        """See `Reward`."""
        scores: list[float | None] = self._function(*arguments, **named)
        return scores


def _own(reward: Callable[..., Any]) -> Reward:
    made = reward() if isinstance(reward, type) else reward
    if not callable(made):
        message = f"reward {made!r:.80} can't be called"
        raise ConfigError(message)
    return made if isinstance(made, Reward) else _Function(made)


def load(path: str, what: str) -> Any:
    """The object that `module:name` names; the module may lie in the working directory.

    Args:
        path: `module:name`, the name dotted for an attribute of an object.
        what: what to call it in an error.

    Raises:
        ConfigError: there is no such module, it can't be imported, or it has no such name.
    """
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module of the user's own may raise anything
        message = f"{what} '{path}' can't be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(message) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
    return found
