"""BM25 over the questions, BM25 with coverage (Set-BM25), and BM25 that knows names of tables and columns.

BM25 sums a weight of (word, question) over the query's words, so it measures coverage; its set version takes each
word's largest weight over the picks: Eq. 2, 3 and 6 and Algorithm 1 of Gupta, Gardner and Singh, "Coverage-based
Example Selection for In-Context Learning", Findings of EMNLP 2023 ("BM25 + Coverage" in their Table 4). As in their
Eq. 2, a repeated word counts once there; `BM25Selector` counts it as often as it occurs, like rank_bm25. Departure: a
prompt shows the first pick last, where theirs goes by each example's own score (section 6.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from langchain_rcr.policy.schema import words
from rcr_trainer.baselines.base import Baseline, top_k
from rcr_trainer.baselines.linking import is_linked, linker, program_words
from rcr_trainer.data.coverage import greedy_set_cover
from rcr_trainer.data.okapi import BM25Scorer, tokenize


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
        self._names = linker(self._examples, self.resources.schemas, spec)
        texts = zip(self._questions, self._programs(), strict=True)
        self._scorer = BM25Scorer([" ".join([*words(q), *program_words(p, spec.language)]) for q, p in texts])

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        found = [(words(query), self._names(query)) for query in queries]
        asked = [" ".join([*said, *(word for word in said if is_linked(word, names))]) for said, names in found]
        return top_k(self._scorer.scores(asked), k, excluded)


class BM25CoverageSelector(BM25Selector):
    """Picks, one after the other, the example that adds most to the query words' best BM25 weights so far."""

    name: ClassVar[str] = "bm25_coverage"

    def _width(self, queries: Sequence[str]) -> int:
        return max([1, *(len(_words(query)) for query in queries)])

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        words = [_words(query) for query in queries]
        owner = np.repeat(np.arange(len(words)), [len(own) for own in words])
        weights = self._weights([word for own in words for word in own])
        return greedy_set_cover(weights, owner, np.arange(len(self._questions)), excluded, k)

    def _weights(self, words: Sequence[str]) -> np.ndarray:
        """(T, N) the BM25 score of every question for each word alone."""
        distinct = {word: row for row, word in enumerate(dict.fromkeys(words))}
        return self._scorer.scores(list(distinct))[[distinct[word] for word in words]]


def _words(query: str) -> list[str]:
    return list(dict.fromkeys(tokenize(query)))
