"""Columns beside those of structures: the words of questions.

An example shows words of the question that is asked, as it shows structures. Each word has one of `WORDS` columns by
its hash, so that words which come in after training have theirs, too. Covering the question's words is what Set-BSR
does (Gupta, Gardner and Singh, 2023), there by their vectors.
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
"""Columns. Picks with 512, or with one for each word, were nearly the same in trials."""

_LEAST = 0.1
"""So that a word of all questions counts, too."""
_READ = 64
"""Letters read of a word: a cache of words of any length would have no bound."""


def word_rows(questions: Sequence[str]) -> SparseRows:
    """(N, WORDS) 1 in the columns of each question's words."""
    columns = [sorted({_column(word[:_READ]) for word in ngrams(Item(question), 1)}) for question in questions]
    return sparse_rows([dict.fromkeys(places, 1.0) for places in columns], WORDS)


def rarity(questions: Sequence[str]) -> NDArray[np.float32]:
    """(WORDS,) what each column tells: log((N + 1) / (n + 1)), n of the N questions having it, and a little more."""
    counts = np.bincount(word_rows(questions).columns, minlength=WORDS)
    found: NDArray[np.float32] = (np.log((len(questions) + 1) / (counts + 1)) + _LEAST).astype(np.float32)
    return found


@lru_cache(maxsize=1 << 14)
def _column(word: str) -> int:
    return text_hash(word) % WORDS
