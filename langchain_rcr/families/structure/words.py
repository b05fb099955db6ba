"""Columns beside those of structures: the words of questions, and their homes (`Item.home`), such as databases.

An example shows words of the question that is asked, as it shows structures. Each word has one of `WORDS` columns by
its hash, so that words which come in after training have theirs, too. Covering the question's words is what Set-BSR
does (Gupta, Gardner and Singh, 2023), there by their vectors. A home has some of `HOMES` columns, by its hash, too.
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
from langchain_rcr.families.structure.inventory import marks

WORDS = 256
"""Columns. Picks with 512, or with one for each word, were nearly the same in trials."""

HOMES = 64
"""Columns of homes, where examples have any."""
_MARKS = 4
"""Columns of a home, with ±1/2 in each; two homes share a quarter of one on average."""
_LEAST = 0.1
"""So that a word of all questions counts, too."""
_READ = 64
"""Letters read of a word: a cache of words of any length would have no bound."""


def word_rows(questions: Sequence[str]) -> SparseRows:
    """(N, WORDS) 1 in the columns of each question's words."""
    columns = [sorted({_column(word[:_READ]) for word in ngrams(Item(question), 1)}) for question in questions]
    return sparse_rows([dict.fromkeys(places, 1.0) for places in columns], WORDS)


def home_rows(homes: Sequence[str]) -> SparseRows:
    """(N, HOMES) a unit vector for each home; 0 where it is empty.

    Of negative numbers, for questions and examples, so that no state takes a home for a need.
    """
    columns = [sorted(marks(home, HOMES, _MARKS)) if home else () for home in homes]
    return sparse_rows([dict.fromkeys(places, -(_MARKS**-0.5)) for places in columns], HOMES)


def rarity(questions: Sequence[str]) -> NDArray[np.float32]:
    """(WORDS,) what each column tells: log((N + 1) / (n + 1)), n of the N questions having it, and a little more."""
    counts = np.bincount(word_rows(questions).columns, minlength=WORDS)
    found: NDArray[np.float32] = (np.log((len(questions) + 1) / (counts + 1)) + _LEAST).astype(np.float32)
    return found


@lru_cache(maxsize=1 << 14)
def _column(word: str) -> int:
    return text_hash(word) % WORDS
