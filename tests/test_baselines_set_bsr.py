"""Set-BERTScore-Recall against a plain loop over tokens, and the token vectors of a small transformer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rcr_trainer.baselines import SetBSRSelector, TokenVectors, TransformerTokens
from tiny_bert import tiny_bert

from langchain_rcr.errors import InputError

# Unit vectors whose cosines are decimals, many of them equal: ties abound.
WORDS = {
    "a": [1, 0, 0],
    "b": [0, 1, 0],
    "c": [0, 0, 1],
    "d": [0.6, 0.8, 0],
    "e": [0, 0.6, 0.8],
    "f": [-0.6, 0, 0.8],
}
NUMBERS = {word: number for number, word in enumerate(WORDS)}


def embed_tokens(texts):
    words = [text.split() for text in texts]
    ids = np.array([NUMBERS[word] for own in words for word in own], dtype=np.int64)
    # Lengths don't matter: the selector compares directions.
    vectors = np.array([WORDS[word] for own in words for word in own], dtype=np.float64).reshape(-1, 3) * 2.5
    return TokenVectors(np.array([len(own) for own in words]), ids, vectors)


def make(texts, **options):
    return SetBSRSelector([{"source": text} for text in texts], **{"embed_tokens": embed_tokens, **options})


def slow(texts, query, allowed, k, idf=False):
    """Eq. 5 and 6 and Algorithm 1 of Gupta et al. (2023), token by token; without tokens, a text is like nothing."""
    documents = [set(text.split()) for text in texts]

    def weight(token):
        return np.log((len(texts) + 1) / (sum(token in words for words in documents) + 1)) if idf else 1.0

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
                gains[c] = sum(weight(token) * gain for token, gain in zip(tokens, more, strict=True))
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


def test_once_all_is_covered_a_new_cover_begins():
    # a b, then c; now nothing gains: anew from the best that is left, b c, and a after it.
    assert make(["a", "a b", "c", "b c"]).pick(["a b c"], 4).tolist() == [[1, 2, 3, 0]]


def test_copies_texts_without_tokens_and_empty_queries():
    selector = make(["", "a", "a", "", "b"])
    assert selector.pick(["", "a", "a b"], 5).tolist() == [[0, 1, 2, 3, 4], [1, 2, 4, 0, 3], [1, 4, 2, 0, 3]]
    assert selector.pick([""], 2, [[0, 2]]).tolist() == [[1, 3]]
    assert make(["", ""]).pick(["a", ""], 2).tolist() == [[0, 1], [0, 1]]


def test_rare_tokens_count_more_with_idf():
    texts = ["a", "b", "a c", "a c", "a"]
    # ln(6 / 5) for a, ln(6 / 2) for b.
    assert make(texts).pick(["a b"], 1).tolist() == [[0]]
    assert make(texts, idf=True).pick(["a b"], 2).tolist() == [[1, 0]]
    selector = make(texts[:1], idf=True)
    for text in texts[1:]:
        selector.add_example({"source": text})
    assert selector.pick(["a b"], 2).tolist() == [[1, 0]]
    # e is in no question: ln 6.
    assert make([*texts, "f"], idf=True).pick(["e a a"], 1).tolist() == [[2]]


TEXTS = st.lists(st.sampled_from(list(WORDS)), max_size=5).map(" ".join)


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


@pytest.mark.parametrize("idf", [False, True])
def test_blocks_change_nothing(many, idf, monkeypatch):
    whole = make(many[:40], idf=idf).pick(many[40:], 6)
    assert whole.tolist() == [slow(many[:40], query, range(40), 6, idf) for query in many[40:]]
    monkeypatch.setattr("rcr_trainer.programs.coverage._BLOCK_ELEMENTS", 700)
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._PRODUCTS", 90)
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._TEXTS", 7)
    selector = make(many[:40], idf=idf)
    assert (selector.pick(many[40:], 6) == whole).all()
    assert len(list(selector._parts(10))) > 5


def test_a_large_pool_is_kept_in_half_precision(monkeypatch):
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._FULL_PRECISION", 30)
    monkeypatch.setattr("rcr_trainer.baselines.set_bsr._TEXTS", 2)
    selector = make(["d", "a", "b", "c", "c c c c c c"])
    assert selector.pick(["a b c"], 4).tolist() == [[0, 3, 1, 2]]
    assert selector._vectors.dtype == np.float32
    selector.add_example({"source": "e"})
    assert selector.pick(["a b c"], 2).tolist() == [[0, 3]]
    assert selector._vectors.dtype == np.float16
    assert len(selector._vectors) == 11


def test_each_question_of_the_pool_is_embedded_once():
    asked = []

    def recording(texts):
        asked.append(list(texts))
        return embed_tokens(texts)

    selector = make(["a", "b", "a"], embed_tokens=recording)
    selector.pick(["c"], 2)
    selector.add_example({"source": "d"})
    selector.pick(["c", "e"], 2)
    assert asked == [["a", "b"], ["c"], ["d"], ["c", "e"]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TokenVectors(np.array([1]), np.zeros(1, int), np.ones((1, 3))), "for 2 texts"),
        (TokenVectors(np.array([1, 2]), np.zeros(2, int), np.ones((2, 3))), r"vectors \(2, 3\)"),
        (TokenVectors(np.array([1, 1]), np.zeros(2, int), np.ones(2)), r"vectors \(2,\)"),
        (TokenVectors(np.array([1, 1]), np.zeros(2, int), np.full((2, 3), np.nan)), "not finite"),
    ],
)
def test_bad_embeddings_are_refused(tokens, message):
    with pytest.raises(InputError, match=message):
        make(["a", "b"], embed_tokens=lambda _: tokens).pick(["a"], 1)


def test_another_width_is_refused():
    selector = make(["a", "b"])
    selector.pick(["a"], 1)
    selector.embed_tokens = lambda _: TokenVectors(np.array([1]), np.zeros(1, int), np.ones((1, 4)))
    with pytest.raises(InputError, match="gave 4 dimensions, the pool's tokens have 3"):
        selector.pick(["a"], 1)


def test_as_a_langchain_selector():
    selector = make(["d", "a", "b", "c"], k=2)
    assert selector.select_examples({"source": "a b c"}) == [{"source": "d"}, {"source": "c"}]
    selector.add_example({"source": "a b"})
    assert selector.select_examples({"source": "a b c"}) == [{"source": "a b"}, {"source": "c"}]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.mark.parametrize(("layer", "read"), [(None, 1), (2, 2), (0, 0)])
def test_token_vectors_are_those_of_the_layer_without_special_tokens(bert, layer, read):
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    texts = ["what is the capital", "", "river unheardof", "how long is the river of texas", "[SEP]"]
    tokens = TransformerTokens(bert, layer=layer, batch_size=2)(texts)
    assert tokens.lengths.tolist() == [4, 0, 2, 7, 0]
    assert tokens.vectors.shape == (13, 16)
    start = 0
    for text, length in zip(texts, tokens.lengths, strict=True):
        encoded = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**encoded, output_hidden_states=True).hidden_states[read][0].numpy()
        own = slice(start, start + length)
        assert tokens.ids[own].tolist() == encoded["input_ids"][0, 1 : 1 + length].tolist()
        np.testing.assert_allclose(tokens.vectors[own], hidden[1 : 1 + length], atol=1e-5)
        start += length
    assert TransformerTokens(bert)([]).vectors.shape == (0, 16)


def test_a_text_is_cut_and_a_layer_must_exist(bert):
    assert TransformerTokens(bert, max_length=6)(["what is the capital of texas"]).lengths.tolist() == [4]
    with pytest.raises(InputError, match=r"layer is 3, but .* has 2 layers"):
        TransformerTokens(bert, layer=3)(["a"])
    with pytest.raises(InputError, match="can't be loaded"):
        TransformerTokens(str(bert) + "-gone")(["a"])


def test_with_a_transformer_end_to_end(bert):
    examples = [{"source": text} for text in ("what is the area of ohio", "how long is the river", "count all")]
    selector = SetBSRSelector(examples, embed_tokens=TransformerTokens(bert), k=1)
    for entry in examples:
        assert selector.select_examples(entry) == [entry]
