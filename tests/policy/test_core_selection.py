"""Greedy selection: shape, values by hand, masking, equality with a slow plain loop, ties."""

import numpy as np
import pytest

from langchain_rcr.errors import InputError
from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.memory import MatrixTable
from langchain_rcr.policy.selection import greedy


def random_pool(rng, size, dim):
    return PoolVectors(*rng.normal(size=(2, size, dim)).astype(np.float32))


def slow(queries, pool, lam, k, exclude=None):
    """Section 3.2 in Python's floats, one query, one step and one candidate at a time."""
    candidate, context = pool.candidate.astype(np.float64), pool.context.astype(np.float64)
    out = []
    for row, query in enumerate(queries.astype(np.float64)):
        barred = set(exclude[row]) if exclude is not None else set()
        picks = []
        for _ in range(k):
            state = query + lam * sum((context[pick] for pick in picks), np.zeros_like(query))
            open_ = [n for n in range(len(candidate)) if n not in barred and n not in picks]
            best = max(open_, key=lambda n: (float(candidate[n] @ state), -n))
            picks.append(best)
        out.append(picks)
    return np.array(out)


def test_shapes_and_types():
    rng = np.random.default_rng(0)
    queries, pool = rng.normal(size=(3, 5)).astype(np.float32), random_pool(rng, 7, 5)
    picks = greedy(queries, pool, AdditiveState(0.5), 4)
    assert picks.positions.shape == picks.logits.shape == (3, 4)
    assert picks.positions.dtype == np.int64
    assert picks.logits.dtype == np.float32
    assert all(len(set(row)) == 4 for row in picks.positions.tolist())
    empty = greedy(queries[:0], pool, AdditiveState(0.5), 4)
    assert empty.positions.shape == (0, 4)


def test_by_hand():
    query = np.array([[2.0, 1.0]], dtype=np.float32)
    candidate = np.array([[1, 0], [0.9, 0], [0, 1]], dtype=np.float32)
    pool = PoolVectors(candidate, candidate)
    # λ = 0: logits 2, 1.8, 1. With λ = −1 the state is (1, 1) after candidate 0: 0.9 against 1.
    flat = greedy(query, pool, AdditiveState(0.0), 3)
    assert flat.positions.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(flat.logits, [[2, 1.8, 1]], rtol=1e-6)
    turned = greedy(query, pool, AdditiveState(-1.0), 3)
    assert turned.positions.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(turned.logits, [[2, 1, 0.9]], rtol=1e-6)  # the last in the state (1, 0)


def test_the_state_takes_the_context_vector_of_the_pick():
    query = np.array([[1.0, 0.0]], dtype=np.float32)
    candidate = np.array([[1, 0], [0.5, 0], [0, 1]], dtype=np.float32)
    context = np.array([[0, 3], [0, 0], [0, 0]], dtype=np.float32)
    picks = greedy(query, PoolVectors(candidate, context), AdditiveState(2.0), 2)
    assert picks.positions.tolist() == [[0, 2]]
    np.testing.assert_allclose(picks.logits, [[1, 6]])


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_slow_loop(seed):
    rng = np.random.default_rng(seed)
    size, dim, batch = int(rng.integers(1, 40)), int(rng.integers(1, 20)), int(rng.integers(1, 9))
    queries, pool = rng.normal(size=(batch, dim)).astype(np.float32), random_pool(rng, size, dim)
    lam = float(rng.choice([-1.0, -0.1, 0.0, 0.1, 1.0]))
    k = int(rng.integers(1, min(6, size) + 1))
    exclude = None
    if rng.random() < 0.7:
        exclude = [set(rng.permutation(size)[: rng.integers(0, size - k + 1)].tolist()) for _ in range(batch)]
    picks = greedy(queries, pool, AdditiveState(lam), k, exclude=exclude)
    np.testing.assert_array_equal(picks.positions, slow(queries, pool, lam, k, exclude))
    for row, positions in enumerate(picks.positions):
        state = queries[row].astype(np.float64)
        for step, pick in enumerate(positions):
            np.testing.assert_allclose(picks.logits[row, step], pool.candidate[pick] @ state, atol=1e-4)
            state = state + lam * pool.context[pick]


def test_everything_excluded_but_k():
    rng = np.random.default_rng(2)
    queries, pool = rng.normal(size=(5, 4)).astype(np.float32), random_pool(rng, 9, 4)
    left = [rng.permutation(9)[:3] for _ in range(5)]
    exclude = [np.setdiff1d(np.arange(9), row) for row in left]
    picks = greedy(queries, pool, AdditiveState(-0.5), 3, exclude=exclude)
    assert [set(row) for row in picks.positions.tolist()] == [set(row.tolist()) for row in left]
    with pytest.raises(InputError, match="k is 4, but there are only 3 examples to pick from"):
        greedy(queries, pool, AdditiveState(-0.5), 4, exclude=exclude)


