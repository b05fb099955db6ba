"""Cover-LS by hand and against a slow loop over sets of names."""

from __future__ import annotations

import numpy as np
import pytest
from rcr_trainer.baselines.cover_ls import CoverLSGoldSelector, CoverLSSelector
from rcr_trainer.baselines.dense import DenseSelector
from rcr_trainer.data.okapi import BM25Scorer

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
WORDS = "abcde"


def embed(texts):
    return np.array([[text.split().count(word) for word in WORDS] for text in texts], dtype=np.float32)


def make(pairs):
    return CoverLSSelector([{"source": s, "target": t} for s, t in pairs], spec=SPEC, embed=embed)


def slow(pairs, query, barred, k):
    allowed = [n for n in range(len(pairs)) if n not in barred]
    vectors = embed([query, *(source for source, _ in pairs)])
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    nearest = max(allowed, key=lambda n: (round(float(unit[0] @ unit[n + 1]), 5), -n))
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

    largest_first = sorted(structures[nearest], key=lambda name: (-len(name.split(" ")), name))
    while len(picks) < k:
        before, uncovered = len(picks), set(structures[nearest])
        for name in largest_first:
            if len(picks) < k and name in uncovered:
                having = [n for n in fresh() if name in structures[n]]
                if having:
                    uncovered -= structures[take(having)]
        if len(picks) == before:
            take(fresh())
    return picks


def test_by_hand():
    pairs = [
        ("a", "f ( g ( h ) )"),
        ("b b", "f ( g ( h ) )"),
        ("b", "f ( g )"),
        ("c", "h"),
        ("d b", "f ( g )"),
        ("e", "z"),
    ]
    # Nearest is 0, which has f -> g -> h: 0 and 1 have it, BM25 prefers 0. All is covered; from the start again with
    # other templates: <root> -> f -> g, of 2 and 4 by BM25 the first; h, which 2 lacks; then only z is a new template,
    # and of the old ones BM25 likes none: 1, then 4.
    assert make(pairs).pick(["a"], 6).tolist() == [[0, 2, 3, 5, 1, 4]]
    # 0 barred: it is not the prediction either. 2 is (b is like b b, too, but lower), and has <root> -> f -> g.
    assert make(pairs).pick(["b"], 2, [[0, 1]]).tolist() == [[2, 3]]


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_slow_loop(seed, monkeypatch):
    rng = np.random.default_rng(seed)

    def program(depth):
        children = [program(depth - 1) for _ in range(rng.integers(0, 3))] if depth else []
        return rng.choice(list("fgh")) + (f" ( {' , '.join(children)} )" if children else "")

    pairs = [(" ".join(rng.choice(list(WORDS), 3)), program(2)) for _ in range(14)]
    pairs[5] = (pairs[5][0], "broken ( (")
    queries = [" ".join(rng.choice(list(WORDS), 3)) for _ in range(4)]
    barred = [rng.choice(14, size=rng.integers(0, 4), replace=False).tolist() for _ in queries]
    expected = [slow(pairs, query, out, 10) for query, out in zip(queries, barred, strict=True)]
    assert make(pairs).pick(queries, 10, barred).tolist() == expected
    monkeypatch.setattr("rcr_trainer.data.coverage._BLOCK_ELEMENTS", 20)
    assert make(pairs).pick(queries, 10, barred).tolist() == expected


def test_with_the_gold_program_nothing_is_predicted():
    pairs = [("x", "f ( g )"), ("a", "h"), ("a a", "f ( g ( h ) )"), ("b", "f ( g ( h ) )"), ("x x", "h"), ("b", "z")]
    selector = CoverLSGoldSelector([{"source": s, "target": t} for s, t in pairs], spec=SPEC)
    # f -> g -> h is in 2 and 3, of which BM25 prefers 3 for b; that covers all, and a new cover begins:
    # <root> -> f -> g of another template, then h.
    assert selector.pick(["b"], 4, references=["f ( g ( h ) )"]).tolist() == [[3, 0, 1, 5]]
    assert selector.pick(["a"], 2, references=["f ( g ( h ) , unknown )"]).tolist() == [[2, 0]]
    # Nothing of it is in the pool: BM25's order.
    assert selector.pick(["b"], 2, references=["unknown"]).tolist() == [[3, 5]]
    with pytest.raises(InputError, match="needs the queries' gold programs"):
        selector.pick(["b"], 2)


@pytest.mark.parametrize("seed", range(4))
def test_gold_that_is_the_nearest_questions_program_gives_the_same_picks(seed):
    rng = np.random.default_rng(seed)
    labels = list("fgh")
    pairs = [
        (
            " ".join(rng.choice(list(WORDS), 3)),
            f"{rng.choice(labels)} ( {rng.choice(labels)} ( {rng.choice(labels)} ) )",
        )
        for _ in range(12)
    ]
    queries = [" ".join(rng.choice(list(WORDS), 3)) for _ in range(3)]
    predicted = make(pairs)
    nearest = DenseSelector.build(predicted.examples, predicted.resources).pick(queries, 1)[:, 0]
    gold = CoverLSGoldSelector(predicted.examples, spec=SPEC)
    references = [pairs[position][1] for position in nearest]
    assert gold.pick(queries, 6, references=references).tolist() == predicted.pick(queries, 6).tolist()
