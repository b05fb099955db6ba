"""A large dense pool is screened in rounded numbers, and nothing that is picked changes."""

import pickle
import sys

import numpy as np
import pytest
import torch

from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index import coarse
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.coarse import Coarse, CoarseProduct, CoarseScan
from langchain_rcr.index.memory import Followed, MatrixTable, Screened
from langchain_rcr.policy.selection import _decoded

_NO_PLACES = np.empty((2, 0), dtype=np.int64)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Whole numbers are used, whatever their speed here; blocks end within the pools."""
    monkeypatch.setattr(CoarseProduct, "_least", 1)
    monkeypatch.setattr(coarse, "_CACHED", 500)


def ready(kind: type[Coarse], rows: np.ndarray) -> Coarse:
    made = kind()
    assert not any(made.ready(rows) for _ in range(2))
    assert made.ready(rows)
    return made


def test_the_nearest_rows_in_8_bits_by_hand():
    scan = ready(CoarseScan, np.float32([[127, 0], [0.4, -100], [-127, 3]]))
    keys, ceiling = scan.nearest(np.float32([254, 0]), 2)
    assert keys.tolist() == [0, 1]
    # In 8 bits (0, -100) for the second, off by 0.4, with which the state's length goes; the state is exact.
    np.testing.assert_allclose(ceiling, 0 + 0.4 * 254, rtol=1e-6)
    keys, ceiling = scan.nearest(np.float32([254, 0]), 4)
    assert (keys.tolist(), ceiling) == ([0, 1, 2], -np.inf)


def test_the_nearest_rows_in_7_bits_by_hand(monkeypatch):
    monkeypatch.setattr(coarse, "_OPEN", 1)
    # 62.5 becomes 62, so that products with states of length 126 are off by 63 at most: 126 below the best may be it.
    product = ready(CoarseProduct, np.float32([[63, 0], [62.5, 1], [61, 9], [0, 63], [0, 62]]))
    states, slack, exclude = np.float32([[126, 0], [0, 126]]), np.zeros(2), _NO_PLACES
    near = product.nearest(states, slack, exclude, _NO_PLACES, None, 200.0)
    assert (near.whose.tolist(), near.keys.tolist()) == ([0, 0, 1, 1], [0, 1, 3, 4])
    np.testing.assert_allclose(near.logits, [126 * 63, 126 * 62, 126 * 63, 126 * 62])
    rounded = states @ np.float32([[63, 0], [62, 1], [61, 9], [0, 63], [0, 62]]).T
    np.testing.assert_allclose(near.log_partition, np.log(np.exp(rounded / 200).sum(axis=1)), rtol=1e-6)
    # Without the best: barred for the first state, masked for the second, which counts it in the sum.
    exclude, masked, allowed = np.array([[0], [0]]), np.array([[1], [3]]), np.arange(5) != 2
    near = product.nearest(states, slack, exclude, masked, allowed, 200.0)
    assert (near.whose.tolist(), near.keys.tolist()) == ([0, 1], [1, 4])
    left = [np.exp(rounded[0, [1, 3, 4]] / 200).sum(), np.exp(rounded[1, [0, 1, 3, 4]] / 200).sum()]
    np.testing.assert_allclose(near.log_partition, np.log(left), rtol=1e-6)


@pytest.mark.parametrize(
    ("state", "barred", "tau"), [([0, 0], [], None), ([1, 0], range(70), None), ([1, 0], [], 1e9), ([1, 0], [], 0.01)]
)
def test_no_rows_are_told_where_rounding_tells_nothing(state, barred, tau):
    """All are equal, none is left, what is hidden would count, or logits are off by many τ."""
    rows = np.random.default_rng(0).normal(size=(70, 2)).astype(np.float32)
    product = ready(CoarseProduct, rows)
    exclude = np.array([[0] * len(barred), [*barred]], dtype=np.int64)
    assert product.nearest(np.float32([state]), np.zeros(1), exclude, _NO_PLACES, None, tau) is None


def test_whole_numbers_never_overflow_by_pairs():
    """As they do in 8 bits where pairs of products are added in 16."""
    rows = np.full((200, 64), 5, dtype=np.float32)
    rows[7] = -5
    near = ready(CoarseProduct, rows).nearest(np.float32([[-2] * 64]), np.zeros(1), _NO_PLACES, _NO_PLACES, None, None)
    assert near.keys.tolist() == [7]
    np.testing.assert_allclose(near.logits, [640], rtol=1e-6)


def test_what_a_machine_lacks_is_done_without(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.coarse.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(CoarseProduct, "_least", None)
    monkeypatch.setattr(coarse, "_faster", lambda count: False)
    rows = np.ones((3, 2), dtype=np.float32)
    for kind in (CoarseScan, CoarseProduct):
        made = kind()
        assert not any(made.ready(rows) for _ in range(4))


@pytest.mark.parametrize(("faster", "least"), [((1, 4), 1), ((4,), 4), ((), 0)])
def test_the_product_is_used_for_as_many_states_as_it_is_faster_for(monkeypatch, faster, least):
    monkeypatch.setattr(CoarseProduct, "_least", None)
    real = coarse._faster(1)
    assert isinstance(real, bool)
    monkeypatch.setattr(coarse, "_faster", lambda count: count in faster)
    assert (CoarseProduct.least(), CoarseProduct.possible()) == (least, least > 0)


@pytest.mark.parametrize("missing", [True, False])
def test_without_the_product_all_goes_in_float32(monkeypatch, missing):
    monkeypatch.setattr(CoarseProduct, "_least", None)

    def refuses(*_):
        raise RuntimeError("not implemented for CPU")

    if missing:
        monkeypatch.delattr(torch, "_int_mm")
    else:
        monkeypatch.setattr(torch, "_int_mm", refuses)
    assert not CoarseProduct.possible()


def kinds(table, states, tau, **how):
    followed = table.followed(states, tau, **how)
    return None if followed is None else {*map(type, followed)}


@pytest.mark.parametrize("looked_at", [(64, 1024), (2, 20)])
@pytest.mark.parametrize("seed", range(20))
def test_large_dense_pools_are_screened(monkeypatch, seed, looked_at):
    """Picks and logits are those of a pool that is scored in full; log partitions, too, to a thousandth."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(300, 24)).astype(np.float32)
    full[rng.integers(0, 300, 60)] = full[rng.integers(0, 300, 60)]  # equal candidates
    full /= np.linalg.norm(full, axis=1, keepdims=True)
    if seed % 4 == 3:
        full[:, 0] *= 1000  # of which 8 bits leave little
    vectors, k = PoolVectors(full, rng.normal(size=(300, 24)).astype(np.float32) / 5), int(rng.integers(1, 30))
    table = MatrixTable(vectors)
    if seed % 3:
        table = table.allowing(rng.random(300) < 0.5)
    need = rng.normal(size=(7, 24)).astype(np.float32) / 5
    groups, barred = rng.integers(0, 40, 300), [rng.permutation(300)[:20]] * 7
    state = AdditiveState(-0.3)
    expected = _decoded(need, table, state, k, barred, groups, 0.7)
    for name in ("langchain_rcr.basics.rows.LARGE", "langchain_rcr.index.memory.LARGE"):
        monkeypatch.setattr(name, 0)
    monkeypatch.setattr("langchain_rcr.index.memory._LOOKED_AT", looked_at)
    monkeypatch.setattr(coarse, "_OPEN", looked_at[0] // 2)
    told: list[bool] = []
    nearest = CoarseProduct.nearest

    def watched(self, *arguments):
        told.append((near := nearest(self, *arguments)) is not None)
        return near

    monkeypatch.setattr(CoarseProduct, "nearest", watched)
    assert [kinds(table, need[:1], tau) for tau in (None, None, None, 0.7)] == [
        {Followed},
        {Followed},
        {Screened},
        {Followed},
    ]
    assert [kinds(table, need[:count], None) for count in (0, 1, 3, 4)] == [None, {Screened}, {Screened}, None]
    assert [kinds(table, need[:count], 0.7) for count in (0, 2, 3)] == [None, {Followed}, None]
    assert [kinds(table, need[:1], 0.7, rough=True) for _ in range(3)] == [{Followed}, {Followed}, None]
    for at in (table, pickle.loads(pickle.dumps(table))):  # as it is, and asked for the first time
        for few in (1, 2, 6, 7):
            for tau in (None, 0.7):
                keys, logits, totals, contexts = _decoded(
                    need[:few], at, state, k, barred[:few], groups, tau, rough=True
                )
                np.testing.assert_array_equal(keys, expected[0][:few])
                np.testing.assert_allclose(logits, expected[1][:few], rtol=1e-4, atol=1e-3)
                np.testing.assert_array_equal(contexts, expected[3][:few])
                if tau:
                    np.testing.assert_allclose(totals, expected[2][:few], atol=3e-3, rtol=0)
    assert any(told) or seed % 4 == 3 or looked_at[0] == 2
