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
    """A pool with some 40 coordinates per example, and what questions need, (QUESTIONS, COLUMNS)."""
    import numpy as np

    from langchain_rcr.basics.rows import SparseRows
    from langchain_rcr.index.base import PoolVectors

    rng = np.random.default_rng(seed)
    often = 1 / (1 + (np.arange(1, COLUMNS + 1, dtype=np.float32) / 8) ** 1.15)
    asked = max(2, size // _ALIKE)

    def drawn(count: int) -> np.ndarray:
        return rng.random((count, COLUMNS), dtype=np.float32) < often

    def reworded(which: np.ndarray) -> np.ndarray:
        kept = rng.random((len(which), COLUMNS), dtype=np.float32) < _KEPT
        return np.where(kept, np.unpackbits(questions[which], axis=1, count=COLUMNS).view(bool), drawn(len(which)))

    few = _AT_ONCE // 10
    subjects, packed = drawn(max(2, size // _SUBJECT)), []
    for first in range(0, asked, few):
        new = drawn(min(few, asked - first))
        its = rng.random(new.shape, dtype=np.float32) < _OF_SUBJECT
        new[its] = subjects[rng.integers(0, len(subjects), len(new))][its]
        packed.append(np.packbits(new, axis=1))
    questions = np.concatenate(packed)
    lengths, columns = [], []
    for first in range(0, size, few):
        has = reworded(rng.integers(0, asked, min(few, size - first)))
        lengths.append(has.sum(axis=1))
        columns.append(np.nonzero(has)[1].astype(np.int32))
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
    ones = np.ones(starts[-1], dtype=np.float32)
    rows = SparseRows(starts, np.concatenate(columns), ones, COLUMNS)
    by_length = rng.uniform(0.7, 1.3, size).astype(np.float32).repeat(np.diff(starts))
    needs = 0.2 * rng.random((QUESTIONS, COLUMNS), dtype=np.float32) ** 4 - np.float32(0.03)
    for need, has in zip(needs, reworded(rng.integers(0, asked, QUESTIONS)), strict=True):
        its = np.flatnonzero(has)
        order = np.argsort(rng.random(len(its)) / (1 - often[its]))
        need[its[order]] += (9 * np.arange(1, len(its) + 1) ** -0.75).astype(np.float32)
    return PoolVectors(replace(rows, values=by_length), rows), needs
