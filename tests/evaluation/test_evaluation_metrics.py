"""The measures: by hand, and against a loop over sets."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.data.coverage import recall_by_step
from rcr_trainer.evaluation.metrics import (
    duplicate_rate,
    hub_share,
    shown_of,
    specificity,
    weighted_recall,
    within_pool,
)
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
    recall = recall_by_step(GOLD, POOL, np.array([[0, 1, 2], [0, 2, 1], [0, 1, 2]]))
    assert recall.tolist() == [[2 / 4, 3 / 4, 3 / 4], [0, 1 / 2, 1], [1, 1, 1]]


def test_specific_coverage_by_hand():
    rarity = specificity(POOL)
    # All three have the second structure, each of the others one of three; the pool lacks the last.
    assert rarity == pytest.approx([np.log(3), 0, np.log(3), np.log(3), 0])
    with_one_that_does_not_parse = sparse.csr_array(np.vstack([POOL.toarray(), np.zeros(5)]))
    assert specificity(with_one_that_does_not_parse) == pytest.approx(rarity)
    shown = shown_of(GOLD, POOL, np.array([[0], [2], [1]]))
    assert shown.toarray().tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    # Nothing of the last program is specific: nothing is missing.
    assert weighted_recall(GOLD, shown, rarity) == pytest.approx([1 / 2, 1 / 2, 1])
    assert weighted_recall(GOLD, shown, np.array([1.0, 1, 0, 0, 0])).tolist() == [1, 1, 1]
    assert weighted_recall(GOLD, shown, np.array([0.0, 1, 1, 0, 0])).tolist() == [0.5, 0, 1]


def test_within_pool():
    assert within_pool(GOLD, POOL).toarray().tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]]
    assert np.diff(within_pool(GOLD, POOL[:1]).indptr).tolist() == [2, 0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_recall_equals_a_loop_over_sets(seed):
    gold, pool, positions = drawn(seed)
    expected = [
        [len(set(np.flatnonzero(g)) & set(np.flatnonzero(pool[row[: t + 1]].sum(axis=0)))) / g.sum() for t in range(6)]
        for g, row in zip(gold, positions, strict=True)
    ]
    recall = recall_by_step(sparse.csr_array(gold), sparse.csr_array(pool), positions)
    assert recall.shape == (12, 6)
    np.testing.assert_allclose(recall, expected)


@pytest.mark.parametrize("seed", range(4))
def test_weighted_recall_equals_a_loop_over_sets(seed):
    gold, pool, positions = drawn(seed)
    programs = [row for row in pool if row.any()]
    expected = []
    for needed, picks in zip(gold, positions, strict=True):
        weights = {
            s: -np.log(sum(program[s] for program in programs) / len(programs))
            for s in np.flatnonzero(needed)
            if pool[:, s].any()
        }
        found = sum(weight for s, weight in weights.items() if pool[picks, s].any())
        expected.append(found / sum(weights.values()))
    rows, columns = sparse.csr_array(gold), sparse.csr_array(pool)
    shown = shown_of(rows, columns, positions)
    np.testing.assert_allclose(weighted_recall(rows, shown, specificity(columns)), expected, rtol=1e-6)


def test_nothing_found_is_zero():
    recall = recall_by_step(sparse.csr_array(np.eye(2)), sparse.csr_array((3, 2)), np.array([[0, 1], [2, 0]]))
    assert recall.tolist() == [[0, 0], [0, 0]]
    nothing = shown_of(sparse.csr_array(np.eye(2)), sparse.csr_array((3, 2)), np.array([[0, 1], [2, 0]]))
    assert nothing.nnz == 0


def test_duplicates():
    programs = np.array([7, 7, 3, 4, 3])
    positions = np.array([[0, 1, 2], [0, 2, 3], [2, 3, 4], [1, 2, 0]])
    assert [duplicate_rate(programs, positions[:, :k]) for k in (1, 2, 3)] == [0, 25, 75]


def test_hub_share():
    # 5 is picked three times, 2 twice, 0, 1 and 9 once.
    positions = np.array([[5, 2], [5, 0], [5, 2], [1, 9]])
    assert hub_share(positions, most=1) == pytest.approx(100 * 3 / 8)
    assert hub_share(positions, most=2) == pytest.approx(100 * 5 / 8)
    assert hub_share(positions) == 100
    assert hub_share(np.arange(100).reshape(25, 4)) == 10
