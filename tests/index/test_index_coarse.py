"""A large dense pool is screened in 8 bits, and nothing that is picked changes."""

import pickle
import sys

import numpy as np
import pytest
from plain_reader import run

from langchain_rcr.families.state import AdditiveState
from langchain_rcr.index.base import PoolVectors, Row
from langchain_rcr.index.memory import Coarse, MatrixTable
from langchain_rcr.policy.selection import Options, select


def test_the_nearest_rows_in_8_bits_by_hand():
    rows, scan = np.float32([[127, 0], [0.4, -100], [-127, 3]]), Coarse()
    assert not any(scan.ready(rows) for _ in range(2))
    assert scan.ready(rows)
    keys, ceiling = scan.nearest(np.float32([254, 0]), 2)
    assert keys.tolist() == [0, 1]
    # In 8 bits (0, -100) for the second, off by 0.4, with which the state's length goes; the state is exact.
    np.testing.assert_allclose(ceiling, 0 + 0.4 * 254, rtol=1e-6)
    keys, ceiling = scan.nearest(np.float32([254, 0]), 4)
    assert (keys.tolist(), ceiling) == ([0, 1, 2], -np.inf)


def test_without_faiss_all_goes_in_float32(monkeypatch):
    monkeypatch.setattr("langchain_rcr.index.memory.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    scan = Coarse()
    assert not any(scan.ready(np.ones((3, 2), dtype=np.float32)) for _ in range(4))


@pytest.mark.parametrize("looked_at", [(64, 1024), (2, 20)])
@pytest.mark.parametrize("seed", range(20))
def test_large_dense_pools_are_screened(monkeypatch, seed, looked_at):
    """Picks and logits are those of a pool that is scored in full."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(300, 24)).astype(np.float32)
    full[rng.integers(0, 300, 60)] = full[rng.integers(0, 300, 60)]  # equal candidates
    full /= np.linalg.norm(full, axis=1, keepdims=True)
    if seed % 4 == 3:
        full[:, 0] *= 1000  # of which 8 bits leave little
    vectors, k = PoolVectors(full, rng.normal(size=(300, 24)).astype(np.float32) / 5), int(rng.integers(1, 30))
    rows = [Row(str(n), {}, n % 40) for n in range(300)]
    table = MatrixTable(vectors, rows)
    if seed % 3:
        table = table.allowing(rng.random(300) < 0.5)
    need = rng.normal(size=(7, 24)).astype(np.float32) / 5
    barred = np.tile(rng.permutation(300)[:20], (7, 1))
    state = AdditiveState(-0.3)
    options = Options(k, different_programs=bool(seed % 2))
    expected = run(select(need, state, options, table.opened(), barred))
    monkeypatch.setattr("langchain_rcr.index.memory.LARGE", 0)
    monkeypatch.setattr("langchain_rcr.index.memory._LOOKED_AT", looked_at)
    scans, nearest = [0], Coarse.nearest

    def counted(self, *arguments):
        scans[0] += 1
        return nearest(self, *arguments)

    monkeypatch.setattr(Coarse, "nearest", counted)
    for few, screened in ((1, False), (7, False), (2, False), (1, True), (3, True), (7, False)):
        scans[0] = 0
        picks = run(select(need[:few], state, options, table.opened(), barred[:few]))
        # With constraints the few questions whose candidates don't suffice ask again.
        assert (scans[0] > 0) is screened or options.different_programs
        np.testing.assert_array_equal(picks.positions, expected.positions[:few])
        np.testing.assert_allclose(picks.logits, expected.logits[:few], rtol=1e-4, atol=1e-3)
    scans[0] = 0
    run(select(need[:1], state, Options(k, probabilities=True), table.opened()))
    again = pickle.loads(pickle.dumps(table))  # asked for the first time
    picks = run(select(need[:1], state, options, again.opened(), barred[:1]))
    np.testing.assert_array_equal(picks.positions, expected.positions[:1])
    assert not scans[0]
