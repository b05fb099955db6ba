"""What all baselines share: the pool, LangChain's selector interface, checks; a baseline adds how it ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from langchain_core.example_selectors import BaseExampleSelector

from langchain_rcr.errors import InputError, PoolError
from rcr_trainer.programs.coverage import checked_exclude, excluded_entries, row_blocks

Exclude: TypeAlias = Sequence[Collection[int]] | None
"""Per query, the positions in the pool that it may not pick; None: none for any query."""


class Baseline(BaseExampleSelector, ABC):
    """An example selector that also picks positions for many queries at once.

    Owns the pool, the reading of questions and programs out of examples, and every check of arguments. A subclass
    says how it prepares (`_fit`, called when the pool has changed, before the next pick) and ranks (`_pick`).

    Args:
        examples: the pool, one dict per example.
        k: examples that `select_examples` returns.
        source_key: the example's key for its question.
        target_key: the example's key for its program.
        input_keys: as in LangChain's own selectors: the variables whose values, joined by a blank in the order of
            their keys, make up the text of examples and queries alike. None: an example's text is its question, a
            query's text all the variables given, less the target.
        example_keys: the keys to return of each example; None: all.
    """

    name: ClassVar[str]
    needs_references: ClassVar[bool] = False
    reads_programs: ClassVar[bool] = False

    def __init__(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        k: int = 4,
        source_key: str = "source",
        target_key: str = "target",
        input_keys: Sequence[str] | None = None,
        example_keys: Sequence[str] | None = None,
    ) -> None:
        self.k = k
        self.source_key = source_key
        self.target_key = target_key
        self.input_keys = list(input_keys) if input_keys is not None else None
        self.example_keys = list(example_keys) if example_keys is not None else None
        self._lock = threading.RLock()  # LangChain's async methods run these in threads
        self._examples: list[dict[str, Any]] = []
        self._questions: list[str] = []
        self._fitted = False
        for example in examples:
            self.add_example(example)

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
        question = _text(example, self.input_keys or [self.source_key], PoolError, "the example")
        if self.reads_programs:
            _text(example, [self.target_key], PoolError, "the example")
        with self._lock:
            self._examples.append(dict(example))
            self._questions.append(question)
            self._fitted = False
            return str(len(self._examples) - 1)

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The k examples picked for one query, in pick order.

        Args:
            input_variables: the query; for a selector that needs references also the gold program, by target_key.

        Raises:
            InputError: a key is missing, a value is not a string, or the pool holds fewer than k examples.
        """
        keys = self.input_keys or sorted(set(input_variables) - {self.target_key})
        if not keys:
            raise InputError(f"the query has no variable besides {self.target_key!r}")
        query = _text(input_variables, keys, InputError, "the query")
        references = None
        if self.needs_references:
            references = [_text(input_variables, [self.target_key], InputError, "the query")]
        with self._lock:
            positions = self.pick([query], self.k, references=references)[0]
            picked = [self._examples[position] for position in positions]
        return [{key: example[key] for key in self.example_keys or example} for example in picked]

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
            references: the queries' gold programs; only the oracle reads them.

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
        if references is None and self.needs_references:
            raise InputError(f"the {self.name} selector needs the queries' gold programs (references)")
        with self._lock:
            excluded = checked_exclude(exclude, len(queries), len(self._examples), k)
            if not self._fitted:
                self._fit()
                self._fitted = True
            if len(queries) == 0:
                return np.empty((0, k), dtype=np.int64)
            return self._pick(queries, k, excluded, references)

    def _fit(self) -> None:
        """Prepare for the pool as it now is."""

    @abstractmethod
    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        """Positions (B, k) int64 for checked arguments; excluded[b] holds positions in ascending order."""

    def _programs(self) -> list[str]:
        return [example[self.target_key] for example in self._examples]


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions (B, k) int64 of the k largest of each row of scores (B, N), best first, ties to the lowest position."""
    threshold = np.partition(scores, scores.shape[1] - k, axis=1)[:, -k]
    picked = np.empty((len(scores), k), dtype=np.int64)
    for row, (values, least) in enumerate(zip(scores, threshold, strict=True)):
        candidates = np.flatnonzero(values >= least)
        picked[row] = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return picked


def top_k_of(
    score: Callable[[slice], np.ndarray], n_queries: int, n_pool: int, k: int, excluded: list[np.ndarray]
) -> np.ndarray:
    """Positions (B, k) of the best scores, `score(block)` -> (b, N) being asked for blocks that fit in memory."""
    picked = np.empty((n_queries, k), dtype=np.int64)
    for block in row_blocks(n_queries, n_pool):
        scores = score(block)
        scores[excluded_entries(excluded[block])] = -np.inf
        picked[block] = top_k(scores, k)
    return picked


def _text(values: Mapping[str, Any], keys: Sequence[str], error: type[InputError | PoolError], what: str) -> str:
    """The values of the keys, joined as LangChain's selectors join them."""
    for key in keys:
        if key not in values:
            raise error(f"{what} has no key {key!r}; it has {', '.join(map(repr, sorted(values)))}")
        if not isinstance(values[key], str):
            raise error(f"{what}'s {key!r} is not a string but {type(values[key]).__name__}")
    return " ".join(values[key] for key in sorted(keys))
