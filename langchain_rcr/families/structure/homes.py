"""What a question's home (`Item.home`), such as its database, tells: its columns, and which structures only it has.

A home's hash chooses some of `HOMES` columns. Most structures that only one database's programs have name its tables,
so they are of little use to another database's questions, however similar these sound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from langchain_rcr.basics.items import text_hash
from langchain_rcr.basics.rows import BoolArray, FloatArray, IntArray, SparseRows
from langchain_rcr.families.structure.inventory import marks

HOMES = 64
"""Number of home columns, if examples have homes."""
_MARKS = 4
"""Columns per home, with ±1/2 in each; two homes share a quarter of a column on average."""


def home_rows(homes: Sequence[str]) -> SparseRows:
    """(N, HOMES) a unit vector for each home; 0 where it is empty.

    The numbers are negative, for questions and examples, so that no state takes a home for a need.
    """
    columns = [sorted(marks(home, HOMES, _MARKS)) if home else () for home in homes]
    return SparseRows.of([dict.fromkeys(places, -(_MARKS**-0.5)) for places in columns], HOMES)


def home_hashes(homes: Sequence[str]) -> IntArray:
    """(N,) a number for each home; 0 where it is empty."""
    return np.array([text_hash(home) if home else 0 for home in homes], dtype=np.int64)


def sole_homes(known: IntArray, has: FloatArray, homes: IntArray) -> IntArray:
    """(C,) the hash of the only home whose programs have each column; 0 if several or none have it.

    `known` (C,) is the same without these programs, which have columns (N, C) and hashes of homes (N,).
    """
    others: BoolArray = ((has > 0) & (homes[:, None] != known)).any(axis=0)
    return np.where(others, 0, known)


def learn_homes(has: SparseRows, homes: IntArray) -> tuple[IntArray, float]:
    """`sole_homes` of all programs (N, C), and the weight of a column with one home for questions of other homes.

    The weight is how often a home has a column that one other home has, relative to a column that several others have:
    a few hundredths where databases share no table, nearly 1 where homes share everything.
    """
    every, numbers = np.unique(homes, return_inverse=True)
    count, width = len(every), has.dim
    home, column = np.divmod(np.unique(numbers[has.owner] * width + has.columns), width)
    counts, sole = np.bincount(column, minlength=width), np.zeros(width, dtype=np.int64)
    sole[column] = every[home]
    # Pairs of a column and a home, by how many other homes have the column: one or several.
    one, two, more = (int(kept.sum()) for kept in (counts == 1, counts == 2, counts > 2))
    have_one, lack_one = 2 * two, (count - 1) * one
    have_several, lack_several = int(counts[counts > 2].sum()), (count - 2) * two
    lack_several += count * more - have_several
    ratio = _rate(have_one, lack_one) / _rate(have_several, lack_several)
    return np.where(counts == 1, sole, 0), min(1.0, ratio)


def useful(sole: IntArray, elsewhere: FloatArray, homes: IntArray) -> FloatArray:
    """(N, C) the weight of each column for questions of these homes: `elsewhere` if only one other home has it, else 1.

    Every column counts fully for a question whose home isn't known.
    """
    own = homes[:, None]
    return np.where((sole == 0) | (sole == own) | (own == 0), np.float32(1), elsewhere)


def _rate(present: int, absent: int) -> float:
    return (present + 1) / (present + absent + 1)
