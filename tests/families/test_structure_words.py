"""What the words and the home of a question count for beside the structures."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families import get_family, structure
from langchain_rcr.families.folds import text_hash
from langchain_rcr.families.structure.checks import check
from langchain_rcr.families.structure.inventory import SPARE
from langchain_rcr.families.structure.words import HOMES, WORDS, home_rows, rarity, word_rows
from langchain_rcr.policy.selection import greedy
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


def test_homes_are_unit_vectors_of_negative_numbers():
    rows = np.asarray(home_rows(["geo", "", "shop", "geo"]))
    assert rows.shape == (4, HOMES)
    assert not rows[1].any()
    assert (rows[0] == rows[3]).all()
    assert set(rows[[0, 2]].ravel().tolist()) == {0, -0.5}
    products = rows @ rows.T
    assert products.diagonal().tolist() == [1, 0, 1, 1]
    many = np.asarray(home_rows([f"db_{n}" for n in range(200)]))
    among = (many @ many.T)[~np.eye(200, dtype=bool)]
    assert among.mean() == pytest.approx(4 / HOMES, abs=0.01)


@pytest.mark.parametrize(
    ("home", "dim", "columns"), [("", None, 5), ("north", None, 100 - HOMES), ("", 9, 9), ("north", 9 + HOMES, 9)]
)
def test_programs_of_several_databases_have_more_columns(monkeypatch, home, dim, columns):
    monkeypatch.setattr(structure, "COLUMNS", 5)
    monkeypatch.setattr(structure, "COLUMNS_OF_MANY", 100)
    items = [Item(f"which {n}", f"f{n}(g{n % 7}(h{n % 5}))", home) for n in range(60)]
    model = TriEncoder.build("structure", items, spec=SPEC, base=None, dim=dim)
    assert len(model.query.inventory) == columns


def test_what_a_home_counts_for_by_hand(tmp_path):
    own = [Item(f"which {word}", f"f({word})", home) for word in "abcdefghijkl" for home in ("north", "south")]
    plain = TriEncoder.build("structure", [item._replace(home="") for item in own], spec=SPEC)
    assert (plain.query.homes, plain.dim) == (0, len(plain.query.inventory) + SPARE + WORDS)
    model = TriEncoder.fitted(own, spec=SPEC, base=None, home=0.25)
    assert model.dim == len(model.query.inventory) + SPARE + WORDS + HOMES
    pool, asked = model.encode_pool(own), ["which c"] * 3
    vectors = model.encode_queries(asked, homes=["south", "", "north"])
    part = slice(-HOMES - WORDS, -WORDS)
    needs, homes = vectors[:, : part.start], vectors[:, part]
    assert not homes[1].any()
    gains = np.asarray(pool.candidate)[:, part] @ homes.T
    whole = 5 * np.linalg.norm(needs[0].clip(min=0))
    assert gains[1::2, 0] == pytest.approx(np.full(12, 0.25 * whole), rel=1e-5)
    assert gains[0::2, 2] == pytest.approx(np.full(12, 0.25 * whole), rel=1e-5)
    assert set(np.asarray(pool.context)[:, part].ravel().tolist()) == {0, 0.5}
    picks = greedy(vectors, pool, model.state(), 3).positions
    assert [own[row[0]] for row in picks[[0, 2]]] == [Item("which c", "f(c)", home) for home in ("south", "north")]
    # A pick covers its home by half, and what it leaves of the needs is the same with and without a home.
    model.vary({"fade": None})
    pair = vectors[[0, 0]].copy()
    pair[1, part] = 0
    after = model.state().start(pair).update(np.asarray(pool.context)[picks[:, 0]][[0, 0]]).vector()
    np.testing.assert_allclose(after[0, part], homes[0] / 2, rtol=1e-5)
    np.testing.assert_array_equal(after[0, : part.start], after[1, : part.start])
    model.prefer = "db"
    model.save_pretrained(tmp_path)
    again = TriEncoder.from_pretrained(tmp_path)
    assert again.prefer == "db"
    assert (again.encode_queries(asked, homes=["south", "", "north"]) == vectors).all()
    again.vary({"home": 0.0})
    assert (
        greedy(again.encode_queries(asked, homes=["south"] * 3), pool, model.state(), 1).positions.tolist() == [[4]] * 3
    )


def test_questions_of_another_home_are_less_alike(tmp_path):
    own = [Item(f"which {word}", f"f({word})", home) for word in "abcdefgh" for home in ("north", "south", "")]
    query = TriEncoder.fitted(own, spec=SPEC, base=None).query
    asked = [Item("which a", home=home) for home in ("north", "south", "", "east")]
    near = query.landmarks.likeness(query.views(asked))
    alike = query.landmarks.likeness(query.views([Item("which a")])) / np.array([0.75, 0.75, 1] * 8)
    for row, factors in zip(near, ([1, 0.75, 0.75], [0.75, 1, 0.75], [0.75, 0.75, 1], [0.75] * 3), strict=True):
        np.testing.assert_allclose(row, (alike * (factors * 8))[0], rtol=1e-6)
    kernel = query.landmarks.likeness(query.landmarks)
    np.testing.assert_allclose(kernel, kernel.T, rtol=1e-6)
    np.testing.assert_allclose(np.diag(kernel), 1, rtol=1e-6)


def test_examples_that_come_in_keep_their_home(tmp_path):
    own = [Item(f"which {word}", f"f({word})", home) for word in "abcdefghijkl" for home in ("north", "south")]
    model = TriEncoder.fitted(own, spec=SPEC, base=None)
    model.query.grow([Item("which river", "f(river(x))", "south"), Item("which lake", "f(lake(a))")])
    assert [item.home for item in model.query.additions.items] == ["south", ""]
    vectors = model.encode_queries(["which river"] * 3, homes=["north", "south", ""])
    assert (vectors[0] != vectors[1]).any()
    model.save_pretrained(tmp_path / "saved")
    again = TriEncoder.from_pretrained(tmp_path / "saved")
    assert again.query.additions.items == model.query.additions.items
    assert (again.encode_queries(["which river"] * 3, homes=["north", "south", ""]) == vectors).all()
    plain = TriEncoder.fitted([item._replace(home="") for item in own], spec=SPEC, base=None)
    assert not {"landmarks.homes", "added.homes"} & plain.query.tensors().keys()
    model.query.landmarks.homes = model.query.landmarks.homes[:3].copy()
    with pytest.raises(CheckpointError, match=r"landmarks\.homes doesn't fit"):
        check(model.query, tmp_path)
