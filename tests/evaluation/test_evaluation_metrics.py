"""The measures: by hand, and against a loop over sets."""

from __future__ import annotations

import numpy as np
from rcr_trainer.data.coverage import recall
from scipy import sparse

POOL = sparse.csr_array(np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 0, 1, 0]], dtype=np.float32))
GOLD = sparse.csr_array(np.array([[1, 1, 1, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]], dtype=np.float32))


def drawn(seed):
    rng = np.random.default_rng(seed)
    pool = (rng.random((20, 15)) < 0.2).astype(np.float32)
    gold = (rng.random((12, 15)) < 0.3).astype(np.float32)
    gold[:, 0], pool[:, 14], pool[3] = 1, 0, 0
    return gold, pool, np.array([rng.permutation(20)[:6] for _ in range(12)])


def test_by_hand():
    picks = np.array([[0, 1, 2], [0, 2, 1], [0, 1, 2]])
    assert recall(GOLD, POOL, picks).tolist() == [3 / 4, 1, 1]
    assert recall(GOLD, POOL, picks[:, :2]).tolist() == [3 / 4, 1 / 2, 1]
    assert recall(GOLD, POOL, picks[:, :1]).tolist() == [2 / 4, 0, 1]
    assert recall(GOLD, POOL, picks[:, :0]).tolist() == [0, 0, 0]


def test_recall_equals_a_loop_over_sets():
    gold, pool, positions = drawn(0)
    expected = [
        len(set(np.flatnonzero(g)) & set(np.flatnonzero(pool[row].sum(axis=0)))) / g.sum()
        for g, row in zip(gold, positions, strict=True)
    ]
    np.testing.assert_allclose(recall(sparse.csr_array(gold), sparse.csr_array(pool), positions), expected)
