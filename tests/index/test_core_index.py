"""The pool in memory: search against a plain reference, blocks, masks, growth."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_rcr.errors import InputError
from langchain_rcr.index import ranking
from langchain_rcr.index.base import InThisThread, PoolVectors
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.index.ranking import best, best_fetched

FIELDS = ("candidate", "context")
NOTHING = np.empty(0, dtype=np.int64)


def vectors(rng, size, dim=6):
    return PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))


def candidates(table, keys):
    return table.pool_vectors(keys).candidate


def search(table, states, t, exclude):
    keys, logits, _ = table.found(states, t, exclude)
    return keys, logits


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
    monkeypatch.setattr(ranking, "_BLOCK", block)
    rng = np.random.default_rng(t)
    pool, states = vectors(rng, 23), rng.normal(size=(11, 6)).astype(np.float32)
    exclude = [rng.integers(0, 23, rng.integers(0, 30)) for _ in states]  # with duplicates
    exclude[4], exclude[5] = np.arange(23), NOTHING
    positions, logits = search(MatrixTable(pool), states, t, exclude)
    expected, values = slow_search(states, pool, t, exclude)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_allclose(logits, values, atol=1e-5)
    assert positions.dtype == np.int64
    assert logits.dtype == np.float32
    assert (positions[4] == -1).all()
    assert np.isneginf(logits[4]).all()


def test_the_scores_held_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(ranking, "_BLOCK", 100)
    seen = []

    def counted(scores, *others):
        seen.append(scores.size)
        return best(scores, *others)

    monkeypatch.setattr("langchain_rcr.index.memory.best", counted)
    rng = np.random.default_rng(0)
    search(MatrixTable(vectors(rng, 30)), rng.normal(size=(20, 6)).astype(np.float32), 1, [NOTHING] * 20)
    assert max(seen) <= 100
    assert sum(seen) == 600


def test_the_first_best_by_hand():
    scores = np.array([[1, 2, 2], [-np.inf, -3, -4], [5, 5.5, 5], [-np.inf] * 3], dtype=np.float32)
    for slack, expected in (([0, 0, 0, 0], [1, 1, 1, -1]), ([0, 0, 0.5, 0], [1, 1, 0, -1])):
        keys, logits = best(scores, np.array(slack, dtype=np.float32), 1)
        assert keys.ravel().tolist() == expected
        for row, (key, logit) in enumerate(zip(keys, logits, strict=True)):
            assert logit == (scores[row, key] if key >= 0 else -np.inf)
            alone = best(scores[row : row + 1], np.array(slack[row : row + 1], dtype=np.float32), 1)
            assert (alone[0][0], alone[1][0]) == (key, logit)


def test_vectors_are_the_context_vectors():
    pool = vectors(np.random.default_rng(1), 5)
    np.testing.assert_array_equal(MatrixTable(pool).vectors(np.array([3, 0, 3])), pool.context[[3, 0, 3]])


def test_an_extended_table_finds_the_new_rows_and_the_old_one_stays_as_it_was():
    rng = np.random.default_rng(2)
    pools, tables = [vectors(rng, 5)], []
    tables.append(MatrixTable(pools[0]))
    for size in (4, 1, 30, 2):
        more = vectors(rng, size)
        pools.append(PoolVectors(*(np.concatenate([getattr(p, n) for p in (pools[-1], more)]) for n in FIELDS)))
        tables.append(tables[-1].extended(more))
    states = rng.normal(size=(8, 6)).astype(np.float32)
    for table, pool in zip(tables, pools, strict=True):
        assert table.size == len(table) == len(pool.candidate)
        expected = slow_search(states, pool, 2, [NOTHING] * 8)[0]
        np.testing.assert_array_equal(search(table, states, 2, [NOTHING] * 8)[0], expected)
        np.testing.assert_array_equal(table.vectors(np.arange(table.size)), pool.context)
        np.testing.assert_array_equal(candidates(table, np.arange(table.size)), pool.candidate)


def test_two_extensions_of_one_table_do_not_meet():
    rng = np.random.default_rng(3)
    base = MatrixTable(vectors(rng, 5)).extended(vectors(rng, 1))
    one, other = vectors(rng, 2), vectors(rng, 2)
    first, second = base.extended(one), base.extended(other)
    np.testing.assert_array_equal(candidates(first, np.array([6, 7])), one.candidate)
    np.testing.assert_array_equal(candidates(second, np.array([6, 7])), other.candidate)


def test_appending_does_not_copy_what_is_there():
    rng = np.random.default_rng(4)
    table = MatrixTable(vectors(rng, 100)).extended(vectors(rng, 1))
    grown = table
    for _ in range(50):
        grown = grown.extended(vectors(rng, 1))
    assert np.shares_memory(candidates(grown, np.arange(len(grown))), candidates(table, np.arange(len(table))))
    assert np.shares_memory(grown.vectors(slice(None)), table.vectors(slice(None)))


def test_an_added_vector_that_is_not_finite_is_an_error_at_search():
    rng = np.random.default_rng(3)
    broken = PoolVectors(np.full((1, 6), np.nan, dtype=np.float32), np.zeros((1, 6), dtype=np.float32))
    table = MatrixTable(vectors(rng, 3)).extended(broken)
    with pytest.raises(InputError, match="not finite"):
        search(table, np.ones((1, 6), dtype=np.float32), 1, [NOTHING])


@pytest.mark.parametrize("t", [1, 3, 9, 40])
def test_rows_that_are_not_allowed_are_never_found(t):
    rng = np.random.default_rng(t)
    pool, states = vectors(rng, 30), rng.normal(size=(7, 6)).astype(np.float32)
    allowed = rng.random(30) < 0.5
    table = MatrixTable(pool).allowing(allowed)
    assert (table.size, len(table)) == (allowed.sum(), 30)
    exclude = [rng.integers(0, 30, 4) for _ in states]
    barred = [np.concatenate([row, np.flatnonzero(~allowed)]) for row in exclude]
    np.testing.assert_array_equal(search(table, states, t, exclude)[0], slow_search(states, pool, t, barred)[0])
    grown = table.extended(vectors(rng, 2))
    assert grown.size == allowed.sum() + 2
    assert set(search(grown, states, 32, exclude)[0].ravel().tolist()) - {-1} == {*np.flatnonzero(allowed), 30, 31}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_best_columns_are_those_of_a_plain_loop(seed, size, t, width):
    """Scores on a grid, so that many are tied; within the slack, too."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-4, 5, size=(3, size)).astype(np.float32) / 4 + np.float32([[-2], [0], [2]])
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    slack = np.full(3, width, dtype=np.float32)
    keys, logits = best(scores, slack, t)
    for row, found, values in zip(scores, keys, logits, strict=True):
        for key, value in zip(found, values, strict=True):
            left = np.flatnonzero((row >= row.max() - width) & (row > -np.inf))
            assert key == (left[0] if len(left) else -1)
            assert value == (row[key] if len(left) else -np.inf)
            if key >= 0:
                row[key] = -np.inf


