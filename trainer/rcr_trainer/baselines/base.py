"""What all baselines share: the pool, LangChain's selector interface, checks. Each baseline adds its ranking."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError, PoolError
from langchain_rcr.index.ranking import checked_exclude
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.baselines import BASELINES, LearnedSettings
from rcr_trainer.data.arrays import row_blocks
from rcr_trainer.llm.server import Scorer

Exclude: TypeAlias = Sequence[Collection[int]] | None
"""The pool positions that each query may not pick; None: no restrictions."""

Embed: TypeAlias = Callable[[Sequence[str]], np.ndarray]  # texts (n) to vectors (n, D) of any length

EmbedTokens: TypeAlias = Callable[[Sequence[str]], list[np.ndarray]]
"""Texts to the contextual vectors of their tokens, (tokens, D) per text."""

_SOURCE, _TARGET = "source", "target"
_MISSING = {
    "embed": "no embeddings were given",
    "embed_tokens": "no embeddings of tokens were given",
    "score": "no scoring language model was given",
    "policy": "no text encoders were given",
    "encode": "no pretrained models can be opened",
}


@dataclass(frozen=True)
class Resources:
    """What baselines may need besides the pool."""

    spec: ProgramSpec = field(default_factory=ProgramSpec)  # how programs are read
    seed: int = 0  # of random draws
    embed: Embed | None = None  # embeds questions: each distinct one of the pool once, and every query
    embed_tokens: EmbedTokens | None = None  # embeds their tokens
    score: Scorer | None = None  # the scoring language model
    policy: Callable[[Sequence[Item]], TriEncoder] | None = None  # builds untrained text encoders from the pool's items
    learning: LearnedSettings = field(default_factory=LearnedSettings)  # how those are trained
    # Opens a pretrained model, given the selector's name and the model's.
    encode: Callable[[str, str], Embed] | None = None
    prompt: Prompt = APPENDIX_D  # how the scoring language model is asked
    # The schema of a query's database, by the query's text, where known; examples carry their own.
    schemas: Mapping[str, str] = field(default_factory=dict)

    def missing(self, baseline: type[Baseline]) -> str:
        """Why the baseline can't be built; empty if it can."""
        return next((_MISSING[need] for need in baseline.needs if getattr(self, need) is None), "")


class TradeOff(NamedTuple):
    """A number tuned on development queries; an untuned selector would be too easy to beat."""

    parameter: str  # the attribute of the selector
    grid: tuple[float, ...]  # the values to try


class Baseline(BaseExampleSelector, ABC):
    """An example selector that also picks positions for many queries at once.

    A subclass implements `_pick`, and `_fit` if it prepares something when the pool has changed.

    Args:
        examples: the pool, one dict per example: the question under `source`, the program under `target`.
        k: examples that `select_examples` returns.
        **resources: fields of `Resources`; `**vars(resources)` gives all of them.

    Attributes:
        examples: the pool, by position.

    Raises:
        InputError: a resource that it needs is missing.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # fields of `Resources`; with `spec` it reads the pool's programs
    oracle: ClassVar[bool] = False  # whether it sees the gold programs: a ceiling, not a competitor
    shows: ClassVar[bool] = True  # whether its picks are shown; if not, a prompt has no examples
    trade_off: ClassVar[TradeOff | None] = None  # what is tuned on development queries, if anything

    def __init__(self, examples: Sequence[Mapping[str, Any]], *, k: int = 4, **resources: Any) -> None:
        self.k, self.resources = k, Resources(**resources)
        if reason := self.resources.missing(type(self)):
            raise InputError(f"the {self.name} selector can't be built: {reason}")
        self._lock = threading.RLock()  # LangChain's async methods run these in threads
        self.examples: list[dict[str, Any]] = []
        self._fitted = False
        for example in examples:
            self.add_example(example)

    @property
    def name(self) -> str:
        """The name used in settings and reports."""
        place = f"{type(self).__module__}:{type(self).__name__}"
        return next((name for name, own in BASELINES.items() if own == place), type(self).__name__)

    def add_example(self, example: Mapping[str, Any]) -> str:
        """Append an example to the pool; returns its position, as a string.

        Raises:
            PoolError: a key is missing, or its value is not a string.
        """
        _text(example, _SOURCE, PoolError, "the example")
        if "spec" in self.needs:
            _text(example, _TARGET, PoolError, "the example")
        with self._lock:
            self.examples.append(dict(example))
            self._fitted = False
            return str(len(self.examples) - 1)

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The k examples picked for one query, in pick order.

        As in LangChain's selectors, the query is all values but `target`, joined by spaces in the order of their keys.
        An oracle also needs `target`, the gold program.

        Raises:
            InputError: a key is missing, a value is not a string, or the pool has fewer than k examples.
        """
        keys = sorted(set(input_variables) - {_TARGET})
        if not keys:
            raise InputError(f"the query has no variable besides {_TARGET!r}")
        query = " ".join(_text(input_variables, key, InputError, "the query") for key in keys)
        references = [_text(input_variables, _TARGET, InputError, "the query")] if self.oracle else None
        with self._lock:
            positions = self.pick([query], self.k, references=references)[0]
            return [dict(self.examples[position]) for position in positions if self.shows]

    def pick(
        self, queries: Sequence[str], k: int, exclude: Exclude = None, references: Sequence[str] | None = None
    ) -> np.ndarray:
        """Pick k examples for each of B queries, without the positions that it may not pick.

        The picks for k begin those for any larger k. An oracle also needs the gold programs (`references`).

        Returns:
            (B, k) int64 positions in pick order, distinct within a row; ties go to the lowest.

        Raises:
            InputError: k is more than a query has left to pick from, or the arguments don't fit together.
        """
        if references is None and self.oracle:
            raise InputError(f"the {self.name} selector needs the queries' gold programs (references)")
        with self._lock:
            excluded = checked_exclude(exclude, len(queries), len(self.examples), k)
            asked = [*zip(queries, references, strict=True)] if references is not None and self.oracle else queries
            if not self._fitted:
                self._fit()
                self._fitted = True
            picked = np.empty((len(queries), k), dtype=np.int64)
            for block in row_blocks(len(queries), len(self.examples)):
                found = np.asarray(self._pick(asked[block], k, excluded[block]))
                if found.shape != picked[block].shape or found.dtype.kind != "i":  # NumPy would repeat a row, or round
                    wanted = f"positions {picked[block].shape}"
                    raise InputError(f"the {self.name} selector picked {found.dtype} {found.shape}, not {wanted}")
                picked[block] = found
            return picked

    def _fit(self) -> None:
        """Prepare for the current pool."""

    @abstractmethod
    def _pick(self, queries: Sequence[Any], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        """Positions (b, k) int64 for texts, or for an oracle's pairs of text and program; each `excluded` ascends."""

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """The most texts that a language model scores before k picks, for this many training questions."""
        return 0

    @property
    def _questions(self) -> list[str]:
        return [example[_SOURCE] for example in self.examples]

    @property
    def _programs(self) -> list[str]:
        return [example[_TARGET] for example in self.examples]


def _text(values: Mapping[str, Any], key: str, error: type[InputError | PoolError], what: str) -> str:
    if key not in values:
        raise error(f"{what} has no key {key!r}; it has {', '.join(map(repr, sorted(values)))}")
    value = values[key]
    if not isinstance(value, str):
        raise error(f"{what}'s {key!r} is not a string but {type(value).__name__}")
    return value
