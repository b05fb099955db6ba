"""A reward by name, by `module:callable`, as an object, or as a weighted mixture of these."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_rcr.databases.database import open_database
from langchain_rcr.databases.many import Databases, are_many
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.programs.languages import unknown
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.programs import (
    Execute,
    context_coverage,
    correctness,
    execution,
    likelihood,
    structure_coverage,
)
from rcr_trainer.rewards.reward import Reward

_BY_SPEC: dict[str, Callable[[ProgramSpec], Reward]] = {
    "structure_coverage": structure_coverage,
    "correctness": correctness,
    "context_coverage": context_coverage,
    "likelihood": likelihood,
}
NAMES = (*_BY_SPEC, "execution")
"""The rewards that the project brings."""
_PATIENCE_S = 600.0
"""Seconds that a run waits for queries that PostgreSQL's server can't stop, before it stops itself."""


def make_reward(
    reward: str | Callable[..., Any] | Mapping[Any, float],
    spec: ProgramSpec,
    *,
    database: str | None = None,
    execute: str | Execute | None = None,
    timeout_s: float = 5.0,
    max_rows: int = 10_000,
) -> Reward:
    """A reward by name, or from what the user gives.

    Args:
        reward: one of NAMES; `module:callable` (found in the working directory too) or the callable itself, called
            like a `Reward`; or a mapping from any of these to weights, for their weighted sum. A class is made into
            an object without arguments.
        spec: how programs are read.
        database: for `execution`: a SQLite file or `postgresql://…`, also as SQLAlchemy takes them; or many, as
            `Databases` takes them.
        execute: for `execution` instead: what runs a program, as an object or `module:callable`.
        timeout_s: for `execution` on a database: seconds a program may take.
        max_rows: for `execution` on a database: rows it may give.

    Raises:
        ConfigError: no such reward, nothing to execute on, or a database that can't be opened.
        MissingExtraError: PostgreSQL without psycopg.
    """

    def make(part: str | Callable[..., Any]) -> Reward:
        if not isinstance(part, str):
            return Reward.of(part() if isinstance(part, type) else part)
        if part in _BY_SPEC:
            return _BY_SPEC[part](spec)
        if part == "execution":
            return execution(_executor(database, execute, timeout_s, max_rows), spec)
        if ":" in part:
            return make(load(part, "reward"))
        raise ConfigError(f"reward: {unknown(part, NAMES)}, or give your own as module:callable")

    if isinstance(reward, Mapping):
        return mixture({make(part): weight for part, weight in reward.items()})
    return make(reward)


def _executor(
    database: str | None, execute: str | Execute | None, timeout_s: float, max_rows: int
) -> Execute | Databases:
    if database is not None and execute is None:
        if are_many(database):
            return Databases(database, timeout_s=timeout_s, max_rows=max_rows)
        return open_database(database, timeout_s=timeout_s, max_rows=max_rows, patience_s=_PATIENCE_S)
    if execute is None or database is not None:
        raise ConfigError("reward 'execution' needs either reward.database or reward.executor to run programs")
    return load(execute, "executor") if isinstance(execute, str) else execute


def mixture(parts: Mapping[Reward, float]) -> Reward:
    """The weighted sum of rewards (reward → weight > 0); None for an answer that one of them can't score."""
    if not parts or not all(weight > 0 for weight in parts.values()):
        raise ConfigError(f"a mixed reward needs parts with weights above 0, not {sorted(parts.values())}")
    if any(reward.likelihood for reward in parts):
        raise ConfigError("reward 'likelihood' can't be mixed with others: name it alone")

    def function(predictions: Sequence[str | None], references: Sequence[str], **about: Any) -> list[float | None]:
        total: list[float | None] = [0.0] * len(references)
        for reward, weight in parts.items():
            scores = reward(predictions, references, **about)
            if len(scores) != len(references):
                raise ValueError(f"{reward.name} gave {len(scores)} scores for {len(references)} answers")
            total = [None if a is None or b is None else a + weight * b for a, b in zip(total, scores, strict=True)]
        return total

    return Reward(
        " + ".join(f"{weight:g} {reward.name}" for reward, weight in parts.items()),
        function,
        needs_llm=any(reward.needs_llm for reward in parts),
        reads_fields=any(reward.reads_fields for reward in parts),
        maximum=sum(weight * reward.maximum for reward, weight in parts.items()),
        minimum=sum(weight * reward.minimum for reward, weight in parts.items()),
    )


def load(path: str, what: str) -> Callable[..., Any]:
    """The callable at a path `module:name`, also in the working directory; a `ConfigError` calls it `what`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = pkgutil.resolve_name(path)
    except Exception as error:  # a module of the user's own may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{what} '{path}' can't be loaded: {reason}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
    if not callable(found):
        raise ConfigError(f"{what} '{path}' can't be called")
    called: Callable[..., Any] = found
    return called
