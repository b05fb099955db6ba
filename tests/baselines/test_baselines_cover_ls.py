"""Cover-LS by hand and against a slow loop over sets of names."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.baselines.greedy import CoverLSGoldSelector
from rcr_trainer.data.okapi import BM25Scorer

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
WORDS = "abcde"


def make(pairs):
    return CoverLSGoldSelector([{"source": s, "target": t} for s, t in pairs], spec=SPEC)


def slow(pairs, query, gold, barred, k):
    allowed = [n for n in range(len(pairs)) if n not in barred]
    scores = BM25Scorer([source for source, _ in pairs]).scores([query])[0]
    structures = [SPEC.structures(target) for _, target in pairs]
    keys = [SPEC.key(target) for _, target in pairs]
    picks, seen = [], set()

    def take(candidates):
        best = max(candidates, key=lambda n: (scores[n], -n))
        picks.append(best)
        seen.add(keys[best])
        return best

    def fresh():
        left = [n for n in allowed if n not in picks]
        if not [n for n in left if keys[n] not in seen]:
            seen.clear()
        return [n for n in left if keys[n] not in seen]

    largest_first = sorted(SPEC.structures(gold), key=lambda name: (-len(name.split(" ")), name))
    while len(picks) < k:
        before, uncovered = len(picks), set(SPEC.structures(gold))
        for name in largest_first:
            if len(picks) < k and name in uncovered:
                having = [n for n in fresh() if name in structures[n]]
                if having:
                    uncovered -= structures[take(having)]
        if len(picks) == before:
            take(fresh())
    return picks


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_slow_loop(seed, monkeypatch):
    rng = np.random.default_rng(seed)

    def program(depth):
        children = [program(depth - 1) for _ in range(rng.integers(0, 3))] if depth else []
        return rng.choice(list("fgh")) + (f" ( {' , '.join(children)} )" if children else "")

    pairs = [(" ".join(rng.choice(list(WORDS), 3)), program(2)) for _ in range(14)]
    pairs[5] = (pairs[5][0], "broken ( (")
    queries = [" ".join(rng.choice(list(WORDS), 3)) for _ in range(4)]
    golds = [program(3) for _ in range(4)]
    barred = [rng.choice(14, size=rng.integers(0, 4), replace=False).tolist() for _ in queries]
    expected = [slow(pairs, *each, 10) for each in zip(queries, golds, barred, strict=True)]
    assert make(pairs).pick(queries, 10, barred, golds).tolist() == expected
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 20)
    assert make(pairs).pick(queries, 10, barred, golds).tolist() == expected


def test_by_hand():
    pairs = [("x", "f ( g )"), ("a", "h"), ("a a", "f ( g ( h ) )"), ("b", "f ( g ( h ) )"), ("x x", "h"), ("b", "z")]
    selector = make(pairs)
    # f -> g -> h is in 2 and 3, of which BM25 prefers 3 for b; that covers all, and a new cover begins:
    # <root> -> f -> g of another template, then h.
    assert selector.pick(["b"], 4, references=["f ( g ( h ) )"]).tolist() == [[3, 0, 1, 5]]
    assert selector.pick(["a"], 2, references=["f ( g ( h ) , unknown )"]).tolist() == [[2, 0]]
    # Nothing of it is in the pool: BM25's order.
    assert selector.pick(["b"], 2, references=["unknown"]).tolist() == [[3, 5]]
    with pytest.raises(InputError, match="needs the queries' gold programs"):
        selector.pick(["b"], 2)
