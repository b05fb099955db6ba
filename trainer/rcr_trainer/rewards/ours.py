"""Our rewards, and how to make one: by name, by `module:callable`, from an object, or as a weighted mixture of these.

Shared structures (Jaccard), exact match, same result, recall of the picks, probability of the gold program.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from langchain_rcr.basics.items import normal
from langchain_rcr.basics.section import unknown
from langchain_rcr.databases.database import open_database
from langchain_rcr.databases.many import Databases, are_many
from langchain_rcr.databases.results import Result
from langchain_rcr.errors import ProgramError
from langchain_rcr.programs import ProgramSpec, about, get_parser
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import ConfigError
from rcr_trainer.rewards.reward import Reward

Execute = Callable[[str], Any]
"""Runs a program and returns its result: rows as a list, or any value. Raises ProgramError if it can't be run."""

T = TypeVar("T")

_REMEMBERED = 1 << 16
_PATIENCE_S = 600.0
"""Seconds that a run waits for queries that the PostgreSQL server can't stop, before the run itself stops."""


def structure_coverage(spec: ProgramSpec) -> Reward:
    """The paper's reward (Eq. 6): Jaccard similarity of the local structures of answer and gold program.

    r = |LS(ŷ) ∩ LS(y)| / |LS(ŷ) ∪ LS(y)|. An answer that isn't a program has no structures and scores 0. A gold program
    without structures can't be scored. Names of tables and columns count, whatever the spec says.
    """
    structures = spec.named.structures

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        gold = structures(reference)
        if not gold:
            return None
        found = structures(prediction) if prediction else frozenset()
        return len(found & gold) / len(found | gold)

    return Reward.per_answer("structure_coverage", one)


def correctness(spec: ProgramSpec) -> Reward:
    """Exact match (appendix F): 1 if answer and gold program are the same, else 0.

    Two programs are the same if their parse trees are equal, including values; if one of them doesn't parse, their
    texts must be equal up to white space. é is the same as e and an accent, which some language models can't write. An
    empty gold program can't be scored.
    """
    tree_of = replace(spec, anonymize=False).tree

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        if not reference.split():
            return None
        answer, gold = tree_of(prediction or ""), tree_of(reference)
        if answer is None or gold is None:
            texts = [normal(text, "NFC").split() for text in (prediction or "", reference)]
            return float(texts[0] == texts[1])
        return float(answer == gold)

    return Reward.per_answer("correctness", one)


def execution(execute: Execute | Databases, spec: ProgramSpec) -> Reward:
    """1 if answer and gold program give the same result, else 0.

    An answer that can't be run, or whose result can't be compared, scores 0; such a gold program can't be scored.
    A list is compared as a multiset of rows, or in order if the gold program's outermost query has an ORDER BY; a tuple
    is always compared in order. In rows that are tuples, the order of columns doesn't matter. Numbers are compared
    whatever their types, those that aren't whole to 12 significant digits. Each program runs once on each database.
    """

    @lru_cache(maxsize=_REMEMBERED)
    def result(program: str, where: str) -> Result | None:
        """None if the program can't be run, or its result can't be compared."""
        try:
            return Result.of(execute.run(program, where) if isinstance(execute, Databases) else execute(program))
        except ProgramError:
            return None

    parse, is_ordered = get_parser(spec.language).parse, about(spec.language).is_ordered
    ordered = lru_cache(maxsize=_REMEMBERED)(lambda program: (tree := parse(program)) is not None and is_ordered(tree))

    def one(prediction: str | None, reference: str, where: str) -> float | None:
        gold = result(reference, where)
        if gold is None:
            return None
        found = result(prediction, where) if prediction and prediction.strip() else None
        if found is None:
            return 0.0
        return float(found.in_order == gold.in_order if ordered(reference) else found.rows == gold.rows)

    def function(
        predictions: Sequence[str | None], references: Sequence[str], *, fields: Any = (), **_: Any
    ) -> list[float | None]:
        given = fields or [{}] * len(references)
        where = [execute.path(each) if isinstance(execute, Databases) else "" for each in given]
        scores: list[float | None] = [None] * len(references)
        for n in sorted(range(len(references)), key=where.__getitem__):  # keeps few databases open at a time
            scores[n] = one(predictions[n], references[n], where[n])
        return scores

    return Reward("execution", function, reads_fields=isinstance(execute, Databases))


