"""The saturating state: by hand, in NumPy and in torch."""

import numpy as np
import pytest
import torch

from langchain_rcr.index.base import PoolVectors
from langchain_rcr.selection import greedy
from langchain_rcr.state import SaturatingState, make_state


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_what_is_covered_is_needed_no_more(make):
    start = SaturatingState(1.0).start(make([[4.0, 2.0, 1.0], [1.0, 1.0, 1.0]]))
    one = start.update(make([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]))
    two = one.update(make([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]]))
    assert one.vector().tolist() == [[0, 2, 0.5], [1, 1, 1]]
    assert two.vector().tolist() == [[0, 2, 0.25], [1, 0, 1]]
    assert start.vector().tolist() == [[4, 2, 1], [1, 1, 1]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_share_of_what_is_covered_stays_needed_by_hand(make):
    start = SaturatingState(1.0, 0.25).start(make([[4.0, 2.0, -1.0], [4.0, 4.0, 4.0]]))
    one = start.update(make([[1.0, 0.0, 1.0], [0.5, 0.5, 0.0]]))
    two = one.update(make([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0]]))
    assert one.vector().tolist() == [[1, 2, -0.25], [2.5, 2.5, 4]]  # 4 · (¼ + ¾ · ½)
    assert two.vector().tolist() == [[1, 2, -0.25], [1.75, 1, 4]]  # 4 · (¼ + ¾ · ½ · ½)
    assert start.vector().tolist() == [[4, 2, -1], [4, 4, 4]]
    half = SaturatingState(0.5, 0.25).start(make([[4.0]])).update(make([[1.0]]))
    assert half.vector().tolist() == [[2.5]]
    assert half.update(make([[1.0]])).vector().tolist() == [[1.75]]


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("floor", [0.0, 0.23, 1.0])
def test_any_sequence_of_picks_has_the_product_of_what_they_leave(lam, floor):
    rng = np.random.default_rng(0)
    query, contexts = rng.normal(size=(3, 7)), rng.random((5, 3, 7))
    state = SaturatingState(lam, floor).start(query)
    for count in range(1, 6):
        state = state.update(contexts[count - 1])
        for row, column in np.ndindex(3, 7):
            left = 1.0
            for context in contexts[:count]:
                left *= 1 - lam * context[row, column]
            expected = query[row, column] * (floor + (1 - floor) * left)
            assert state.vector()[row, column] == pytest.approx(expected)
    if lam == 0 or floor == 1:
        np.testing.assert_allclose(state.vector(), query)
    assert (np.abs(state.vector()) >= floor * np.abs(query) - 1e-12).all()


def test_what_is_needed_most_is_picked_again_rather_than_what_adds_next_to_nothing():
    need, has = np.float32([[8, 8, 1]]), np.float32([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    for floor, second in ((0.0, 2), (0.05, 2), (0.23, 1)):  # 16 · 0.05 = 0.8, 16 · 0.23 = 3.68
        assert greedy(need, PoolVectors(has, has), SaturatingState(1.0, floor), 2).positions.tolist() == [[0, second]]


def test_lambda_zero_ignores_the_picks():
    query = np.ones((2, 4), dtype=np.float32)
    assert SaturatingState(0.0, 0.5).start(query).update(query).vector().tolist() == query.tolist()


@pytest.mark.parametrize("floor", [0.0, np.float64(0.23)])
def test_float32_stays_and_an_empty_batch_is_fine(floor):
    for rows in (0, 1):
        query = np.ones((rows, 3), dtype=np.float32)
        vector = SaturatingState(np.float64(0.5), floor).start(query).update(query).vector()
        assert (vector.dtype, vector.shape) == (np.float32, (rows, 3))


def test_gradients_reach_query_and_contexts():
    query = torch.tensor([[2.0, 3.0, 5.0]], requires_grad=True)
    context = torch.tensor([[0.0, 0.5, 0.25]], requires_grad=True)
    SaturatingState(1.0).start(query).update(context).vector().sum().backward()
    assert query.grad.tolist() == [[1, 0.5, 0.75]]
    assert context.grad.tolist() == [[-2, -3, -5]]


def test_gradients_with_a_floor():
    query = torch.tensor([[2.0, 3.0]], requires_grad=True)
    first, second = (torch.tensor([[0.5, of]], requires_grad=True) for of in (1.0, 0.5))
    SaturatingState(1.0, 0.25).start(query).update(first).update(second).vector().sum().backward()
    assert query.grad.tolist() == [[0.25 + 0.75 * 0.25, 0.25]]
    assert first.grad.tolist() == [[-0.75 * 2 * 0.5, -0.75 * 3 * 0.5]]
    assert second.grad.tolist() == [[-0.75 * 2 * 0.5, 0]]


def test_update_comes_after_start():
    with pytest.raises(RuntimeError, match="start"):
        SaturatingState(1.0).update(np.ones((1, 2)))


def test_greedy_search_is_greedy_weighted_coverage():
    rng = np.random.default_rng(0)
    need = rng.random((5, 12)).astype(np.float32)
    has = (rng.random((30, 12)) < 0.3).astype(np.float32)
    picks = greedy(need, PoolVectors(has, has), SaturatingState(1.0), 4).positions
    for row, picked in enumerate(picks):
        covered = np.zeros(12, dtype=bool)
        for pick in picked:
            gains = [(need[row] * ((candidate > 0) & ~covered)).sum() for candidate in has]
            assert gains[pick] == pytest.approx(max(gains), abs=1e-5) or covered.all()
            covered |= has[pick] > 0


def test_states_by_name():
    state = make_state("saturating", 0.5, 0.25)
    assert isinstance(state, SaturatingState)
    assert (state.lam, state.floor) == (0.5, 0.25)
    started = state.start(np.ones((1, 2)))
    assert (started.update(np.ones((1, 2))).lam, started.update(np.ones((1, 2))).floor) == (0.5, 0.25)
