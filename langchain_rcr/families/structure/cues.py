"""What a question's words and phrases say about small structures: evidence that no other word can cancel.

A noisy-OR: P(s|x) = 1 − exp(−Σ_f x_f · w_fs) with w ≥ 0, over the phrases f of the question. A phrase can only speak
for a structure, never against it. So a need is recognised even in a question that combines structures as no training
question does, where a model of whole questions has learned that they exclude each other.
"""

from __future__ import annotations

import numpy as np

from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import FloatArray, IntArray, SparseRows, sparse

ROUNDS = 25
"""Rounds of expectation maximisation; the trials that chose the method took 20 to 30."""
LEAST = 3
"""A phrase must occur in at least this many questions."""
MOST = 3000
"""The most phrases; the most frequent are kept."""
_START = 0.3
"""The P(s|f) that fitting starts from."""
_PRIOR = 0.5
"""Added to the number of questions that a phrase occurs in, so that rare phrases say less."""
_FLOOR = 1e-9


def phrases(bags: SparseRows) -> IntArray:
    """(V,) the column of each n-gram of the questions (N, V) that is a phrase; −1: it isn't one."""
    counts = np.bincount(bags.columns, minlength=bags.dim)
    order = np.argsort(-counts, kind="stable")
    chosen = np.sort(order[counts[order] >= LEAST][:MOST])
    column = np.full(bags.dim, -1)
    column[chosen] = np.arange(len(chosen))
    return column


def incidence(bags: SparseRows, column: IntArray, count: int) -> SparseRows:
    """(N, F + 1) which of F phrases each question has, and a constant 1; `column` maps n-grams to phrases, −1: none."""
    place = column[bags.columns].astype(np.int32)
    said = SparseRows(bags.starts, place, np.ones(len(place), dtype=np.float32), count).only(place >= 0)
    return said.beside(sparse(np.ones((len(bags), 1), dtype=np.float32)))


def fit(present: SparseRows, targets: FloatArray, rounds: int = ROUNDS) -> FloatArray:
    """Weights (F + 1, S) ≥ 0 of the noisy-OR, by multiplicative expectation maximisation.

    The targets (N, S) are 0 or 1: which structures the program of each question has.
    """
    size, count = targets.shape[1], np.bincount(present.columns, minlength=present.dim)
    rows, columns = np.nonzero(targets)
    # Only weights between a structure and the phrases of its questions can become positive. Each pair of a question and
    # a structure of its program sums some of them.
    said = present.select(rows)
    lengths = np.diff(said.starts)
    cells = said.columns.astype(np.int64) * size + np.repeat(columns, lengths)
    taken = np.zeros(present.dim * size, dtype=bool)
    taken[cells] = True
    used = np.flatnonzero(taken)
    place = (np.cumsum(taken) - 1)[cells]
    scale = (1 / (count[used // size] + _PRIOR)).astype(np.float32)
    weights = np.zeros(len(taken), dtype=np.float32)
    found = _START * scale * np.bincount(place).astype(np.float32)
    for _ in track(range(rounds), "reading phrases"):
        likely = 1 - np.exp(-np.add.reduceat(found[place], said.starts[:-1]))
        shares = np.repeat(1 / (likely + _FLOOR), lengths)
        found *= scale * np.bincount(place, shares).astype(np.float32)
    weights[used] = found
    return weights.reshape(present.dim, size)


def likelihoods(present: SparseRows, weights: FloatArray) -> FloatArray:
    """(N, S) P(s|x), for weights (F + 1, S)."""
    return 1 - np.exp(-present.times(weights))