def context_coverage(spec: ProgramSpec) -> Reward:
    """Recall of the gold program's local structures by the union of the picks' programs. Needs no language model.

    SFT and the dev coverage measure this, but the paper doesn't reward it: a policy that maximises it need not be the
    one whose picks a language model answers best with. (The Jaccard of the picks wouldn't help: it is highest for
    copies of one program.)
    """
    structures = spec.structures

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        gold = structures(reference)
        if not gold:
            return None
        shown = frozenset().union(*(structures(example.target) for example in context))
        return len(gold & shown) / len(gold)

    return Reward.per_answer("context_coverage", one, needs_llm=False)


def likelihood(spec: ProgramSpec) -> Reward:
    """The probability that the language model writes the gold program, spacing and all (`Scorer`).

    It distinguishes picks even if all answers are right, or all wrong. Needs a local model, or a completion server that
    heeds `echo` or `grammar` (`WAYS`).
    """
    return Reward("likelihood", lambda *_, **__: [], likelihood=True)  # the function isn't called


_BY_SPEC: dict[str, Callable[[ProgramSpec], Reward]] = {
    "structure_coverage": structure_coverage,
    "correctness": correctness,
    "context_coverage": context_coverage,
    "likelihood": likelihood,
}
NAMES = (*_BY_SPEC, "execution")
"""The built-in rewards."""


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
        reward: one of NAMES; `module:callable` (also from the working directory) or the callable itself, called like a
            `Reward`; or a mapping from any of these to weights, for their weighted sum. A class is instantiated
            without arguments.
        spec: how programs are read.
        database: for `execution`: a SQLite file or `postgresql://…`, also as SQLAlchemy takes them; or many, as
            `Databases` takes them.
        execute: for `execution` instead: what runs a program, as an object or `module:callable`.
        timeout_s: for `execution` on a database: seconds a program may take.
        max_rows: for `execution` on a database: rows it may give.
    """

    def executor() -> Execute | Databases:
        if database is not None and execute is None:
            if are_many(database):
                return Databases(database, timeout_s=timeout_s, max_rows=max_rows)
            return open_database(database, timeout_s=timeout_s, max_rows=max_rows, patience_s=_PATIENCE_S)
        if execute is None or database is not None:
            raise ConfigError("reward 'execution' needs either reward.database or reward.executor to run programs")
        return load(execute, "executor", lambda found: found) if isinstance(execute, str) else execute

    def make(part: str | Callable[..., Any]) -> Reward:
        if not isinstance(part, str):
            return Reward.of(part)
        if part in _BY_SPEC:
            return _BY_SPEC[part](spec)
        if part == "execution":
            return execution(executor(), spec)
        if ":" in part:
            return load(part, "reward", Reward.of)
        raise ConfigError(f"reward: {unknown(part, NAMES)}, or give your own as module:callable")

    if isinstance(reward, Mapping):
        return mixture({make(part): weight for part, weight in reward.items()})
    return make(reward)


def mixture(parts: Mapping[Reward, float]) -> Reward:
    """The weighted sum of rewards (reward → weight > 0); None for an answer that any of them can't score."""
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


def load(path: str, what: str, make: Callable[[Any], T]) -> T:
    """What `make` makes of `module:name`, also from the working directory; a `ConfigError` refers to it as `what`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = pkgutil.resolve_name(path)
        if callable(found):
            return make(found)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{what} '{path}' can't be loaded: {reason}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
    raise ConfigError(f"{what} '{path}' can't be called")