def test_log_partition_by_hand_and_in_blocks(monkeypatch):
    candidate = np.array([[1, 0], [0, 1], [2, 0], [80, 0]], dtype=np.float32)
    table = MatrixTable(PoolVectors(candidate, candidate)).allowing(np.array([True, True, True, False]))
    states = np.array([[1, 2], [1, 2], [300, 0], [1, 2]], dtype=np.float32)
    exclude = [NOTHING, np.array([1]), NOTHING, np.array([2, 0, 1])]
    expected = [np.log(np.exp(2) + np.exp(4) + np.exp(4)), np.log(np.exp(2) + np.exp(4)), 1200, -np.inf]
    for block in (1, 1 << 26):
        monkeypatch.setattr(ranking, "_BLOCK", block)
        np.testing.assert_allclose(table.found(states, 1, exclude, 0.5)[2], expected, rtol=1e-6)
    none = MatrixTable(PoolVectors(candidate[:0], candidate[:0]))
    assert np.isneginf(none.found(states, 1, [NOTHING] * 4, 0.5)[2]).all()


def test_a_table_pickles_without_its_spare_room():
    rng = np.random.default_rng(8)
    pool, states = vectors(rng, 200), rng.normal(size=(4, 6)).astype(np.float32)
    table = MatrixTable(pool).extended(vectors(rng, 1)).allowing(np.arange(201) % 3 > 0)
    packed = pickle.dumps(table)
    assert len(packed) < 201 * 6 * 4 * 2 + 2000
    for other in (pickle.loads(packed), copy.deepcopy(table)):
        np.testing.assert_array_equal(
            search(other, states, 5, [NOTHING] * 4)[0], search(table, states, 5, [NOTHING] * 4)[0]
        )
        assert other.extended(vectors(rng, 3)).size == table.size + 3


