"""What all baselines share: the pool, LangChain's selector interface, checks; a baseline adds how it ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector

from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.ranking import checked_exclude, places
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines.options import LearnedSettings
from rcr_trainer.data.coverage import row_blocks

if TYPE_CHECKING:
    from langchain_rcr.basics.items import Item
    from langchain_rcr.policy.triencoder import TriEncoder
    from rcr_trainer.llm.scoring import Scorer

Exclude: TypeAlias = Sequence[Collection[int]] | None
"""Per query, the positions in the pool that it may not pick; None: none for any query."""

Embed: TypeAlias = Callable[[Sequence[str]], np.ndarray]
"""Embeds n texts: (n, D) floats, of any length."""

EmbedTokens: TypeAlias = Callable[[Sequence[str]], list[np.ndarray]]
"""Embeds every token of n texts in its context: per text (tokens, D) floats, of any length."""


@dataclass(frozen=True)
class Resources:
    """What baselines may need beside the pool.

    Args:
        spec: how programs are read.
        seed: of random draws.
        embed: embeds questions; called once for each distinct question of the pool, and for every query.
        embed_tokens: embeds the tokens of questions, as `embed` does.
        score: the scoring language model.
        policy: makes fresh text encoders, from the pool's items, to be trained.
        learning: how they are trained.
        encode: opens a pretrained model by the name of a selector and that of the model it brings.
        token_ids: which token is which, for `embed_tokens`' vectors.
        prompt: how the scoring language model is asked.
    """

    spec: ProgramSpec = field(default_factory=ProgramSpec)
    seed: int = 0
    embed: Embed | None = None
    embed_tokens: EmbedTokens | None = None
    score: Scorer | None = None
    policy: Callable[[Sequence[Item]], TriEncoder] | None = None
    learning: LearnedSettings = field(default_factory=LearnedSettings)
    encode: Callable[[str, str], Embed] | None = None
    token_ids: Callable[[Sequence[str]], list[list[int]]] | None = None
    prompt: Prompt = APPENDIX_D

    def missing(self, baseline: type[Baseline]) -> str:
        """Why the baseline can't be built; empty: it can."""
        said = {
            "embed": "no embeddings were given",
            "embed_tokens": "no embeddings of tokens were given",
            "score": "no scoring language model was given",
            "policy": "no text encoders were given",
            "encode": "no pretrained models can be opened",
            "token_ids": "no embeddings of tokens were given",
        }
        return next((said[need] for need in baseline.needs if getattr(self, need) is None), "")


_SOURCE, _TARGET = "source", "target"


class TradeOff(NamedTuple):
    """A number that is chosen on development queries, since a selector left untuned would be too easy to beat.

    Args:
        parameter: the attribute of the selector; as built it has the value for where there is nothing to choose on.
        grid: the values to try.
    """

    parameter: str
    grid: tuple[float, ...]


