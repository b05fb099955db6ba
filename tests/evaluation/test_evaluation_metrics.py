"""The measures: by hand, and against a loop over sets."""

from __future__ import annotations

import numpy as np
import pytest
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


@pytest.mark.parametrize("seed", range(4))
def test_recall_equals_a_loop_over_sets(seed):
    gold, pool, positions = drawn(seed)
    expected = [
        len(set(np.flatnonzero(g)) & set(np.flatnonzero(pool[row].sum(axis=0)))) / g.sum()
        for g, row in zip(gold, positions, strict=True)
    ]
    np.testing.assert_allclose(recall(sparse.csr_array(gold), sparse.csr_array(pool), positions), expected)


def test_nothing_found_is_zero():
    assert recall(sparse.csr_array(np.eye(2)), sparse.csr_array((3, 2)), np.array([[0, 1], [2, 0]])).tolist() == [0, 0]
