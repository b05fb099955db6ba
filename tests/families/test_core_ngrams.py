"""N-gram vocabularies and bags: by hand, equal to a slow reference, odd texts."""

import json
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from rcr_trainer.data.okapi import tokenize

from langchain_rcr.basics.items import Item
from langchain_rcr.families.encoder import LinearEncoder
from langchain_rcr.families.encoding import bag_sums
from langchain_rcr.families.heads import NumpyLinearEncoder
from langchain_rcr.families.ngrams import NgramVocabulary, ngrams

torch.set_num_threads(1)

ITEMS = [
    Item("Capital of Texas", "answer(capital(texas))"),
    Item("capital of ohio", "answer(capital(ohio))"),
    Item("how many rivers ?", ""),
]


def bag(bags, row):
    return bags.columns[bags.starts[row] : bags.starts[row + 1]], bags.values[bags.starts[row] : bags.starts[row + 1]]


def test_a_clause_without_spaces_is_no_single_word():
    assert list(ngrams(Item("前3个客户 top"), 2)) == [*"前3个客户", "top", "前 3", "3 个", "个 客", "客 户", "户 top"]
    assert list(ngrams(Item("où ist größer متى 얼마나"), 1)) == ["où", "ist", "grösser", "متى", "얼마나"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("दिल्ली में कितनी नदियाँ हैं?", ["दिल्ली", "में", "कितनी", "नदियाँ", "हैं"]),
        ("كم عدد الأَنهار في مِصر؟", ["كم", "عدد", "الأَنهار", "في", "مِصر"]),
        ("எத்தனை கோயில்", ["எத்தனை", "கோயில்"]),
        ("कृष्ण_1 אֲגַם x", ["कृष्ण_1", "אֲגַם", "x"]),
        ("می‌خواهم 🏙️ 👨‍👩 ≥", ["می‌خواهم", *"🏙👨👩≥"]),
        ("İSTANBUL'da ırmak IRMAK İlçe ilçe", ["istanbul", "da", "irmak", "irmak", "ilçe", "ilçe"]),
        ("cafe\u0301 CAFÉ ｃａｆé ５００", ["café"] * 3 + ["500"]),
    ],
)
def test_words_of_scripts_whose_vowels_are_marks_and_of_turkish(text, words):
    assert list(ngrams(Item(text), 1)) == words
    assert [word for word in tokenize(text) if word in words] == words  # BM25 reads marks of punctuation, too


def test_ngrams_by_hand():
    item = Item("Big,  río_1?", "f( x >= 'y' )")  # brackets, commas and quotes stand between words, not for one
    assert list(ngrams(Item(item.source), 2)) == ["big", "río_1", "big río_1"]
    marked = ["⇒f", "⇒x", "⇒>=", "⇒y", "⇒f x", "⇒x >=", "⇒>= y"]
    assert list(ngrams(Item("", item.target), 2)) == marked
    assert list(ngrams(item, 2)) == ["big", "río_1", "big río_1", *marked]
    assert list(ngrams(Item("a"), 3)) == ["a"]
    assert list(ngrams(Item("", ""), 3)) == []


def test_what_a_text_encoder_reads():
    assert [Item("q", "p").text, Item("q").text] == ["q\np", "q"]


def test_inverse_document_frequencies_by_hand():
    vocabulary = NgramVocabulary.fit(ITEMS, 1)
    assert vocabulary.idf["capital"] == round(math.log(1 + 3 / 2), 4)
    assert vocabulary.idf["texas"] == vocabulary.idf["⇒texas"] == round(math.log(1 + 3), 4)
    # By the number of items, then by name.
    assert list(vocabulary.idf)[:5] == ["capital", "of", "⇒answer", "⇒capital", "how"]
    assert list(NgramVocabulary.fit(ITEMS, 1, max_size=2).idf) == ["capital", "of"]


def test_bags_equal_a_slow_reference():
    vocabulary = NgramVocabulary.fit(ITEMS, 3)
    items = [*ITEMS, Item("of of of texas unknown"), Item("nothing known"), Item("")]
    bags = vocabulary.bags(items)
    assert len(bags) == len(items)
    for row, item in enumerate(items):
        counts = Counter(g for g in ngrams(item, 3) if g in vocabulary.idf)
        weights = {g: (1 + math.log(c)) * vocabulary.idf[g] for g, c in counts.items()}
        norm = math.sqrt(sum(w * w for w in weights.values()))
        indices, found = bag(bags, row)
        names = list(vocabulary.idf)
        assert {names[i]: w for i, w in zip(indices, found, strict=True)} == pytest.approx(
            {g: w / norm for g, w in weights.items()}, rel=1e-5
        )
    norms = [float(np.linalg.norm(bag(bags, row)[1])) for row in range(len(items))]
    assert norms == pytest.approx([1, 1, 1, 1, 0, 0], abs=1e-6)


