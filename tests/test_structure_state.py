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


def test_lambda_zero_ignores_the_picks():
    query = np.ones((2, 4), dtype=np.float32)
    assert SaturatingState(0.0).start(query).update(query).vector().tolist() == query.tolist()


def test_float32_stays_and_an_empty_batch_is_fine():
    for rows in (0, 1):
        query = np.ones((rows, 3), dtype=np.float32)
        vector = SaturatingState(np.float64(0.5)).start(query).update(query).vector()
        assert (vector.dtype, vector.shape) == (np.float32, (rows, 3))


def test_gradients_reach_query_and_contexts():
    query = torch.tensor([[2.0, 3.0, 5.0]], requires_grad=True)
    context = torch.tensor([[0.0, 0.5, 0.25]], requires_grad=True)
    SaturatingState(1.0).start(query).update(context).vector().sum().backward()
    assert query.grad.tolist() == [[1, 0.5, 0.75]]
    assert context.grad.tolist() == [[-2, -3, -5]]


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
    state = make_state("saturating", 0.5)
    assert isinstance(state, SaturatingState)
    assert state.lam == 0.5
