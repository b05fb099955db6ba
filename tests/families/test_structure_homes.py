"""What the home of a question, such as its database, counts for, and whose structures it can need."""

import numpy as np
import pytest
import torch
from rcr_trainer.data.examples import Example
from rcr_trainer.data.held_out import HeldOut
from rcr_trainer.evaluation.report import Question
from rcr_trainer.evaluation.stage import policy_picks
from rcr_trainer.runs.tasks import Task

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.rows import sparse
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families import structure
from langchain_rcr.families.structure.checks import check
from langchain_rcr.families.structure.homes import HOMES, home_hashes, home_rows, learn_homes, sole_homes, useful
from langchain_rcr.families.structure.inventory import SPARE
from langchain_rcr.families.structure.shown import WORDS
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

SPEC = ProgramSpec()


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


def test_whose_structures_columns_are():
    north, south, east = home_hashes(["north", "south", "east"]).tolist()
    homes = np.array([north, north, south, east])
    has = np.array([[1, 1, 0, 0.2, 1], [0, 1, 0, 0, 0], [0, 1, 1, 0, 1], [0, 1, 0, 0, 0]], dtype=np.float32)
    sole, _ = learn_homes(sparse(has), homes)
    assert sole.tolist() == [north, 0, south, north, 0]
    assert sole_homes(sole, has, homes).tolist() == sole.tolist()
    more = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=np.float32)
    assert sole_homes(sole, more, np.array([east, south])).tolist() == [0, 0, south, north, 0]
    counts = useful(sole, np.float32(0.25), np.array([north, 0, 7]))
    assert counts.tolist() == [[1, 1, 0.25, 1, 1], [1] * 5, [0.25, 1, 0.25, 0.25, 1]]


def slow_ratio(has, homes):
    """`learn_homes`' second, pair by pair."""
    having = {home: has[homes == home].any(axis=0) for home in set(homes.tolist())}
    pairs = {1: [], 2: []}
    for home, own in having.items():
        for column in range(has.shape[1]):
            others = sum(bool(theirs[column]) for name, theirs in having.items() if name != home)
            if others:
                pairs[min(2, others)].append(bool(own[column]))
    one, several = ((sum(found) + 1) / (len(found) + 1) for found in pairs.values())
    return min(1.0, one / several)


@pytest.mark.parametrize("homes", [1, 2, 3, 9])
@pytest.mark.parametrize("often", [0.02, 0.3, 0.9])
def test_what_structures_of_one_other_home_count_is_how_rarely_homes_share_them(homes, often):
    rng = np.random.default_rng([homes, int(100 * often)])
    has = (rng.random((40, 60)) < often).astype(np.float32)
    places = rng.integers(homes, size=40)
    assert learn_homes(sparse(has), places)[1] == pytest.approx(slow_ratio(has, places))


def test_homes_that_share_all_share_what_is_new_to_one_of_them_too():
    shared = np.repeat(np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=np.float32), [9, 1], axis=0)
    assert learn_homes(sparse(shared), np.arange(10))[1] == pytest.approx(0.1 / 1)
    assert learn_homes(sparse(shared[:, :4]), np.arange(10))[1] == 1


@pytest.fixture
def shops() -> list[Item]:
    """Eight databases with tables of their own, asked alike."""
    return [
        Item(f"how many {word} are there", f"count({name}_{word})", name)
        for name in ("north", "south", "east", "west", "old", "big", "small", "last")
        for word in ("rivers", "lakes", "towns")
    ]


def test_names_of_one_database_are_no_needs_of_another(shops, tmp_path):
    model = TriEncoder.fitted(shops, spec=SPEC, base=None)
    query = model.query
    elsewhere = float(query.elsewhere)
    assert elsewhere == pytest.approx(1 / 169)  # of 24 columns with one home none is found in one of the seven others
    place = {name: number for number, name in enumerate(query.inventory.names)}
    asked = [Item("how many rivers are there", home=home) for home in ("north", "new", "")]
    own, new, unknown = query.likelihoods(query.featurize(asked))
    assert own[place["north_rivers"]] > 0.9
    assert (new[place["count"]], unknown[place["count"]]) == pytest.approx((1, 1), abs=0.05)
    for name in ("north", "south"):
        assert 0 < new[place[f"{name}_rivers"]] < elsewhere
    assert unknown[place["south_rivers"]] > 0.1
    model.save_pretrained(tmp_path)
    again = TriEncoder.from_pretrained(tmp_path)
    words, homes = [each.source for each in asked], [each.home for each in asked]
    assert (again.encode_queries(words, homes=homes) == model.encode_queries(words, homes=homes)).all()
    # A draft that has it says more, and an example of the new database, which has it, too.
    drafted = query.likelihoods(query.drafted(query.featurize(asked[1:2]), ["count(south_rivers)"]))
    assert drafted[0, place["south_rivers"]] > 5 * new[place["south_rivers"]]
    again.query.grow([Item("how many rivers were there", "count(south_rivers)", "new")])
    grown = again.query.likelihoods(again.query.featurize(asked[1:2]))
    assert grown[0, place["south_rivers"]] > 0.3
    assert 0 < grown[0, place["north_rivers"]] < elsewhere


@pytest.mark.parametrize(("given", "alone", "many"), [("auto", 4.0, 2.0), (3.0, 3.0, 3.0), (None, None, None)])
def test_what_is_covered_fades_more_slowly_where_there_are_databases(shops, tmp_path, given, alone, many):
    plain = [item._replace(home="") for item in shops]
    for items, fade in ((plain, alone), (shops, many)):
        model = TriEncoder.fitted(items, spec=SPEC, base=None, fade=given)
        assert model.config.fade == model.state().fade == fade
        model.save_pretrained(tmp_path / str(fade))
        assert TriEncoder.from_pretrained(tmp_path / str(fade)).config.fade == fade
    model.vary({"fade": "auto"})
    assert model.config.fade == 2.0
    assert TriEncoder.build("lexical", plain, spec=SPEC, fade="auto").state().fade is None


def test_what_homes_tell_has_the_shapes_of_the_columns(shops, tmp_path):
    model = TriEncoder.fitted(shops, spec=SPEC, base=None)
    alone = TriEncoder.fitted([item._replace(home="") for item in shops], spec=SPEC, base=None)
    assert model.query.tensors().keys() - alone.query.tensors().keys() == {
        *("sole", "elsewhere", "homing", "landmarks.homes", "added.homes")
    }
    model.query.sole = model.query.sole[:3].copy()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        TriEncoder.from_pretrained(tmp_path)


def test_a_comparison_asks_a_question_of_two_homes_for_each():
    pool = [Example(f"{home} {w}", f"which {w}", f"f({w})", home=home) for w in "abcdefghijkl" for home in ("no", "so")]
    model = TriEncoder.fitted([each.item for each in pool], spec=SPEC, base=None, home=1.0)
    asked = [Question(each.id, each.source, each.target, "", [], {}, home=each.home) for each in pool]
    task = Task(pool, pool, [], pool, [], SPEC)
    picks = policy_picks(model, task, "test", HeldOut(pool, pool, SPEC))(asked, 1, None)
    assert [pool[at].home for at in picks[:, 0]] == [each.home for each in pool]