@pytest.mark.parametrize("rows", [[2, 0, 0, 5, 4], [], [1], [4, 5]])
def test_selected_rows_are_the_bags_of_those_rows(rows):
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    items = [*ITEMS, Item("texas capital"), Item("zzz"), Item("ohio", "answer(ohio)")]
    selected = vocabulary.bags(items).select(np.array(rows, dtype=np.int64))
    expected = vocabulary.bags([items[row] for row in rows])
    for have, want in zip(
        (selected.columns, selected.values, selected.starts),
        (expected.columns, expected.values, expected.starts),
        strict=True,
    ):
        np.testing.assert_array_equal(have, want)
        assert have.dtype == want.dtype


def weight(vocabulary, dim):
    return np.random.default_rng(0).normal(size=(len(vocabulary), dim)).astype(np.float32)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_an_embedded_bag_is_the_weighted_sum(kind):
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    bags, vectors = vocabulary.bags([*ITEMS, Item("zzz")]), weight(vocabulary, 5)
    out = bag_sums(bags, kind(vectors))
    assert (type(out), tuple(out.shape)) == (type(kind(vectors)), (4, 5))
    for row in range(3):
        indices, weights = bag(bags, row)
        np.testing.assert_allclose(out[row], (vectors[indices] * weights[:, None]).sum(0), atol=1e-6)
    assert out[3].tolist() == [0.0] * 5
    assert bag_sums(vocabulary.bags([]), kind(vectors)).shape == (0, 5)


def test_gradients_are_the_weights():
    vocabulary = NgramVocabulary.fit(ITEMS, 1)
    bags = vocabulary.bags(ITEMS[:1])
    vectors = torch.from_numpy(weight(vocabulary, 2)).requires_grad_()
    bag_sums(bags, vectors).sum().backward()
    expected = np.zeros((len(vocabulary), 2), dtype=np.float32)
    expected[bags.columns] = bags.values[:, None]
    np.testing.assert_allclose(vectors.grad.numpy(), expected)


@pytest.mark.parametrize("kind", [LinearEncoder, NumpyLinearEncoder])
def test_seeds_and_silence(kind):
    vocabulary = NgramVocabulary.fit(ITEMS, 1)
    first, same, other, silent, unset = (
        kind(None, vocabulary, dim=4, ngram_init=init, seed=seed).tensors()["ngrams.bag.weight"]
        for init, seed in ((1, 1), (1, 1), (1, 2), (0, 1), (1, None))
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert not silent.any()
    assert not unset.any()


def test_json_gives_back_the_same_vocabulary():
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    again = NgramVocabulary.from_json(json.loads(json.dumps(vocabulary.to_json())))
    assert list(again.idf.items()) == list(vocabulary.idf.items())
    assert (again.longest, again.digest) == (2, vocabulary.digest)
    weights = vocabulary.bags(ITEMS).values
    np.testing.assert_array_equal(again.bags(ITEMS).values, weights)


def test_digests_tell_vocabularies_apart():
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    reordered = NgramVocabulary(dict(reversed(vocabulary.idf.items())), 2)
    louder = NgramVocabulary(vocabulary.idf | {"capital": 9.0}, 2)
    assert len({v.digest for v in (vocabulary, reordered, louder, NgramVocabulary(vocabulary.idf, 1))}) == 4


@pytest.mark.parametrize("part", ["a", "( ", "word of texas ", "\n", "ि", "की"])
def test_a_megabyte_is_fast(part):
    vocabulary, text = NgramVocabulary.fit(ITEMS, 3), part * (1_000_000 // len(part))
    began = time.thread_time()
    bags = vocabulary.bags([Item(text, text)])
    assert time.thread_time() - began < 0.5
    assert len(bags) == 1


def test_an_empty_vocabulary():
    vocabulary = NgramVocabulary.fit([], 2)
    bags = vocabulary.bags(ITEMS)
    assert bag_sums(bags, weight(vocabulary, 3)).tolist() == [[0.0] * 3] * 3
    assert bag_sums(bags, torch.from_numpy(weight(vocabulary, 3))).tolist() == [[0.0] * 3] * 3
