"""Draws pools and questions of any size that look like real ones.

They imitate vectors fitted to 6,800 questions of Spider (text-to-SQL over 140 databases; not needed here). For the
`embeddings` family: the energy of E_c's first directions, the logits of the 1st to the 3,000th candidate, and those of
the four picks. For the `structure` family: how many examples have each coordinate, how many coordinates an example has,
and a question's weights. Real pools have subjects and reworded questions, and so have these: the larger, the more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from langchain_rcr.index.base import PoolVectors

DIM, COLUMNS, QUESTIONS = 384, 2_000, 64
_SUBJECT, _ALIKE = 200, 10
"""Examples per subject, and per question in different words."""
_SHARES = (0.17, 0.13, 0.45, 0.25)
"""Shares of a dense vector's squared length: what all have in common, the subject, the question, its words."""
_OF_SUBJECT, _KEPT = 0.4, 0.8
"""Shares of a question's coordinates: those of its subject, and those that survive rewording."""
_AT_ONCE = 50_000


def dense(size: int, seed: int = 0) -> tuple[PoolVectors, np.ndarray]:
    """A pool of vectors of about length 1, with E_z equal to E_c, and questions (QUESTIONS, DIM)."""
    import numpy as np

    from langchain_rcr.index.base import PoolVectors

    rng = np.random.default_rng(seed)
    left = 0.55 * np.exp(-np.arange(DIM + 1) / 90) + 0.25 * np.exp(-np.arange(DIM + 1) / 14)
    scale = np.sqrt((left[:-1] - left[1:]) / (left[0] - left[-1])).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0].astype(np.float32)
    common, subject, question, words = np.sqrt(_SHARES).astype(np.float32)

    def directions(count: int) -> np.ndarray:
        return (rng.standard_normal((count, DIM), dtype=np.float32) * scale) @ turn

    subjects = subject * directions(max(2, size // _SUBJECT))
    subjects += common * np.eye(1, DIM, dtype=np.float32)
    asked = max(2, size // _ALIKE)
    questions = np.concatenate([question * directions(min(_AT_ONCE, asked - at)) for at in range(0, asked, _AT_ONCE)])
    questions += subjects[rng.integers(0, len(subjects), asked)]
    rows = np.empty((size, DIM), dtype=np.float32)
    for first in range(0, size, _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        part[:] = words * directions(len(part)) + questions[rng.integers(0, asked, len(part))]
    new = words * directions(QUESTIONS) + questions[rng.integers(0, asked, QUESTIONS)]
    return PoolVectors(rows, rows), new


def structures(size: int, seed: int = 0) -> tuple[PoolVectors, np.ndarray]:
    """A pool with some 32 coordinates per example, and what questions need, (QUESTIONS, COLUMNS)."""
    import numpy as np

    from langchain_rcr.basics.rows import SparseRows
    from langchain_rcr.index.base import PoolVectors

    rng = np.random.default_rng(seed)
    often = 1 / (1 + (np.arange(1, COLUMNS + 1, dtype=np.float32) / 8) ** 1.15)

    def descended(parents: SparseRows, count: int, kept: float) -> SparseRows:
        """Rows (count, COLUMNS) of ones: a coordinate is a parent's with this probability, and otherwise drawn anew."""
        own = (1 - kept) * often
        stays = 1 - (1 - kept) * (1 - often) / (1 - own)  # of a parent's, if it isn't among the row's own
        lengths, columns = [], []
        for first in range(0, count, _AT_ONCE):
            rows = min(_AT_ONCE, count - first)
            # Of so many that fall on rows at random, a row gets at least one with probability `own`.
            falling = rng.poisson(-rows * np.log1p(-own))
            keys = [rng.integers(0, rows, falling.sum()) * COLUMNS + np.arange(COLUMNS).repeat(falling)]
            some = parents.select(rng.integers(0, len(parents), rows))
            stay = rng.random(len(some.columns), dtype=np.float32) < stays[some.columns]
            keys.append(some.owner[stay] * COLUMNS + some.columns[stay])
            owner, its = np.divmod(np.unique(np.concatenate(keys)), COLUMNS)
            lengths.append(np.bincount(owner, minlength=rows))
            columns.append(its.astype(np.int32))
        starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
        return SparseRows(starts, np.concatenate(columns), np.ones(starts[-1], dtype=np.float32), COLUMNS)

    nothing = SparseRows(np.zeros(2, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), COLUMNS)
    subjects = descended(nothing, max(2, size // _SUBJECT), 0.0)
    questions = descended(subjects, max(2, size // _ALIKE), _OF_SUBJECT)
    rows = descended(questions, size, _KEPT)
    by_length = rng.uniform(0.7, 1.3, size).astype(np.float32).repeat(np.diff(rows.starts))
    needs = 0.2 * rng.random((QUESTIONS, COLUMNS), dtype=np.float32) ** 4 - np.float32(0.03)
    for need, has in zip(needs, descended(questions, QUESTIONS, _KEPT), strict=True):
        its = np.flatnonzero(has)
        order = np.argsort(rng.random(len(its)) / (1 - often[its]))
        need[its[order]] += (9 * np.arange(1, len(its) + 1) ** -0.75).astype(np.float32)
    return PoolVectors(replace(rows, values=by_length), rows), needs
