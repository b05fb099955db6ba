"""Columns beside those of structures: the words of questions.

An example shows words of the question asked, as it shows structures. A word's hash gives it one of `WORDS` columns, so
words that appear after training have one too. Set-BSR also covers the question's words, by their vectors (Gupta,
Gardner and Singh, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import SparseRows
from langchain_rcr.families.arrays import sparse_rows
from langchain_rcr.families.folds import text_hash
from langchain_rcr.families.ngrams import ngrams

WORDS = 256
"""Number of columns. Picks with 512, or with one per word, were nearly the same in trials."""

_LEAST = 0.1
"""Makes a word that is in all questions count too."""
_READ = 64
"""Letters read of a word: a cache of arbitrarily long words would be unbounded."""


def word_rows(questions: Sequence[str]) -> SparseRows:
    """(N, WORDS) 1 in the columns of each question's words."""
    columns = [sorted({_column(word[:_READ]) for word in ngrams(Item(question), 1)}) for question in questions]
    return sparse_rows([dict.fromkeys(places, 1.0) for places in columns], WORDS)


def rarity(questions: Sequence[str]) -> NDArray[np.float32]:
    """(WORDS,) each column's rarity: log((N + 1) / (n + 1)) if n of the N questions have it, and a little more."""
    counts = np.bincount(word_rows(questions).columns, minlength=WORDS)
    found: NDArray[np.float32] = (np.log((len(questions) + 1) / (counts + 1)) + _LEAST).astype(np.float32)
    return found


@lru_cache(maxsize=1 << 14)
def _column(word: str) -> int:
    return text_hash(word) % WORDS
