"""BM25 over the questions (rank_bm25's model, scored as one sparse product), and BM25 with coverage (Set-BM25).

BM25 is a sum over the query's distinct words of a weight of (word, question), so it is a measure of coverage, and its
set version takes each word's largest weight over the picks: Eq. 2, 3 and 6 of Gupta, Gardner and Singh, "Coverage-based
Example Selection for In-Context Learning", Findings of EMNLP 2023 ("BM25 + Coverage" in their Table 4), maximised by
their Algorithm 1. As in their Eq. 2, a word that the query repeats counts once; `BM25Selector`, like rank_bm25, counts
it as often as it occurs. Departure: a prompt shows the picks in reverse, the first last, where the paper orders it by
the examples' own scores (section 6.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rcr_trainer.baselines.base import Baseline, in_blocks, top_k
from rcr_trainer.data.coverage import greedy_set_cover
from rcr_trainer.data.okapi import BM25Scorer, tokenize


class BM25Selector(Baseline):
    """Picks the k examples whose questions score highest for the query."""

    name: ClassVar[str] = "bm25"

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        def pick(block: slice) -> np.ndarray:
            return top_k(self._scorer.scores(queries[block]), k, excluded[block])

        return in_blocks(pick, len(queries), len(self._questions))


class BM25CoverageSelector(BM25Selector):
    """Picks, one after the other, the example that adds most to the query words' best BM25 weights so far."""

    name: ClassVar[str] = "bm25_coverage"

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        words = [list(dict.fromkeys(tokenize(query))) for query in queries]
        every_position = np.arange(len(self._questions))

        def pick(block: slice) -> np.ndarray:
            owner = np.repeat(np.arange(block.stop - block.start), [len(own) for own in words[block]])
            weights = self._weights([word for own in words[block] for word in own])
            return greedy_set_cover(weights, owner, every_position, excluded[block], k)

        return in_blocks(pick, len(queries), max(1, *map(len, words)) * len(self._questions))

    def _weights(self, words: Sequence[str]) -> np.ndarray:
        """(T, N) float64: the BM25 score of every question for each word alone; 0 for an unknown word."""
        distinct = {word: row for row, word in enumerate(dict.fromkeys(words))}
        return self._scorer.scores(list(distinct))[[distinct[word] for word in words]]
