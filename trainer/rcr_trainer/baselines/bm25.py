"""BM25 over the questions (rank_bm25's model, scored as one sparse product), and BM25 with coverage (Set-BM25).

BM25 is a sum over the query's distinct words of a weight of (word, question), so it is a measure of coverage, and its
set version takes each word's largest weight over the picks: Eq. 2, 3 and 6 of Gupta, Gardner and Singh, "Coverage-based
Example Selection for In-Context Learning", Findings of EMNLP 2023 ("BM25 + Coverage" in their Table 4), maximised by
their Algorithm 1. As in their Eq. 2, a word that the query repeats counts once; `BM25Selector`, like rank_bm25, counts
it as often as it occurs. Departure: the picks stay in the order of picking, where the paper orders a prompt by the
examples' own scores (section 6.4).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np
from rank_bm25 import BM25Okapi
from scipy import sparse

from rcr_trainer.baselines.base import Baseline, in_blocks, top_k
from rcr_trainer.baselines.set_cover import greedy_set_cover

_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """Lower-case words, and punctuation marks one by one."""
    return _TOKEN.findall(text.lower())


class BM25Scorer:
    """Scores texts against a corpus just as `rank_bm25.BM25Okapi(...).get_scores` does, all queries at once.

    A document's score is a sum over the query's words of a weight of (word, document), so the weights make up a
    matrix (words, documents) and scoring is the product of the queries' word counts with it.

    Args:
        corpus_texts: the N documents.
    """

    def __init__(self, corpus_texts: Sequence[str]) -> None:
        tokens = [tokenize(text) for text in corpus_texts]
        self._columns: dict[str, int] = {}
        self._weights = sparse.csr_array((0, len(tokens)), dtype=np.float64)
        if not any(tokens):
            return  # rank_bm25 divides by zero here
        model = BM25Okapi(tokens)
        self._columns = {word: i for i, word in enumerate(model.idf)}
        frequency = self._bags(model.doc_freqs).tocoo()
        documents, words, counts = frequency.row, frequency.col, frequency.data
        idf = np.fromiter(model.idf.values(), dtype=np.float64)
        length = np.asarray(model.doc_len)[documents] / model.avgdl
        weights = idf[words] * counts * (model.k1 + 1) / (counts + model.k1 * (1 - model.b + model.b * length))
        self._weights = sparse.csr_array((weights, (words, documents)), shape=(len(idf), len(tokens)))

    def scores(self, queries: Sequence[str]) -> np.ndarray:
        """(B, N) float64: the score of every document for each of the B queries; unknown words add nothing."""
        known = [Counter(w for w in tokenize(query) if w in self._columns) for query in queries]
        return (self._bags(known) @ self._weights).toarray()

    def _bags(self, found: Sequence[dict[str, int]]) -> sparse.csr_array:
        """(B, words) float64: how often each text has each word."""
        words = np.fromiter((self._columns[word] for word in chain.from_iterable(found)), dtype=np.int32)
        rows = np.repeat(np.arange(len(found)), [len(counts) for counts in found])
        counts = np.fromiter(chain.from_iterable(c.values() for c in found), dtype=np.float64)
        return sparse.csr_array((counts, (rows, words)), shape=(len(found), len(self._columns)))


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
