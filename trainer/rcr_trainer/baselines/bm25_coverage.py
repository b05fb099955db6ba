"""BM25 with coverage: the words that the picks already match well count no more (Set-BM25).

BM25 is a sum over the query's distinct words of a weight of (word, question), so it is a measure of coverage, and its
set version takes each word's largest weight over the picks: Eq. 2, 3 and 6 of Gupta, Gardner and Singh, "Coverage-based
Example Selection for In-Context Learning", Findings of EMNLP 2023 ("BM25 + Coverage" in their Table 4), maximised by
their Algorithm 1. As in their Eq. 2, a word that the query repeats counts once; `BM25Selector`, like rank_bm25, counts
it as often as it occurs. Departure: the picks stay in the order of picking, where the paper orders a prompt by the
examples' own scores (section 6.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rcr_trainer.baselines.base import Baseline
from rcr_trainer.baselines.bm25 import BM25Scorer, tokenize
from rcr_trainer.baselines.set_cover import greedy_set_cover
from rcr_trainer.programs.coverage import row_blocks


class BM25CoverageSelector(Baseline):
    """Picks, one after the other, the example that adds most to the query words' best BM25 weights so far."""

    name: ClassVar[str] = "bm25_coverage"

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        words = [list(dict.fromkeys(tokenize(query))) for query in queries]
        every_position = np.arange(len(self._questions))
        picked = np.empty((len(queries), k), dtype=np.int64)
        for block in row_blocks(len(queries), max(1, *map(len, words)) * len(self._questions)):
            owner = np.repeat(np.arange(block.stop - block.start), [len(own) for own in words[block]])
            weights = self._weights([word for own in words[block] for word in own])
            picked[block] = greedy_set_cover(weights, np.ones(len(owner)), owner, every_position, excluded[block], k)
        return picked

    def _weights(self, words: Sequence[str]) -> np.ndarray:
        """(T, N) float64: the BM25 score of every question for each word alone; 0 for an unknown word."""
        distinct = {word: row for row, word in enumerate(dict.fromkeys(words))}
        return self._scorer.scores(list(distinct))[[distinct[word] for word in words]]
