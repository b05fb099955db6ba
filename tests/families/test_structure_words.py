"""What the words of a question count for beside the structures."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from langchain_rcr.basics.items import Item, text_hash
from langchain_rcr.families import get_family, structure
from langchain_rcr.families.structure.inventory import SPARE
from langchain_rcr.families.structure.shown import WORDS, rarity, word_rows
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC, FAMILY = ProgramSpec(), get_family("structure")


def test_words_have_columns_by_their_hash():
    questions = ["Which rivers run, which ?", "?", "rivers > 3"]
    rows = word_rows(questions)
    assert rows.shape == (3, WORDS)
    assert [np.flatnonzero(row).tolist() for row in rows] == [[160, 217, 251], [], sorted(hashed("rivers", ">", "3"))]
    assert set(rows.values.tolist()) == {1}
    assert hashed("which", "rivers", "run") == {160, 217, 251}
    assert word_rows([]).shape == (0, WORDS)
    assert structure.COLUMNS + SPARE + WORDS <= 2000  # pgvector indexes no longer vectors


def test_words_are_remembered_in_bounded_memory():
    tracemalloc.start()
    for number in range(200):
        rows = word_rows([f"{number}{'x' * 30_000}"])
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 100_000  # 6 MB as they were
    long = "x" * 64
    assert np.array_equal(word_rows([long]).columns, word_rows([long + "y"]).columns)
    assert rows.columns.tolist() == [*hashed(f"199{long}"[:64])]


def test_rarity_by_hand():
    common, twice, once = (hashed(word).pop() for word in ("which", "rivers", "run"))
    found = rarity(["which rivers", "which which", "rivers run which"])
    expected = np.full(WORDS, np.log(4 / 1) + 0.1)
    expected[[common, twice, once]] = np.log([4 / 4, 4 / 3, 4 / 2]) + 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (rarity([]) > 0).all()


def hashed(*words):
    return {text_hash(word) % WORDS for word in words}


def test_what_words_count_for_by_hand(monkeypatch):
    pool = [Item("which rivers", "a(b)"), Item("which", "c")]
    model = TriEncoder.build("structure", pool, spec=ProgramSpec(max_size=1), words=0.5, length_penalty=1.0)
    query = model.query
    likely = torch.tensor([[float(name in "ab") for name in query.inventory.names]])
    monkeypatch.setattr(query, "likelihoods", lambda features: likely.expand(len(features), -1))
    with torch.no_grad():
        query.cost.fill_(np.log(0.5))
        query.rarity[[*hashed("which"), *hashed("rivers")]] = torch.tensor([1.0, 3.0])
    features = query.featurize([Item("which rivers ?"), Item("?"), Item("rivers")])
    needs = query(features)
    # a and b are needed, 2 in one column; c costs a half, which makes no program that is needed.
    assert sorted(needs[0, :2].tolist()) == pytest.approx([-0.5, 2], abs=1e-5)
    words = needs[:, -WORDS:].detach().numpy()
    # All words count for half of 5 · 2, by their rarity.
    assert words[0, [*hashed("which"), *hashed("rivers")]] == pytest.approx([5 / 4, 15 / 4])
    assert [np.count_nonzero(row) for row in words] == [2, 0, 1]
    assert words.sum(1) == pytest.approx([5, 0, 5])
    shown = model.candidate.encode([Item("name it", "a(b)"), Item("Rivers, which ?", "z"), Item("which", "z")])
    assert shown @ needs[0].detach().numpy() == pytest.approx([10, 5, 5 / 4])
    needs[0, -WORDS:].sum().backward()
    assert query.wording.grad.item() == pytest.approx(5)
    np.testing.assert_array_equal(query(features.select(np.array([2, 0]))).detach(), needs.detach()[[2, 0]])
    assert not query(replace(features, words=np.zeros_like(features.words)))[:, -WORDS:].any()