def test_a_pool_of_one():
    pool = PoolVectors(np.full((1, 2), -1, dtype=np.float32), np.ones((1, 2), dtype=np.float32))
    picks = greedy(np.ones((3, 2), dtype=np.float32), pool, AdditiveState(1.0), 1)
    assert picks.positions.tolist() == [[0]] * 3
    np.testing.assert_array_equal(picks.logits, -2)


@pytest.mark.parametrize("common", [0.0, 10_000.0])
def test_duplicates_go_to_the_lowest_position_whatever_is_searched_together(common):
    # Copies of 20 vectors, all over a pool whose size is no multiple of any kernel's tile. A long part that all of them
    # share and no state sees makes rounding large beside the logits.
    rng = np.random.default_rng(3)
    kind = rng.integers(0, 20, 517)
    base = rng.normal(size=(2, 20, 384))
    queries = rng.normal(size=(64, 384))
    shared = rng.normal(size=384)
    shared /= np.linalg.norm(shared)
    base[1] -= (base[1] @ shared)[:, None] * shared
    queries -= (queries @ shared)[:, None] * shared
    base[0] += common * shared
    base, queries = base.astype(np.float32), queries.astype(np.float32)
    pool = PoolVectors(base[0][kind], base[1][kind])
    together = greedy(queries, pool, AdditiveState(-0.3), 4).positions
    alone = np.concatenate([greedy(query[None], pool, AdditiveState(-0.3), 4).positions for query in queries])
    np.testing.assert_array_equal(together, alone)
    for row in together.tolist():
        for step, pick in enumerate(row):
            copies = [n for n in np.flatnonzero(kind == kind[pick]).tolist() if n not in row[:step]]
            assert pick == copies[0]


def test_equal_logits_go_to_the_lowest_position():
    pool = PoolVectors(np.zeros((5, 2), dtype=np.float32), np.zeros((5, 2), dtype=np.float32))
    picks = greedy(np.ones((2, 2), dtype=np.float32), pool, AdditiveState(1.0), 3, exclude=[[], [1]])
    assert picks.positions.tolist() == [[0, 1, 2], [0, 2, 3]]
    twice = greedy(np.ones((1, 2), dtype=np.float32), pool, AdditiveState(1.0), 3, exclude=[[1, 0, 1]])
    assert twice.positions.tolist() == [[2, 3, 4]]


def test_picks_for_k_begin_those_for_more():
    rng = np.random.default_rng(4)
    queries, pool = rng.normal(size=(6, 8)).astype(np.float32), random_pool(rng, 30, 8)
    long = greedy(queries, pool, AdditiveState(0.4), 8).positions
    np.testing.assert_array_equal(greedy(queries, pool, AdditiveState(0.4), 3).positions, long[:, :3])


def test_an_engine_in_place_of_vectors():
    rng = np.random.default_rng(5)
    queries, pool = rng.normal(size=(6, 8)).astype(np.float32), random_pool(rng, 30, 8)
    index = MatrixTable(pool)
    ours = greedy(queries, index, AdditiveState(0.4), 4)
    np.testing.assert_array_equal(ours.positions, greedy(queries, pool, AdditiveState(0.4), 4).positions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"k": 7}, "k is 7, but there are only 6 examples to pick from"),
        ({"k": 1, "exclude": [[]]}, "exclude has 1 entries for 2 queries"),
        ({"k": 1, "exclude": [[0], [6]]}, r"exclude\[1\] names a position outside the pool of 6"),
        ({"k": 1, "exclude": [[0], [1, 6, 0]]}, r"exclude\[1\] names a position outside the pool of 6"),
        ({"k": 1, "exclude": [[-1], []]}, r"exclude\[0\] names a position outside the pool of 6"),
    ],
)
def test_what_does_not_fit_is_an_input_error(options, message):
    rng = np.random.default_rng(6)
    with pytest.raises(InputError, match=message):
        greedy(rng.normal(size=(2, 3)).astype(np.float32), random_pool(rng, 6, 3), AdditiveState(1.0), **options)


@pytest.mark.parametrize("where", ["query", "candidate", "context"])
def test_numbers_that_are_not_finite_are_never_picked_from(where):
    rng = np.random.default_rng(7)
    queries, pool = rng.normal(size=(2, 3)).astype(np.float32), random_pool(rng, 6, 3)
    {"query": queries, "candidate": pool.candidate, "context": pool.context}[where][:, 1] = np.nan
    with pytest.raises(InputError, match="not finite"):
        greedy(queries, pool, AdditiveState(1.0), 2)
