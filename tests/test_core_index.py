"""The pool in memory: search against a plain reference, blocks, masks, growth."""

import copy

import numpy as np
import pytest

from langchain_rcr.errors import InputError
from langchain_rcr.index import memory
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.memory import MemoryIndex, first_best

NOTHING = np.empty(0, dtype=np.int64)


def vectors(rng, size, dim=6):
    return PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))


def slow_search(states, pool, t, exclude):
    positions = np.full((len(states), t), -1)
    logits = np.full((len(states), t), -np.inf)
    for row, state in enumerate(states.astype(np.float64)):
        left = [n for n in range(len(pool.candidate)) if n not in set(exclude[row].tolist())]
        score = {n: float(pool.candidate[n].astype(np.float64) @ state) for n in left}
        best = sorted(left, key=lambda n: (-score[n], n))[:t]
        positions[row, : len(best)] = best
        logits[row, : len(best)] = [score[n] for n in best]
    return positions, logits


@pytest.mark.parametrize("block", [1, 50, 1 << 26])
@pytest.mark.parametrize("t", [1, 3, 30])
def test_search_equals_the_slow_one(monkeypatch, block, t):
    monkeypatch.setattr(memory, "_BLOCK", block)
    rng = np.random.default_rng(t)
    pool, states = vectors(rng, 23), rng.normal(size=(11, 6)).astype(np.float32)
    exclude = [rng.integers(0, 23, rng.integers(0, 30)) for _ in states]  # with duplicates
    exclude[4], exclude[5] = np.arange(23), NOTHING
    positions, logits = MemoryIndex(pool).search(states, t, exclude)
    expected, values = slow_search(states, pool, t, exclude)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_allclose(logits, values, atol=1e-5)
    assert positions.dtype == np.int64
    assert logits.dtype == np.float32
    assert (positions[4] == -1).all()
    assert np.isneginf(logits[4]).all()


def test_the_scores_held_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(memory, "_BLOCK", 100)
    seen = []
    real = memory.first_best
    monkeypatch.setattr(memory, "first_best", lambda scores, slack: seen.append(scores.size) or real(scores, slack))
    rng = np.random.default_rng(0)
    MemoryIndex(vectors(rng, 30)).search(rng.normal(size=(20, 6)).astype(np.float32), 1, [NOTHING] * 20)
    assert max(seen) <= 100
    assert sum(seen) == 600


def test_first_best_by_hand():
    scores = np.array([[1, 2, 2], [-np.inf, -3, -4], [5, 5.5, 5]], dtype=np.float32)
    assert first_best(scores, np.zeros(3, dtype=np.float32)).tolist() == [1, 1, 1]
    assert first_best(scores, np.array([0, 0, 0.5], dtype=np.float32)).tolist() == [1, 1, 0]


def test_vectors_are_the_context_vectors():
    pool = vectors(np.random.default_rng(1), 5)
    np.testing.assert_array_equal(MemoryIndex(pool).vectors(np.array([3, 0, 3])), pool.context[[3, 0, 3]])


def test_added_candidates_are_found_and_a_copy_stays_as_it_was():
    rng = np.random.default_rng(2)
    first, more = vectors(rng, 5), vectors(rng, 4)
    index = MemoryIndex(first)
    before = copy.copy(index)
    index.add(more)
    assert (before.size, index.size) == (5, 9)
    both = PoolVectors(np.concatenate([first.candidate, more.candidate]), np.concatenate([first.context, more.context]))
    states = rng.normal(size=(8, 6)).astype(np.float32)
    for have, pool in ((index, both), (before, first)):
        np.testing.assert_array_equal(
            have.search(states, 2, [NOTHING] * 8)[0], slow_search(states, pool, 2, [NOTHING] * 8)[0]
        )
    np.testing.assert_array_equal(index.vectors(np.arange(9)), both.context)


def test_an_added_vector_that_is_not_finite_is_an_error_at_search():
    rng = np.random.default_rng(3)
    index = MemoryIndex(vectors(rng, 3))
    index.add(PoolVectors(np.full((1, 6), np.nan, dtype=np.float32), np.zeros((1, 6), dtype=np.float32)))
    with pytest.raises(InputError, match="not finite"):
        index.search(np.ones((1, 6), dtype=np.float32), 1, [NOTHING])


def test_an_empty_pool_finds_nothing():
    empty = MemoryIndex(PoolVectors(np.empty((0, 2), dtype=np.float32), np.empty((0, 2), dtype=np.float32)))
    positions, logits = empty.search(np.ones((2, 2), dtype=np.float32), 2, [NOTHING] * 2)
    assert positions.tolist() == [[-1, -1]] * 2
    assert np.isneginf(logits).all()
    assert empty.search(np.ones((0, 2), dtype=np.float32), 2, [])[0].shape == (0, 2)


def test_vectors_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"must both be \(N, D\)"):
        PoolVectors(np.ones((2, 3), dtype=np.float32), np.ones((3, 3), dtype=np.float32))
