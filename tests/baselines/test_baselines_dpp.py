"""The determinantal point process against determinants worked out one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rcr_trainer.baselines.dense import DenseSelector, DPPSelector
from toys import tuned

PLANE = {"query": [2, 0], "same": [1, 0], "near": [0.8, 0.6], "far": [0, 1], "nothing": [0, 0]}


def lookup(seed, n, dimensions=12):
    vectors = {str(i): v for i, v in enumerate(np.random.default_rng(seed).normal(size=(n, dimensions)))}
    return vectors, lambda texts: np.stack([vectors[text] for text in texts])


def in_plane(texts):
    return np.array([PLANE[text] for text in texts])


def pool(n):
    return [{"source": str(i)} for i in range(n)]


def slow(query, candidates, allowed, k, lam, fetch_k):
    """The kernel of CEIL written out; each step takes the largest determinant."""
    unit = np.array([v / np.linalg.norm(v) for v in [query, *candidates]])
    relevance = (1 + unit[1:] @ unit[0]) / 2
    quality = np.exp(relevance / (2 * lam))
    kernel = np.diag(quality) @ ((1 + unit[1:] @ unit[1:].T) / 2) @ np.diag(quality)
    ranked = sorted(allowed, key=lambda c: -relevance[c])
    picked = []
    while len(picked) < min(k, fetch_k, len(allowed)):
        left = [c for c in ranked[:fetch_k] if c not in picked]
        picked.append(max(left, key=lambda c: np.linalg.slogdet(kernel[np.ix_([*picked, c], [*picked, c])])[1]))
    return [*picked, *(c for c in ranked if c not in picked)][:k]


def test_by_hand():
    examples = [{"source": s} for s in ("same", "same", "near", "far")]
    # Relevance 1, 1, 0.9, 0.5. Beside the first, near has the volume 1 − 0.9² = 0.19 and far 1 − 0.5² = 0.75;
    # ln 0.19 + 0.9 = −0.76 and ln 0.75 + 0.5 = 0.21 with λ = 1, 7.34 and 4.71 with λ = 0.1. The copy has none.
    assert tuned(DPPSelector(examples, embed=in_plane), lam=1).pick(["query"], 4).tolist() == [[0, 3, 2, 1]]
    assert tuned(DPPSelector(examples, embed=in_plane), lam=0.1).pick(["query"], 4).tolist() == [[0, 2, 3, 1]]
    assert tuned(DPPSelector(examples, embed=in_plane), lam=0.1).pick(["query"], 3, [[0]]).tolist() == [[1, 2, 3]]


def test_zero_vectors_are_numbers_too():
    examples = [{"source": s} for s in ("nothing", "nothing", "same", "far")]
    selector = tuned(DPPSelector(examples, embed=in_plane), lam=0.1)
    assert selector.pick(["query"], 4).tolist() == [[2, 3, 0, 1]]
    # From nowhere all are as relevant: same and far have the volume 1, nothing has 1/2; a copy has none.
    assert selector.pick(["nothing"], 4).tolist() == [[2, 3, 0, 1]]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 25),
    lam=st.sampled_from([0.02, 0.1, 0.5, 3.0]),
    fetch_k=st.integers(1, 30),
    data=st.data(),
)
def test_equals_the_slow_loop(seed, n, lam, fetch_k, data):
    vectors, embed = lookup(seed, n + 4)
    candidates = [vectors[str(i)] for i in range(n)]
    queries = [str(i) for i in range(n, n + 4)]
    entries = st.lists(st.integers(0, n - 1), max_size=n - 1, unique=True)
    exclude = [data.draw(entries) for _ in queries]
    k = min(8, n - max(map(len, exclude)))
    picked = tuned(DPPSelector(pool(n), embed=embed), lam=lam, fetch_k=fetch_k).pick(queries, k, exclude)
    for row, query in enumerate(queries):
        allowed = [c for c in range(n) if c not in exclude[row]]
        assert picked[row].tolist() == slow(vectors[query], candidates, allowed, k, lam, fetch_k)


def test_what_lies_outside_the_shortlist_follows_by_relevance():
    _, embed = lookup(1, 32)
    dense = DenseSelector(pool(30), embed=embed).pick(["30", "31"], 30)
    picked = tuned(DPPSelector(pool(30), embed=embed), lam=0.3, fetch_k=9).pick(["30", "31"], 30)
    assert (np.sort(picked[:, :9], axis=1) == np.sort(dense[:, :9], axis=1)).all()
    assert (picked[:, :9] != dense[:, :9]).any()
    assert (picked[:, 9:] == dense[:, 9:]).all()
    few = tuned(DPPSelector(pool(30), embed=embed), lam=0.3, fetch_k=9).pick(["30"], 5, [dense[0, :25]])
    assert sorted(few[0]) == sorted(dense[0, 25:])


def test_the_smallest_trade_offs_neither_overflow_nor_forget_relevance():
    _, embed = lookup(2, 40)
    queries = [str(i) for i in range(30, 40)]
    dense = DenseSelector(pool(30), embed=embed).pick(queries, 10)
    assert (tuned(DPPSelector(pool(30), embed=embed), lam=1e-7).pick(queries, 10) == dense).all()
    diverse = tuned(DPPSelector(pool(30), embed=embed), lam=1e7).pick(queries, 10)
    assert (diverse != dense).mean() > 0.5


def test_blocks_of_queries_change_nothing(monkeypatch):
    _, embed = lookup(3, 60)
    queries = [str(i) for i in range(30, 60)]
    selector = tuned(DPPSelector(pool(30), embed=embed), fetch_k=12)
    whole = selector.pick(queries, 14)
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 500)
    assert (selector.pick(queries, 14) == whole).all()


def test_as_a_langchain_selector():
    selector = tuned(DPPSelector([{"source": s} for s in ("near", "near", "far")], embed=in_plane, k=2), lam=0.1)
    assert selector.select_examples({"source": "query"}) == [{"source": "near"}, {"source": "far"}]
    selector.add_example({"source": "same"})
    assert selector.select_examples({"source": "query"}) == [{"source": "same"}, {"source": "near"}]
