"""BM25 over the questions, and BM25 that knows names of tables and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from langchain_rcr.policy.schema import words
from rcr_trainer.baselines.base import Baseline, top_k
from rcr_trainer.baselines.linking import is_linked, linker, program_words
from rcr_trainer.data.okapi import BM25Scorer


class BM25Selector(Baseline):
    """Picks the k examples whose questions score highest for the query."""

    name: ClassVar[str] = "bm25"

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(self._scorer.scores(queries), k, excluded)


class BM25SchemaSelector(BM25Selector):
    """BM25 over the words of questions and of the names in their programs; a query's words that are names count twice.

    Which words are names: see `linking`.
    """

    name: ClassVar[str] = "bm25_schema"
    needs: ClassVar[tuple[str, ...]] = ("spec",)

    def _fit(self) -> None:
        spec = self.resources.spec
        self._names = linker(self.examples, self.resources.schemas, spec)
        texts = zip(self._questions, self._programs, strict=True)
        self._scorer = BM25Scorer([" ".join([*words(q), *program_words(p, spec.language)]) for q, p in texts])

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        found = [(words(query), self._names(query)) for query in queries]
        asked = [" ".join([*said, *(word for word in said if is_linked(word, names))]) for said, names in found]
        return top_k(self._scorer.scores(asked), k, excluded)
