"""BM25 with coverage, and the greedy algorithm that it shares with Set-BSR, against a plain loop over words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi
from rcr_trainer.baselines.bm25 import BM25CoverageSelector, BM25Selector
from rcr_trainer.data.coverage import greedy_set_cover
from rcr_trainer.data.okapi import tokenize

NOTHING = np.empty(0, dtype=np.int64)


def slow(covers, allowed, k):
    """Algorithm 1 of Gupta et al. (2023), word by word: covers[candidate][aspect]."""
    picked, cover, current = [], [], -np.inf
    while len(picked) < k:
        left = [c for c in allowed if c not in picked]
        worth = {c: sum(map(max, zip(*(covers[m] for m in [*cover, c]), strict=True))) for c in left}
        best = max(left, key=lambda c: worth[c])
        if worth[best] > current:
            current = worth[best]
            picked.append(best)
            cover.append(best)
        else:
            cover, current = [], -np.inf
    return picked


def slow_bm25(corpus, query, allowed, k):
    model = BM25Okapi([tokenize(text) for text in corpus]) if any(map(tokenize, corpus)) else None
    words = sorted(set(tokenize(query)))
    weights = [model.get_scores([word]) if model else np.zeros(len(corpus)) for word in words]
    grid = [[round(float(weight[c]) * 2**16) / 2**16 for weight in weights] for c in range(len(corpus))]
    return slow(grid, allowed, k)


def make(corpus, **options):
    return BM25CoverageSelector([{"source": text} for text in corpus], **options)


def test_each_pick_covers_words_that_the_earlier_ones_lack():
    # Documents of two words, each word in two of eight of them: every word that is there weighs the same.
    corpus = ["a x", "a b", "b y", "c x", "d y", "c d", "z w", "z w"]
    assert make(corpus).pick(["a b c d"], 2).tolist() == [[1, 5]]
    assert BM25Selector([{"source": text} for text in corpus]).pick(["a b c d"], 4).tolist() == [[1, 5, 0, 2]]
    # Then nothing adds anything: a new cover begins with one of the four that have one word, the lowest, and goes on.
    assert make(corpus).pick(["a b c d"], 8).tolist() == [[1, 5, 0, 2, 3, 4, 6, 7]]


def test_a_better_match_of_a_covered_word_still_counts():
    # By hand, with the weights written down: after 0 covers p by 2, candidate 1 adds 1 to p, candidate 2 adds 2 to q.
    coverage = np.array([[2.0, 3.0, 0.0], [1.5, 0.0, 3.5]])
    owner, rows = np.zeros(2, dtype=int), np.arange(3)
    assert greedy_set_cover(coverage, owner, rows, [NOTHING], 3).tolist() == [[0, 2, 1]]
    assert greedy_set_cover(coverage, owner, rows, [np.array([0])], 2).tolist() == [[2, 1]]


def test_a_repeated_word_counts_once():
    corpus = ["a x", "b c", "y z", "v w", "t u"]
    assert make(corpus).pick(["a a a b c"], 1).tolist() == [[1]]
    assert BM25Selector([{"source": text} for text in corpus]).pick(["a a a b c"], 1).tolist() == [[0]]


def test_queries_without_known_words_get_the_lowest_positions():
    selector = make(["a", "", "c", "b"])
    exclude = [[0], [], [], [1]]
    assert selector.pick(["", "zzz", "b", ""], 3, exclude).tolist() == [[1, 2, 3], [0, 1, 2], [3, 0, 1], [0, 2, 3]]
    assert make(["", " "]).pick(["a", ""], 2).tolist() == [[0, 1], [0, 1]]


def test_copies_come_in_order_each_in_a_cover_of_its_own():
    corpus = ["a", "a", "b", "b", "c", "d", "e", "f"]
    assert make(corpus).pick(["a b"], 5).tolist() == [[0, 2, 1, 3, 4]]


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "?"]), max_size=6).map(" ".join)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    corpus=st.lists(TEXTS, min_size=1, max_size=10),
    queries=st.lists(TEXTS, min_size=1, max_size=5),
    data=st.data(),
)
@example(corpus=["", "a"], queries=["", "a"], data=None)
def test_equals_the_slow_loop(corpus, queries, data):
    exclude = [[] for _ in queries]
    if data is not None:
        one = st.sets(st.integers(0, len(corpus) - 1), max_size=len(corpus) - 1)
        exclude = [sorted(data.draw(one)) for _ in queries]
    k = len(corpus) - max(map(len, exclude))
    allowed = [[c for c in range(len(corpus)) if c not in entry] for entry in exclude]
    expected = [slow_bm25(corpus, query, left, k) for query, left in zip(queries, allowed, strict=True)]
    assert make(corpus).pick(queries, k, exclude).tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_queries_change_nothing(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(list("abcdefghij"), size=rng.integers(0, 8))) for _ in range(60)]
    selector, exclude = make(texts[:40]), [[int(i) % 7] for i in range(20)]
    whole = selector.pick(texts[40:], 10, exclude)
    assert whole.tolist() == [
        slow_bm25(texts[:40], query, [c for c in range(40) if c not in entry], 10)
        for query, entry in zip(texts[40:], exclude, strict=True)
    ]
    monkeypatch.setattr("rcr_trainer.data.coverage._BLOCK_ELEMENTS", 700)
    assert (selector.pick(texts[40:], 10, exclude) == whole).all()


def test_as_a_langchain_selector():
    selector = make(["a x", "a b", "b y", "c x", "c z", "d e", "f g"], k=2)
    assert selector.select_examples({"source": "a b c"}) == [{"source": "a b"}, {"source": "c x"}]
    selector.add_example({"source": "a b c"})
    assert selector.select_examples({"source": "a b c"})[0] == {"source": "a b c"}
