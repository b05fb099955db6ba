"""Set-BERTScore-Recall against a plain loop over tokens, and the token vectors of a small transformer."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rcr_trainer.baselines.set_bsr import SetBSRSelector
from rcr_trainer.data.coverage import greedy_set_cover

from langchain_rcr.errors import InputError
from langchain_rcr.families.backbone import TransformerBackbone

# Unit vectors whose cosines are decimals, many of them equal: ties abound.
WORDS = {
    "a": [1, 0, 0],
    "b": [0, 1, 0],
    "c": [0, 0, 1],
    "d": [0.6, 0.8, 0],
    "e": [0, 0.6, 0.8],
    "f": [-0.6, 0, 0.8],
}


def embed_tokens(texts):
    # Lengths don't matter: the selector compares directions.
    return [np.array([WORDS[word] for word in text.split()], dtype=np.float64).reshape(-1, 3) * 2.5 for text in texts]


def make(texts, **options):
    return SetBSRSelector([{"source": text} for text in texts], **{"embed_tokens": embed_tokens, **options})


def slow(texts, query, allowed, k):
    """Eq. 5 and 6 and Algorithm 1 of Gupta et al. (2023), token by token; without tokens, a text is like nothing."""

    def like(token, text):
        cosines = [float(np.dot(WORDS[token], WORDS[other])) for other in text.split()]
        return round(max(cosines, default=-1.0) * 2**16) / 2**16

    tokens = query.split()
    table = {c: [like(token, texts[c]) for token in tokens] for c in allowed}
    picked, cover = [], []
    while len(picked) < k:
        gains = {}
        for c in allowed:
            if c not in picked:
                if cover:
                    best = [max(table[m][i] for m in cover) for i in range(len(tokens))]
                    more = [max(0.0, s - known) for s, known in zip(table[c], best, strict=True)]
                else:
                    more = table[c]
                gains[c] = sum(more)
        best = max(gains, key=lambda c: (gains[c], -c))
        if cover and gains[best] <= 0:
            cover = []
        else:
            picked.append(best)
            cover.append(best)
    return picked


def test_by_hand():
    # 0 is worth 0.6 + 0.8 + 0, 1 to 3 are worth 1 each. Then a gains 0.4, b gains 0.2, c gains 1; then 0.4; then 0.2.
    assert make(["d", "a", "b", "c"]).pick(["a b c"], 4).tolist() == [[0, 3, 1, 2]]
    # The best of all picks counts for each token: d beside a is worth 0.8 for b alone.
    assert make(["a b", "d", "c", "a"]).pick(["a b c"], 3).tolist() == [[0, 2, 1]]


def test_a_better_match_of_a_covered_word_still_counts():
    # By hand, with the weights written down: after 0 covers p by 2, candidate 1 adds 1 to p, candidate 2 adds 2 to q.
    coverage = np.array([[2.0, 3.0, 0.0], [1.5, 0.0, 3.5]])
    rows, nothing = np.arange(3), np.empty(0, dtype=np.int64)
    assert greedy_set_cover(coverage, rows, nothing, 3).tolist() == [0, 2, 1]
    assert greedy_set_cover(coverage, rows, np.array([0]), 2).tolist() == [2, 1]


def test_once_all_is_covered_a_new_cover_begins():
    # a b, then c; now nothing gains: again from the best that is left, b c, and a after it.
    assert make(["a", "a b", "c", "b c"]).pick(["a b c"], 4).tolist() == [[1, 2, 3, 0]]


def test_copies_texts_without_tokens_and_empty_queries():
    selector = make(["", "a", "a", "", "b"])
    assert selector.pick(["", "a", "a b"], 5).tolist() == [[0, 1, 2, 3, 4], [1, 2, 4, 0, 3], [1, 4, 2, 0, 3]]
    assert selector.pick([""], 2, [[0, 2]]).tolist() == [[1, 3]]
    assert make(["", ""]).pick(["a", ""], 2).tolist() == [[0, 1], [0, 1]]


TEXTS = st.lists(st.sampled_from(list(WORDS)), max_size=5).map(" ".join)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=9), queries=st.lists(TEXTS, min_size=1, max_size=5), data=st.data())
@example(texts=["a", ""], queries=["", "b a"], data=None)
def test_equals_the_slow_loop(texts, queries, data):
    exclude = [[] for _ in queries]
    if data is not None:
        entries = st.lists(st.integers(0, len(texts) - 1), max_size=len(texts) - 1, unique=True)
        exclude = [data.draw(entries) for _ in queries]
    k = len(texts) - max(map(len, exclude))
    picked = make(texts).pick(queries, k, exclude)
    for row, query in enumerate(queries):
        allowed = [c for c in range(len(texts)) if c not in exclude[row]]
        assert picked[row].tolist() == slow(texts, query, allowed, k)


@pytest.fixture(scope="module")
def many():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(list(WORDS), size=rng.integers(0, 7))) for _ in range(60)]


def test_blocks_change_nothing(many, monkeypatch):
    whole = make(many[:40]).pick(many[40:], 6)
    assert whole.tolist() == [slow(many[:40], query, range(40), 6) for query in many[40:]]
    monkeypatch.setattr("rcr_trainer.data.arrays._BLOCK_ELEMENTS", 700)
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._PRODUCTS", 90)
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._TEXTS", 7)
    assert (make(many[:40]).pick(many[40:], 6) == whole).all()


def test_each_question_of_the_pool_is_embedded_once_until_it_changes():
    asked = []

    def recording(texts):
        asked.append(list(texts))
        return embed_tokens(texts)

    selector = make(["a", "b", "a"], embed_tokens=recording)
    selector.pick(["c"], 2)
    selector.add_example({"source": "d"})
    selector.pick(["c", "e"], 2)
    assert asked == [["a", "b"], ["c"], ["a", "b", "d"], ["c", "e"]]


def test_as_a_langchain_selector():
    selector = make(["d", "a", "b", "c"], k=2)
    assert selector.select_examples({"source": "a b c"}) == [{"source": "d"}, {"source": "c"}]
    selector.add_example({"source": "a b"})
    assert selector.select_examples({"source": "a b c"}) == [{"source": "a b"}, {"source": "c"}]


@pytest.mark.slow
def test_token_vectors_are_those_of_the_layer_without_special_tokens(bert):
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    texts = ["what is the capital", "", "river unheardof", "how long is the river of texas", "[SEP]"]
    backbone = TransformerBackbone(bert)
    tokens = backbone.read(texts)[1]
    assert [own.shape for own in tokens] == [(4, 16), (0, 16), (2, 16), (7, 16), (0, 16)]
    for text, own in zip(texts, tokens, strict=True):
        with torch.inference_mode():
            out = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        # Of two layers, the first.
        np.testing.assert_allclose(own, out.hidden_states[1][0].numpy()[1 : 1 + len(own)], atol=1e-5)
    assert backbone.read([])[1] == []


@pytest.mark.slow
def test_a_text_is_cut_and_a_model_must_exist(bert):
    assert len(TransformerBackbone(bert, max_length=6).read(["what is the capital of texas"])[1][0]) == 4
    with pytest.raises(InputError, match="can't be loaded"):
        TransformerBackbone(str(bert) + "-gone")


@pytest.mark.slow
def test_with_a_transformer_end_to_end(bert):
    examples = [{"source": text} for text in ("what is the area of ohio", "how long is the river", "count all")]
    backbone = TransformerBackbone(bert)
    selector = SetBSRSelector(examples, embed_tokens=lambda texts: backbone.read(texts)[1], k=1)
    for entry in examples:
        assert selector.select_examples(entry) == [entry]


def test_token_vectors_of_a_large_pool_are_held_once(monkeypatch):
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._TEXTS", 40)
    texts = [str(n) for n in range(400)]

    def large(texts):
        return [np.full((20, 128), 0.5, dtype=np.float32) for _ in texts]

    tracemalloc.start()
    try:
        make(texts, embed_tokens=large).pick(["question"], 1)
        assert tracemalloc.get_traced_memory()[1] < 1.4 * len(texts) * 20 * 128 * 4
    finally:
        tracemalloc.stop()
