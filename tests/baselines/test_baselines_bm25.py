"""The sparse scorer equals rank_bm25."""

from __future__ import annotations

import numpy as np
import pytest
from rank_bm25 import BM25Okapi
from rcr_trainer.baselines.simple import BM25Selector
from rcr_trainer.data.okapi import BM25Scorer, tokenize


def reference(corpus, queries):
    model = BM25Okapi([tokenize(text) for text in corpus])
    return np.stack([model.get_scores(tokenize(query)) for query in queries])


def test_tokens_are_lower_case_words_and_marks():
    assert tokenize("What's the State's  NAME?") == ["what", "'", "s", "the", "state", "'", "s", "name", "?"]
    assert tokenize("") == []


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_rank_bm25(seed):
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(40)]
    frequency = 1 / np.arange(1, 41)

    def text(length):
        return " ".join(rng.choice(words, size=length, p=frequency / frequency.sum()))

    corpus = [text(rng.integers(0, 15)) for _ in range(60)] + ["", "  "]
    queries = [text(rng.integers(0, 15)) for _ in range(20)] + ["", "unknown words only", "w1 w1 w1 w2 unknown"]
    scores = BM25Scorer(corpus).scores(queries)
    assert scores.shape == (23, 62)
    np.testing.assert_allclose(scores, reference(corpus, queries), rtol=1e-12, atol=1e-12)


def test_a_word_of_most_documents_gets_epsilon_times_the_average_idf():
    corpus = ["the cat", "the dog", "the the mouse", "a bird"]
    scores = BM25Scorer(corpus).scores(["the", "the bird"])
    np.testing.assert_allclose(scores, reference(corpus, ["the", "the bird"]), rtol=1e-12)
    # ln(1.5/3.5)-like idf would be negative; floored at 0.25 × the mean idf it is positive.
    assert (scores[0, :3] > 0).all()
    assert scores[0, 3] == 0


def test_hand_computed_score():
    # N = 3, df = 1, tf = 1, document length 1 of mean 1: idf = ln 2.5 − ln 1.5, and the tf part is 1.
    assert BM25Scorer(["a", "b", "c"]).scores(["a"])[0].tolist() == pytest.approx([np.log(2.5 / 1.5), 0, 0])


@pytest.mark.parametrize("corpus", [[""], ["", " "], []])
def test_a_corpus_without_words_scores_zero(corpus):
    assert BM25Scorer(corpus).scores(["a", ""]).tolist() == [[0.0] * len(corpus)] * 2


def test_best_scores_first_and_ties_to_the_lowest_position():
    corpus = ["lake", "red river", "river", "river", "sea", "the long red river"]
    selector = BM25Selector([{"source": text} for text in corpus])
    assert selector.pick(["river"], 6).tolist() == [[2, 3, 1, 5, 0, 4]]
    assert selector.pick(["nothing known"], 3).tolist() == [[0, 1, 2]]