class Baseline(BaseExampleSelector, ABC):
    """An example selector that also picks positions for many queries at once.

    Owns the pool, the reading of questions and programs out of examples, and every check of arguments. A subclass
    says how it prepares (`_fit`, called when the pool has changed, before the next pick) and ranks (`_pick`).

    Class attributes:
        name: as in settings and reports.
        needs: the fields of `Resources` that it reads; with `spec` it reads the pool's programs.
        oracle: whether it sees the queries' gold programs: a ceiling for the others, not a competitor.
        trade_off: what is chosen on development queries; None: nothing.

    Args:
        examples: the pool, one dict per example: its question by the key `source`, its program by `target`.
        k: examples that `select_examples` returns.
        **resources: fields of `Resources`; those that it needs and that have no default must be given.

    Raises:
        InputError: a resource is missing.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    oracle: ClassVar[bool] = False
    trade_off: ClassVar[TradeOff | None] = None

    def __init__(self, examples: Sequence[Mapping[str, Any]], *, k: int = 4, **resources: Any) -> None:
        self.k, self.resources = k, Resources(**resources)
        if reason := self.resources.missing(type(self)):
            raise InputError(f"the {self.name} selector can't be built: {reason}")
        self._lock = threading.RLock()  # LangChain's async methods run these in threads
        self._examples: list[dict[str, Any]] = []
        self._questions: list[str] = []
        self._fitted = False
        for example in examples:
            self.add_example(example)

    @classmethod
    def build(cls, examples: Sequence[Mapping[str, Any]], resources: Resources, **options: Any) -> Self:
        """The baseline with these resources; the other options are its own."""
        return cls(examples, **{each.name: getattr(resources, each.name) for each in fields(resources)}, **options)

    @property
    def examples(self) -> list[dict[str, Any]]:
        """The pool's examples, in the order of their positions."""
        return [dict(example) for example in self._examples]

    def add_example(self, example: Mapping[str, Any]) -> str:
        """Append one example to the pool; the next pick knows it.

        Returns:
            Its position, as a string.

        Raises:
            PoolError: a key is missing, or its value is not a string.
        """
        question = _text(example, _SOURCE, PoolError, "the example")
        if "spec" in self.needs:
            _text(example, _TARGET, PoolError, "the example")
        with self._lock:
            self._examples.append(dict(example))
            self._questions.append(question)
            self._fitted = False
            return str(len(self._examples) - 1)

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The k examples picked for one query, in pick order.

        Args:
            input_variables: the query, all variables but the target joined by blanks in the order of their keys, as
                LangChain's selectors do; for an oracle also the gold program, by the key `target`.

        Raises:
            InputError: a key is missing, a value is not a string, or the pool holds fewer than k examples.
        """
        keys = sorted(set(input_variables) - {_TARGET})
        if not keys:
            raise InputError(f"the query has no variable besides {_TARGET!r}")
        query = " ".join(_text(input_variables, key, InputError, "the query") for key in keys)
        references = [_text(input_variables, _TARGET, InputError, "the query")] if self.oracle else None
        with self._lock:
            positions = self.pick([query], self.k, references=references)[0]
            return [dict(self._examples[position]) for position in positions]

    def pick(
        self,
        queries: Sequence[str],
        k: int,
        exclude: Exclude = None,
        references: Sequence[str] | None = None,
    ) -> np.ndarray:
        """Pick k examples for each query; the picks for k are the first k of those for any larger k.

        Args:
            queries: the B queries' texts.
            k: picks per query.
            exclude: per query, the positions it may not pick.
            references: the queries' gold programs; only an oracle reads them.

        Returns:
            (B, k) int64: positions in the pool, in pick order, no position twice in a row; ties go to the lowest.

        Raises:
            InputError: k is more than what a query has left to pick from, or the arguments don't fit together.
        """
        if isinstance(queries, str):
            raise InputError("queries is one string; pass a list of strings")
        for query in queries:
            if not isinstance(query, str):
                raise InputError(f"a query is not a string but {type(query).__name__}")
        if references is not None and len(references) != len(queries):
            raise InputError(f"{len(references)} references for {len(queries)} queries")
        if references is None and self.oracle:
            raise InputError(f"the {self.name} selector needs the queries' gold programs (references)")
        with self._lock:
            excluded = checked_exclude(exclude, len(queries), len(self._examples), k)
            if not self._fitted:
                self._fit()
                self._fitted = True
            if len(queries) == 0:
                return np.empty((0, k), dtype=np.int64)
            return self._pick_for(queries, references, k, excluded)

    def _pick_for(
        self, queries: Sequence[str], references: Sequence[str] | None, k: int, excluded: list[np.ndarray]
    ) -> np.ndarray:
        """`_pick` with the gold programs as queries, for an oracle; one that reads both implements this."""
        return self._pick(references if references is not None and self.oracle else queries, k, excluded)

    def _fit(self) -> None:
        """Prepare for the pool as it now is."""

    @abstractmethod
    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        """Positions (B, k) int64; an oracle is given gold programs as queries. excluded[b] ascends."""

    def _programs(self) -> list[str]:
        return [example[_TARGET] for example in self._examples]


def in_blocks(pick: Callable[[slice], np.ndarray], n_queries: int, width: int) -> np.ndarray:
    """Positions (B, k) from `pick(block)` → (b, k), asked for blocks whose dense arrays (b, width) fit in memory."""
    return np.concatenate([pick(block) for block in row_blocks(n_queries, width)])


def top_k(scores: np.ndarray, k: int, excluded: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Positions (B, k) int64 of the k largest of each row, best first, ties to the lowest position.

    Args:
        scores: (B, N); set to −inf in place where a position is excluded.
        k: positions per row.
        excluded: per row, the positions that come last; empty: none in any row.
    """
    scores[places(excluded, scores.shape[1])] = -np.inf
    threshold = np.partition(scores, scores.shape[1] - k, axis=1)[:, -k]
    picked = np.empty((len(scores), k), dtype=np.int64)
    for row, (values, least) in enumerate(zip(scores, threshold, strict=True)):
        candidates = np.flatnonzero(values >= least)
        picked[row] = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return picked


def _text(values: Mapping[str, Any], key: str, error: type[InputError | PoolError], what: str) -> str:
    if key not in values:
        raise error(f"{what} has no key {key!r}; it has {', '.join(map(repr, sorted(values)))}")
    value = values[key]
    if not isinstance(value, str):
        raise error(f"{what}'s {key!r} is not a string but {type(value).__name__}")
    return value
