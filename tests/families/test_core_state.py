"""The additive state: Eq. 4 by hand, values, in NumPy and torch."""

import numpy as np
import pytest
import torch

from langchain_rcr.errors import InputError
from langchain_rcr.families.state import STATES, AdditiveState, make_state


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_equation_4_by_hand(make):
    query = make([[1.0, 2.0], [0.0, -1.0]])
    first, second = make([[1.0, 0.0], [0.0, 2.0]]), make([[10.0, 10.0], [1.0, 1.0]])
    start = AdditiveState(0.5).start(query)
    one = start.update(first)
    two = one.update(second)
    assert start.vector().tolist() == [[1, 2], [0, -1]]
    assert one.vector().tolist() == [[1.5, 2], [0, 0]]
    assert two.vector().tolist() == [[6.5, 7], [0.5, 0.5]]


def test_states_are_values():
    query = np.ones((1, 2), dtype=np.float32)
    fresh = AdditiveState(-1.0)
    start = fresh.start(query)
    branches = [start.update(np.full((1, 2), n, dtype=np.float32)) for n in (1, 2)]
    assert start.vector().tolist() == [[1, 1]]
    assert [branch.vector().tolist() for branch in branches] == [[[0, 0]], [[-1, -1]]]
    assert query.tolist() == [[1, 1]]
    with pytest.raises(RuntimeError, match="start"):
        fresh.vector()
    with pytest.raises(RuntimeError, match="start"):
        fresh.update(query)


@pytest.mark.parametrize("lam", [0.1, 1, np.float64(0.1), np.float32(0.1)])
def test_float32_stays_float32(lam):
    query = np.ones((1, 2), dtype=np.float32)
    assert AdditiveState(lam).start(query).update(query).vector().dtype == np.float32


def test_gradients_reach_query_and_contexts():
    query, context = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    AdditiveState(0.25).start(query).update(context).update(context).vector().sum().backward()
    assert query.grad.tolist() == [[1] * 3] * 2
    assert context.grad.tolist() == [[0.5] * 3] * 2


def test_states_by_name():
    assert make_state("additive", 0.3).lam == 0.3
    query, context = np.ones((1, 2)), np.full((1, 2), 2.0)  # what is added up covers nothing, and nothing fades
    assert make_state("additive", 0.5, 2.0).start(query).update(context).vector().tolist() == [[2, 2]]
    with pytest.raises(InputError, match="unknown state 'sticky'"):
        make_state("sticky", 0.3)


def test_a_state_replaces_no_other_but_may_be_defined_again(monkeypatch):
    monkeypatch.setattr("langchain_rcr.families.state.STATES", dict(STATES))
    with pytest.raises(InputError, match=r"the state 'additive' is AdditiveState: give .*Forgetful another"):

        class Forgetful(AdditiveState):
            pass

    assert isinstance(make_state("additive", 0.3), AdditiveState)
    for _ in range(2):  # as a notebook's cell does

        class Patient(AdditiveState):
            name = "patient"

    assert type(make_state("patient", 0.3)) is Patient
