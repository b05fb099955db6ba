"""Okapi BM25: rank_bm25's model, scored as one sparse product for all queries at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
from rank_bm25 import BM25Okapi
from scipy import sparse

from langchain_rcr.basics.items import WORD, folded

_TOKEN = re.compile(rf"{WORD}|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """Lower-case words, and punctuation marks one by one."""
    return _TOKEN.findall(folded(text))


class BM25Scorer:
    """The scores of `rank_bm25.BM25Okapi.get_scores`, for all queries at once.

    A score sums (word, document) weights over a query's words, so all scores are one product of word counts (B, words)
    with weights (words, N).
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
