"""BM25 over the questions: rank_bm25's model, scored as one sparse product."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np
from scipy import sparse

from langchain_rcr.errors import MissingExtraError
from rcr_trainer.baselines.base import Baseline, top_k_of

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

    Raises:
        MissingExtraError: rank_bm25 is not installed.
    """

    def __init__(self, corpus_texts: Sequence[str]) -> None:
        try:
            from rank_bm25 import BM25Okapi
        except ImportError as error:
            raise MissingExtraError("rank_bm25", "train") from error
        tokens = [tokenize(text) for text in corpus_texts]
        self._columns: dict[str, int] = {}
        self._weights = sparse.csr_array((0, len(tokens)), dtype=np.float64)
        if not any(tokens):
            return  # rank_bm25 divides by zero here
        model = BM25Okapi(tokens)
        self._columns = {word: i for i, word in enumerate(model.idf)}
        words = np.fromiter((self._columns[word] for word in chain.from_iterable(model.doc_freqs)), dtype=np.int32)
        documents = np.repeat(np.arange(len(tokens)), [len(counts) for counts in model.doc_freqs])
        counts = np.fromiter(chain.from_iterable(c.values() for c in model.doc_freqs), dtype=np.float64)
        idf = np.fromiter(model.idf.values(), dtype=np.float64)
        length = np.asarray(model.doc_len)[documents] / model.avgdl
        weights = idf[words] * counts * (model.k1 + 1) / (counts + model.k1 * (1 - model.b + model.b * length))
        self._weights = sparse.csr_array((weights, (words, documents)), shape=(len(idf), len(tokens)))

    def scores(self, queries: Sequence[str]) -> np.ndarray:
        """(B, N) float64: the score of every document for each of the B queries; unknown words add nothing."""
        found = [Counter(w for w in tokenize(query) if w in self._columns) for query in queries]
        words = np.fromiter((self._columns[word] for word in chain.from_iterable(found)), dtype=np.int32)
        rows = np.repeat(np.arange(len(found)), [len(c) for c in found])
        counts = np.fromiter(chain.from_iterable(c.values() for c in found), dtype=np.float64)
        bags = sparse.csr_array((counts, (rows, words)), shape=(len(found), len(self._columns)))
        return (bags @ self._weights).toarray()


class BM25Selector(Baseline):
    """Picks the k examples whose questions score highest for the query."""

    name: ClassVar[str] = "bm25"

    def _fit(self) -> None:
        self._scorer = BM25Scorer(self._questions)

    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        def score(block: slice) -> np.ndarray:
            return self._scorer.scores(queries[block])

        return top_k_of(score, len(queries), len(self._questions), k, excluded)
