"""The saturating state: by hand, in NumPy and in torch."""

import math

import numpy as np
import pytest
import torch

from langchain_rcr.families.state import SaturatingState, make_state
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.selection import greedy


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_what_is_covered_is_needed_no_more(make):
    start = SaturatingState(1.0).start(make([[4.0, 2.0, 1.0], [1.0, 1.0, 1.0]]))
    one = start.update(make([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]))
    two = one.update(make([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]]))
    assert one.vector().tolist() == [[0, 2, 0.5], [1, 1, 1]]
    assert two.vector().tolist() == [[0, 2, 0.25], [1, 0, 1]]
    assert start.vector().tolist() == [[4, 2, 1], [1, 1, 1]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_share_that_stays_needed_by_hand(make):
    start = SaturatingState(1.0, 2.0).start(make([[4.0, 3.0, -1.0], [3.0, 4.0, 0.0]], dtype=float64(make)))
    one = start.update(make([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0]], dtype=float64(make)))
    two = one.update(make([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=float64(make)))
    # Cosines with (4, 3, 0) and (3, 4, 0), as what isn't needed doesn't count: 0.8, 0.8; then 0.6, 0.6.
    assert one.vector().tolist() == approx([[4 * 0.64, 3, -1], [3, 4 - 0.5 * (4 - 0.64 * 4), 0]])
    assert two.vector().tolist() == approx([[4 * 0.64, 3 * 0.36, -1], [3 * 0.36, 4 - 0.5 * (4 - 0.64 * 4), 0]])
    half = SaturatingState(0.5, 3.0).start(make([[4.0, 3.0]], dtype=float64(make)))
    assert half.update(make([[1.0, 0.0]], dtype=float64(make))).vector().tolist() == approx(
        [[4 - 0.5 * (4 - 4 * 0.8**3), 3]]
    )


def float64(make):
    return torch.float64 if make is torch.tensor else np.float64


def approx(rows):
    return [pytest.approx(row) for row in rows]


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("fade", [None, 1.0, 3.0])
def test_any_sequence_of_picks_leaves_what_a_plain_loop_says(lam, fade):
    rng = np.random.default_rng(0)
    query, contexts = rng.normal(size=(3, 7)), rng.random((5, 3, 7))
    state, expected = SaturatingState(lam, fade).start(query), query.copy()
    for context in contexts:
        state = state.update(context)
        for row in range(3):
            needed = [max(value, 0) for value in query[row]]
            length = math.sqrt(sum(n * n for n in needed)) * math.sqrt(sum(z * z for z in context[row]))
            share = (
                0.0
                if fade is None
                else (sum(n * z for n, z in zip(needed, context[row], strict=True)) / length) ** fade
            )
            for column in range(7):
                covered = expected[row, column] - share * query[row, column]
                expected[row, column] -= lam * context[row, column] * covered
        np.testing.assert_allclose(state.vector(), expected, atol=1e-9)
    if lam == 0:
        np.testing.assert_allclose(state.vector(), query)


def test_what_is_needed_as_a_whole_is_picked_again_and_parts_are_not():
    whole, parts = np.float32([[8, 8, 1]]), np.float32([[8, 4, 4, 4, 4]])
    has = np.float32([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    alone = np.float32([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    for fade, second in ((None, 2), (3.0, 1)):  # cosine 0.996
        assert greedy(whole, PoolVectors(has, has), SaturatingState(1.0, fade), 2).positions.tolist() == [[0, second]]
    for fade, second in ((None, 2), (3.0, 2), (1.0, 1)):  # cosine 0.707: 8 · 0.35 < 4 < 8 · 0.707
        found = greedy(parts, PoolVectors(alone, alone), SaturatingState(1.0, fade), 2)
        assert found.positions.tolist() == [[0, second]]


def test_where_nothing_is_needed_or_shown_nothing_changes():
    for query, context in ((np.zeros((1, 3)), np.ones((1, 3))), (np.ones((1, 3)), np.zeros((1, 3)))):
        assert SaturatingState(1.0, 3.0).start(query).update(context).vector().tolist() == query.tolist()


def test_lambda_zero_ignores_the_picks():
    query = np.ones((2, 4), dtype=np.float32)
    assert SaturatingState(0.0, 2.0).start(query).update(query).vector().tolist() == query.tolist()


@pytest.mark.parametrize("fade", [None, np.float64(3)])
def test_float32_stays_and_an_empty_batch_is_fine(fade):
    for rows in (0, 1):
        query = np.ones((rows, 3), dtype=np.float32)
        vector = SaturatingState(np.float64(0.5), fade).start(query).update(query).vector()
        assert (vector.dtype, vector.shape) == (np.float32, (rows, 3))


def test_gradients_reach_query_and_contexts():
    query = torch.tensor([[2.0, 3.0, 5.0]], requires_grad=True)
    context = torch.tensor([[0.0, 0.5, 0.25]], requires_grad=True)
    SaturatingState(1.0).start(query).update(context).vector().sum().backward()
    assert query.grad.tolist() == [[1, 0.5, 0.75]]
    assert context.grad.tolist() == [[-2, -3, -5]]


@pytest.mark.parametrize("fade", [1.0, 3.0])
def test_gradients_are_those_of_small_differences(fade):
    def after(*vectors):
        state = SaturatingState(0.9, fade).start(vectors[0])
        for context in vectors[1:]:
            state = state.update(context)
        return state.vector()

    generator = torch.Generator().manual_seed(0)
    vectors = [torch.rand(2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    vectors[0][0, 0] = -0.5
    assert torch.autograd.gradcheck(after, [each.requires_grad_() for each in vectors])


def test_gradients_where_nothing_is_needed_are_finite():
    query = torch.zeros(1, 3, requires_grad=True)
    context = torch.zeros(1, 3, requires_grad=True)
    SaturatingState(1.0, 3.0).start(query).update(context).vector().sum().backward()
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(context.grad).all()


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
    state = make_state("saturating", 0.5, 2.0)
    assert isinstance(state, SaturatingState)
    assert (state.lam, state.fade) == (0.5, 2.0)
    updated = state.start(np.ones((1, 2))).update(np.ones((1, 2)))
    assert (updated.lam, updated.fade) == (0.5, 2.0)
