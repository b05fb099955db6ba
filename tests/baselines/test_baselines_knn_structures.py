"""kNN structures by hand and against a slow loop."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.baselines.greedy import KNNStructuresSelector
from toys import tuned

from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
WORDS = "abcde"


def embed(texts):
    return np.array([[text.split().count(word) for word in WORDS] for text in texts], dtype=np.float32)


def make(pairs, **options):
    examples = [{"source": s, "target": t} for s, t in pairs]
    return tuned(KNNStructuresSelector(examples, spec=SPEC, embed=embed), **options)


def slow(pairs, query, barred, k, temperature, neighbours):
    allowed = [n for n in range(len(pairs)) if n not in barred]
    vectors = embed([query, *(source for source, _ in pairs)])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = np.round(unit[1:] @ unit[0], 6).astype(float)
    nearest = sorted(allowed, key=lambda n: (-cosine[n], n))[:neighbours]
    weights = {n: np.exp(cosine[n] / temperature) for n in nearest}
    structures = [SPEC.structures(target) for _, target in pairs]
    need = {}
    for n in nearest:
        for name in structures[n]:
            need[name] = need.get(name, 0) + weights[n] / sum(weights.values())
    need = {name: round(2**16 * share) / 2**16 for name, share in need.items()}
    picks, covered = [], set()
    while len(picks) < k:
        left = [n for n in allowed if n not in picks]
        gain = {n: sum(need.get(name, 0) for name in structures[n] - covered) for n in left}
        if not max(gain.values()):
            gain = {n: sum(need.get(name, 0) for name in structures[n]) for n in left}
        picks.append(max(left, key=lambda n: (gain[n], -n)))
        covered |= structures[picks[-1]]
    return picks


def test_by_hand():
    # Two neighbours with the same weight: f and g ( h ) are needed by a half each. 1 has 5 structures of the second,
    # 2 has 2 of the first; 3 has both roots' labels, but neither root.
    pairs = [("b", "z"), ("a", "g ( h )"), ("a", "f"), ("c", "y ( f , g )")]
    assert make(pairs, neighbours=2).pick(["a"], 3).tolist() == [[1, 2, 3]]
    # 1 is barred and so needs nothing: what is left are f, and z, whose question is as far from a as that of 3.
    assert make(pairs, neighbours=1).pick(["a"], 2, [[1]]).tolist() == [[2, 3]]


def test_a_low_temperature_trusts_the_nearest_alone():
    pairs = [("a b", "f ( g ( h ) )"), ("a", "z")]
    assert make(pairs, temperature=0.01).pick(["a"], 2).tolist() == [[1, 0]]
    assert make(pairs, temperature=100.0).pick(["a"], 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("temperature", "neighbours"), [(0.05, 30), (0.2, 5), (1.0, 1)])
def test_equals_the_slow_loop(seed, temperature, neighbours, monkeypatch):
    rng = np.random.default_rng(seed)
    labels = list("fghij")
    pairs = [
        (" ".join(rng.choice(list(WORDS), 6)), f"{rng.choice(labels)} ( {rng.choice(labels)} , {rng.choice(labels)} )")
        for _ in range(16)
    ]
    pairs[3] = (pairs[3][0], "broken ( (")
    queries = [" ".join(rng.choice(list(WORDS), 6)) for _ in range(5)]
    barred = [rng.choice(16, size=rng.integers(0, 5), replace=False).tolist() for _ in queries]
    expected = [slow(pairs, q, out, 8, temperature, neighbours) for q, out in zip(queries, barred, strict=True)]
    selector = make(pairs, temperature=temperature, neighbours=neighbours)
    assert selector.pick(queries, 8, barred).tolist() == expected
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 40)
    assert selector.pick(queries, 8, barred).tolist() == expected
