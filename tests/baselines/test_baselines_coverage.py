"""Greedy coverage: Algorithm 1 on sparse matrices against a loop over sets."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.data.coverage import PoolStructures, greedy_coverage, structure_matrices
from scipy import sparse

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec


def slow(needs, pool, k, exclude):
    """One query at a time, by the definition."""
    positions, gains = [], []
    for need, banned in zip(needs, exclude, strict=True):
        uncovered, picked, gained = need.copy(), [], []
        for _ in range(k):
            left = [c for c in range(len(pool)) if c not in picked and c not in banned]
            worth = {c: float(uncovered @ pool[c]) for c in left}
            best = max(left, key=lambda c: worth[c])
            gain = worth[best]
            if gain <= 0:
                best, gain = max(left, key=lambda c: float(need @ pool[c])), 0.0
            picked.append(best)
            gained.append(gain)
            uncovered[pool[best] > 0] = 0
        positions.append(picked)
        gains.append(gained)
    return np.array(positions), np.array(gains)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_slow_loop(seed, soft, monkeypatch):
    rng = np.random.default_rng(seed)
    pool = (rng.random((25, 30)) < 0.12).astype(np.float32)
    needs = (rng.random((17, 30)) < 0.3).astype(np.float64)
    needs[3] = 0
    if soft:  # multiples of 1/8 add up exactly, so that ties are ties in any order of summing
        needs *= rng.integers(1, 8, size=needs.shape) / 8
    exclude = [rng.choice(25, size=rng.integers(0, 6), replace=False).tolist() for _ in range(17)]
    expected_positions, expected_gains = slow(needs, pool, 8, exclude)
    for block_elements in (1 << 23, 60):
        monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", block_elements)
        positions, gains = greedy_coverage(sparse.csr_array(needs), sparse.csr_array(pool), 8, exclude)
        assert positions.dtype == np.int64
        assert (positions == expected_positions).all()
        np.testing.assert_allclose(gains, expected_gains)


def test_by_hand():
    pool = sparse.csr_array(np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]))
    needs = sparse.csr_array(np.array([[1, 1, 1, 1], [0, 0, 0, 1]]))
    positions, gains = greedy_coverage(needs, pool, 4, [[]] * 2)
    # Query 0: 1 and 2 tie at 2; then 2 and 3 tie at 1; then nothing gains, 0 and 3 overlap equally.
    assert positions.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    assert gains.tolist() == [[2, 1, 0, 0], [0, 0, 0, 0]]


def test_a_zero_gain_is_exactly_zero_with_soft_needs():
    rng = np.random.default_rng(0)
    needs = sparse.csr_array(rng.random((20, 50)).astype(np.float32))
    pool = sparse.csr_array((rng.random((30, 50)) < 0.3).astype(np.float32))
    _, gains = greedy_coverage(needs, pool, 30, [[]] * 20)
    reachable = needs.toarray()[:, pool.sum(axis=0) > 0].sum(axis=1)
    np.testing.assert_allclose(gains.sum(axis=1), reachable, rtol=1e-5)
    assert ((gains == 0) | (gains > 1e-4)).all()
    assert (gains[:, -1] == 0).all()


def test_bad_arguments():
    matrix = sparse.csr_array(np.eye(3))
    with pytest.raises(InputError, match=r"k is 3.* 2 examples.*1 of 3 excluded"):
        greedy_coverage(matrix, matrix, 3, [[], [1], []])


def test_pool_structures_agree_with_structure_matrices():
    spec = ProgramSpec()
    programs = ["a ( b )", "c", "not ( a", "a ( b )"]
    structures = PoolStructures(spec, programs)
    assert (structures.matrix != structure_matrices(spec, programs)[0]).nnz == 0
    assert (structures.rows(programs) != structures.matrix).nnz == 0
    assert structures.matrix.dtype == np.float32
    gold, pool = structure_matrices(spec, ["a ( b , z )"], programs)
    assert ((structures.rows(["a ( b , z )"]) @ structures.matrix.T) != (gold @ pool.T)).nnz == 0
    assert PoolStructures(spec, []).rows(["a"]).shape == (1, 0)