def test_an_empty_pool_finds_nothing():
    empty = MatrixTable(PoolVectors(np.empty((0, 2), dtype=np.float32), np.empty((0, 2), dtype=np.float32)))
    positions, logits = search(empty, np.ones((2, 2), dtype=np.float32), 2, [NOTHING] * 2)
    assert positions.tolist() == [[-1, -1]] * 2
    assert np.isneginf(logits).all()
    assert search(empty, np.ones((0, 2), dtype=np.float32), 2, [])[0].shape == (0, 2)


def test_vectors_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"must both be \(N, D\)"):
        PoolVectors(np.ones((2, 3), dtype=np.float32), np.ones((3, 3), dtype=np.float32))


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1.0])
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), t=st.integers(1, 12), size=st.integers(0, 90))
def test_what_is_fetched_piece_by_piece_is_the_best_of_all(noise, seed, t, size):
    """Of candidates among which many are equal, in the order of a store that is off by some noise."""
    rng = np.random.default_rng(seed)
    pool = rng.integers(-1, 2, size=(size, 3)).astype(np.float32)
    states = rng.normal(size=(4, 3)).astype(np.float32)
    exclude = [rng.integers(0, 95, rng.integers(0, 9)) for _ in states]
    margin = np.full(len(states), 1e-5, dtype=np.float32)
    widths = []

    async def fetch(some, width):
        widths.append(width)
        found = []
        for state in some:
            scores = pool @ state
            off = noise * np.linalg.norm(state) * rng.uniform(-1, 1, size=size)
            nearest = np.argsort(-(scores + off))[:width]
            found.append((nearest.astype(np.int64), scores[nearest]))
        return found

    work = best_fetched(fetch, states, t, exclude, margin, size, rounding=2 * noise)
    keys, logits = InThisThread().run(work)
    scores = states @ pool.T
    for line, barred in zip(scores, exclude, strict=True):
        line[barred[barred < size]] = -np.inf
    expected, values = best(scores, margin, t) if size else (np.full((4, t), -1), np.full((4, t), -np.inf))
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_allclose(logits, values, rtol=1e-6, atol=1e-6)
    assert widths == sorted(widths)
    assert all(0 < width <= size for width in widths)


def test_equal_candidates_beyond_the_most_are_not_fetched():
    widths = []

    async def fetch(some, width):
        widths.append(width)
        return [(np.arange(5000 - width, 5000), np.ones(width, dtype=np.float32)) for _ in some]

    states = np.ones((1, 2), dtype=np.float32)
    work = best_fetched(fetch, states, 2, [NOTHING], np.zeros(1, dtype=np.float32), 5000, most=100)
    assert InThisThread().run(work)[0].tolist() == [[4900, 4901]]
    assert widths == [10, 80, 100]
