"""N-gram vocabularies and bags: by hand, equal to a slow reference, odd texts."""

import json
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch

from langchain_rcr.basics.items import Item
from langchain_rcr.families.ngrams import NgramEmbedding, NgramVocabulary, ngrams

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
    assert list(ngrams(Item("où ist größer متى 얼마나"), 1)) == ["où", "ist", "größer", "متى", "얼마나"]


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


def test_an_embedded_bag_is_the_weighted_sum():
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    bags = vocabulary.bags([*ITEMS, Item("zzz")])
    module = NgramEmbedding(len(vocabulary), 5, 1.0, torch.Generator().manual_seed(0))
    out = module(bags)
    assert out.shape == (4, 5)
    for row in range(3):
        indices, weights = bag(bags, row)
        expected = (module.bag.weight[indices] * torch.from_numpy(weights)[:, None]).sum(0)
        torch.testing.assert_close(out[row], expected)
    assert out[3].tolist() == [0.0] * 5
    assert module(vocabulary.bags([])).shape == (0, 5)


def test_gradients_are_the_weights():
    vocabulary = NgramVocabulary.fit(ITEMS, 1)
    bags = vocabulary.bags(ITEMS[:1])
    module = NgramEmbedding(len(vocabulary), 2, 1.0, torch.Generator().manual_seed(0))
    module(bags).sum().backward()
    expected = np.zeros((len(vocabulary), 2), dtype=np.float32)
    expected[bags.columns] = bags.values[:, None]
    np.testing.assert_allclose(module.bag.weight.grad.numpy(), expected)


def test_seeds_and_silence():
    first, same, other = (
        NgramEmbedding(9, 4, 1.0, torch.Generator().manual_seed(seed)).bag.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not NgramEmbedding(9, 4, 0.0, torch.Generator().manual_seed(1)).bag.weight.any()


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


@pytest.mark.parametrize("text", ["a" * 1_000_000, "( " * 500_000, "word of texas " * 70_000, "\n" * 1_000_000])
def test_a_megabyte_is_fast(text):
    vocabulary = NgramVocabulary.fit(ITEMS, 3)
    began = time.perf_counter()
    bags = vocabulary.bags([Item(text, text)])
    assert time.perf_counter() - began < 0.5
    assert len(bags) == 1


def test_an_empty_vocabulary():
    vocabulary = NgramVocabulary.fit([], 2)
    bags = vocabulary.bags(ITEMS)
    module = NgramEmbedding(len(vocabulary), 3, 1.0, torch.Generator().manual_seed(0))
    assert module(bags).tolist() == [[0.0] * 3] * 3
