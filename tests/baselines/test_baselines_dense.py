"""Dense top-k and MMR against plain loops and LangChain."""

from __future__ import annotations

import numpy as np
import pytest
from langchain_core.vectorstores.utils import maximal_marginal_relevance as langchain_mmr
from rcr_trainer import baselines
from rcr_trainer.baselines.dense import BERTSelector, ContrieverSelector, DenseSelector, MMRSelector
from rcr_trainer.data.arrays import top_k
from toys import tuned


def lookup(seed, n, dimensions=12):
    rng = np.random.default_rng(seed)
    vectors = {str(i): rng.normal(size=dimensions) for i in range(n)}
    return vectors, lambda texts: np.stack([vectors[text] for text in texts])


def pool(n):
    return [{"source": str(i)} for i in range(n)]


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def slow_mmr(query, candidates, k, lambda_mult, allowed):
    picked = [max(allowed, key=lambda c: cosine(query, candidates[c]))]
    while len(picked) < k:
        picked.append(
            max(
                (c for c in allowed if c not in picked),
                key=lambda c: (
                    lambda_mult * cosine(query, candidates[c])
                    - (1 - lambda_mult) * max(cosine(candidates[c], candidates[p]) for p in picked)
                ),
            )
        )
    return picked


def test_top_k_is_a_stable_sort():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 5, size=(50, 40)).astype(float)
    scores[:, 3] = -np.inf
    for k in (1, 7, 40):
        assert (top_k(scores, k) == np.argsort(-scores, axis=1, kind="stable")[:, :k]).all()


def test_dense_by_hand():
    vectors = {"right": [3, 0], "up": [0, 1], "left": [-1, 0], "corner": [1, 1], "zero": [0, 0], "query": [1, 0.1]}
    selector = DenseSelector(
        [{"source": s} for s in ("up", "left", "zero", "right", "corner")],
        embed=lambda texts: np.array([vectors[t] for t in texts]),
    )
    assert selector.pick(["query"], 5).tolist() == [[3, 4, 0, 2, 1]]
    assert selector.pick(["query"], 2, [[3]]).tolist() == [[4, 0]]


@pytest.mark.parametrize("lambda_mult", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_mmr_equals_langchain_and_a_slow_loop(lambda_mult):
    vectors, embed = lookup(1, 40)
    candidates = [vectors[str(i)] for i in range(30)]
    queries = [str(i) for i in range(30, 40)]
    exclude = [[int(q) % 7, int(q) % 5] for q in queries]
    selector = tuned(MMRSelector(pool(30), embed=embed), lambda_mult=lambda_mult)
    free = selector.pick(queries, 30)
    masked = selector.pick(queries, 6, exclude)
    for row, query in enumerate(queries):
        theirs = langchain_mmr(vectors[query], [list(v) for v in candidates], lambda_mult=lambda_mult, k=30)
        assert free[row].tolist() == theirs
        allowed = [i for i in range(30) if i not in exclude[row]]
        assert masked[row].tolist() == slow_mmr(vectors[query], candidates, 6, lambda_mult, allowed)


def test_mmr_by_hand():
    vectors = {"query": [1, 0], "same": [1, 0], "near": [0.9, 0.1], "far": [0, 1]}

    def embed(texts):
        return np.array([vectors[text] for text in texts])

    examples = [{"source": s} for s in ("near", "same", "same", "far")]
    assert tuned(MMRSelector(examples, embed=embed), lambda_mult=1).pick(["query"], 3).tolist() == [[1, 2, 0]]
    # 0.4·1 − 0.6·1 for the copy, 0.4·0 − 0.6·0 for the far one.
    assert tuned(MMRSelector(examples, embed=embed), lambda_mult=0.4).pick(["query"], 2).tolist() == [[1, 3]]


def test_blocks_of_queries_change_nothing(monkeypatch):
    _, embed = lookup(3, 60)
    queries = [str(i) for i in range(30, 60)]
    selectors = [DenseSelector(pool(30), embed=embed), MMRSelector(pool(30), embed=embed)]
    whole = [selector.pick(queries, 5) for selector in selectors]
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 100)
    for selector, expected in zip(selectors, whole, strict=True):
        assert (selector.pick(queries, 5) == expected).all()


def test_each_question_of_the_pool_is_embedded_once_until_it_changes():
    _, embed = lookup(4, 10)
    asked = []

    def recording(texts):
        asked.append(list(texts))
        return embed(texts)

    selector = DenseSelector([*pool(5), {"source": "0"}], embed=recording)
    selector.pick(["7"], 2)
    selector.pick(["7", "8"], 2)
    selector.add_example({"source": "6"})
    selector.pick(["9"], 2)
    first = ["0", "1", "2", "3", "4"]
    assert asked == [first, ["7"], ["7", "8"], [*first, "6"], ["9"]]


@pytest.mark.parametrize("cls", [BERTSelector, ContrieverSelector])
def test_selectors_with_their_own_model_go_by_inner_products(cls):
    vectors, embed = lookup(7, 12)
    asked = []
    selector = cls(pool(10), encode=lambda *named: asked.append(named) or embed)
    expected = sorted(range(10), key=lambda n: -float(vectors["11"] @ vectors[str(n)]))
    assert selector.pick(["11"], 10).tolist() == [expected]
    assert expected != DenseSelector(pool(10), embed=embed).pick(["11"], 10)[0].tolist()
    assert asked == [(selector.name, cls.base)]
    assert baselines.get_baseline(selector.name) is cls
