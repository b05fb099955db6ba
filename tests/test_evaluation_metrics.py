"""The measures: by hand, and against a loop over sets."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.coverage import recall_by_step
from rcr_trainer.evaluation.metrics import coverage_by_step, duplicates_by_step, full_coverage_by_step
from scipy import sparse


def test_by_hand():
    pool = sparse.csr_array(np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]))
    gold = sparse.csr_array(np.array([[1, 1, 1, 0], [0, 0, 1, 1]]))
    recall = recall_by_step(gold, pool, np.array([[0, 1, 2], [0, 2, 1]]))
    assert recall.tolist() == [[2 / 3, 1, 1], [0, 1 / 2, 1]]
    assert coverage_by_step(recall) == pytest.approx([100 / 3, 75, 100])
    assert full_coverage_by_step(recall).tolist() == [0, 50, 100]


@pytest.mark.parametrize("seed", range(4))
def test_recall_equals_a_loop_over_sets(seed):
    rng = np.random.default_rng(seed)
    pool = (rng.random((20, 15)) < 0.2).astype(np.float32)
    gold = (rng.random((12, 15)) < 0.3).astype(np.float32)
    gold[:, 0] = 1
    positions = np.array([rng.permutation(20)[:6] for _ in range(12)])
    expected = [
        [len(set(np.flatnonzero(g)) & set(np.flatnonzero(pool[row[: t + 1]].sum(axis=0)))) / g.sum() for t in range(6)]
        for g, row in zip(gold, positions, strict=True)
    ]
    recall = recall_by_step(sparse.csr_array(gold), sparse.csr_array(pool), positions)
    assert recall.shape == (12, 6)
    np.testing.assert_allclose(recall, expected)


def test_nothing_found_is_zero():
    recall = recall_by_step(sparse.csr_array(np.eye(2)), sparse.csr_array((3, 2)), np.array([[0, 1], [2, 0]]))
    assert recall.tolist() == [[0, 0], [0, 0]]


def test_duplicates():
    programs = np.array([7, 7, 3, 4, 3])
    positions = np.array([[0, 1, 2], [0, 2, 3], [2, 3, 4], [1, 2, 0]])
    assert duplicates_by_step(programs, positions).tolist() == [0, 25, 75]
