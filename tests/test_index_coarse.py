"""A large dense pool is screened in 8 bits, and nothing that is picked changes."""

import pickle
import sys

import numpy as np
import pytest

from langchain_rcr.index.base import PoolVectors
from langchain_rcr.index.coarse import Coarse
from langchain_rcr.index.memory import Followed, MatrixTable, Screened
from langchain_rcr.selection import _decoded
from langchain_rcr.state import AdditiveState


def test_the_nearest_rows_in_8_bits_by_hand():
    rows = np.float32([[127, 0], [0.4, -100], [-127, 3]])
    coarse = Coarse()
    assert not any(coarse.ready(rows) for _ in range(2))
    assert coarse.ready(rows)
    keys, ceiling = coarse.nearest(np.float32([254, 0]), 2)
    assert keys.tolist() == [0, 1]
    # In 8 bits (0, -100) for the second, off by 0.4, with which the state's length goes; the state is exact.
    np.testing.assert_allclose(ceiling, 0 + 0.4 * 254, rtol=1e-6)
    keys, ceiling = coarse.nearest(np.float32([254, 0]), 4)
    assert (keys.tolist(), ceiling) == ([0, 1, 2], -np.inf)


def test_without_faiss_there_are_no_8_bits(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.coarse.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    coarse, rows = Coarse(), np.ones((3, 2), dtype=np.float32)
    assert not any(coarse.ready(rows) for _ in range(4))


@pytest.mark.parametrize("looked_at", [(64, 1024), (2, 20)])
@pytest.mark.parametrize("seed", range(20))
def test_one_question_alone_screens_a_large_dense_pool(monkeypatch, seed, looked_at):
    """Its picks and logits are those of the same question among others, which are scored in full."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(300, 24)).astype(np.float32)
    full[rng.integers(0, 300, 60)] = full[rng.integers(0, 300, 60)]  # equal candidates
    if seed % 4 == 3:
        full[:, 0] *= 1000  # of which 8 bits leave little
    vectors, k = PoolVectors(full, rng.normal(size=(300, 24)).astype(np.float32)), int(rng.integers(1, 30))
    table = MatrixTable(vectors)
    if seed % 3:
        table = table.allowing(rng.random(300) < 0.5)
    need = rng.normal(size=(7, 24)).astype(np.float32)
    groups, barred = rng.integers(0, 40, 300), [rng.permutation(300)[:20]] * 7
    state = AdditiveState(-0.3)
    expected = _decoded(need, table, state, k, barred, groups)
    for name in ("langchain_rcr.rows.LARGE", "langchain_rcr.index.memory.LARGE"):
        monkeypatch.setattr(name, 0)
    monkeypatch.setattr("langchain_rcr.index.memory._LOOKED_AT", looked_at)
    kinds = [type(table.follow(need[:1], tau)) for tau in (None, None, None, 0.7)]
    assert kinds == [Followed, Followed, Screened, Followed]
    assert [table.few(count, None) for count in (0, 1, 6, 7)] == [False, True, True, False]
    assert [table.few(count, 0.7) for count in (0, 2, 3)] == [False, True, False]
    for at in (table, pickle.loads(pickle.dumps(table))):  # as it is, and asked for the first time
        for few in (1, 2, 6):
            keys, logits, _, contexts = _decoded(need[:few], at, state, k, barred[:few], groups)
            np.testing.assert_array_equal(keys, expected[0][:few])
            np.testing.assert_allclose(logits, expected[1][:few], rtol=1e-4, atol=1e-3)
            np.testing.assert_array_equal(contexts, expected[3][:few])
