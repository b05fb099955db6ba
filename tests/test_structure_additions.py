"""Labels that come in after training: their columns, who needs them, checkpoints, engines."""

import copy
import pickle
import shutil

import numpy as np
import pytest

from langchain_rcr import Item, PoolError, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families import get_family
from langchain_rcr.families.structure.additions import MISSED
from langchain_rcr.families.structure.inventory import SPARE, Inventory
from langchain_rcr.families.structure.kernel import RIDGE, Landmarks
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
ANIMALS = ("cat", "dog", "mouse", "zebra")
COLORS = ("black", "white", "gray", "brown")
ASKED = "is there a black purple zebra"


def rows(colors=COLORS):
    return [
        {"source": f"{asks} {color} {animal}", "target": f"{what}(filter({color}, find({animal})))"}
        for asks, what in (("how many are there of the", "count"), ("is there a", "exists"))
        for color in colors
        for animal in ANIMALS
    ]


def items(examples):
    return [Item(example["source"], example["target"]) for example in examples]


@pytest.fixture(scope="module")
def fitted():
    model = TriEncoder.build("structure", items(rows()), state="saturating")
    get_family("structure").fit(model.query, items(rows()), seed=0)
    return model


@pytest.fixture
def retriever(fitted, monkeypatch):
    """Fitted to rows without purple."""
    return SequentialCompositionalRetriever.from_encoder(copy.deepcopy(fitted), rows(), k=2)


def programs(documents):
    return " ".join(document.metadata["target"] for document in documents)


NEW = rows(["purple"])


def test_a_new_label_has_columns_of_its_own():
    inventory = Inventory.fit(SPEC, ["f(a)"], 100)
    assert inventory.spare("f(a)") == {}
    assert inventory.spare(" ") == {}
    assert [len(places) for places in inventory.spare("f ( b").values()] == [3]  # one label for all that isn't read
    found = inventory.spare("f(g(a), b)")
    assert sorted(found) == ["b", "g"]
    assert found["b"] != found["g"]
    assert all(len(set(places)) == 3 and 0 <= min(places) <= max(places) < SPARE for places in found.values())
    assert Inventory.fit(SPEC, ["h(c)"], 100).spare("b")["b"] == found["b"]


def test_questions_that_need_a_new_label_are_shown_it(retriever):
    questions = [row["source"] for row in rows()]
    before = [programs(found) for found in retriever.batch(questions)]
    assert "purple" not in programs(retriever.invoke(ASKED))
    retriever.add_examples(NEW[:3])
    assert "purple" in programs(retriever.invoke(ASKED))
    assert "purple" in programs(retriever.invoke("how many are there of the purple mouse"))
    after = [programs(found) for found in retriever.batch(questions)]
    assert not any("purple" in shown for shown in after)
    assert after == before


def test_vectors_of_before_stay_valid(retriever):
    model = retriever.store.encoder
    old, fingerprint = model.encode_pool(items(rows())), model.fingerprint()
    retriever.add_example(NEW[0])
    again = model.encode_pool(items(rows()))
    assert model.fingerprint() == fingerprint
    np.testing.assert_array_equal(old.candidate, again.candidate)
    np.testing.assert_array_equal(old.context, again.context)


def test_an_example_without_new_labels_changes_no_need(retriever):
    model = retriever.store.encoder
    before = model.encode_queries([ASKED])
    retriever.add_example({"source": "is there a cat", "target": "exists(find(cat))"})
    np.testing.assert_array_equal(model.encode_queries([ASKED]), before)
    retriever.add_example(NEW[0])
    again, known = model.encode_queries([ASKED]), len(model.query.inventory)
    assert (again[:, :known] == before[:, :known]).all()
    words = again[:, known + SPARE :] / before[:, known + SPARE :].max()  # they count for what is needed, which is more
    expected = words.max() * before[:, known + SPARE :] / before[:, known + SPARE :].max()
    np.testing.assert_allclose(words, expected, rtol=1e-5)


def test_examples_given_at_the_start_count_too(retriever):
    model = retriever.store.encoder
    both = SequentialCompositionalRetriever.from_encoder(model, rows() + NEW[:3], k=2)
    assert "purple" in programs(both.invoke(ASKED))


def test_refused_examples_teach_nothing(retriever):
    model = retriever.store.encoder
    before = model.encode_queries([ASKED])
    retriever.add_examples([rows()[0]], ["taken"])
    with pytest.raises(PoolError):
        retriever.add_examples([NEW[0]], ["taken"])
    np.testing.assert_array_equal(model.encode_queries([ASKED]), before)


def test_it_is_saved_with_the_store(retriever, tmp_path):
    retriever.add_examples(NEW[:3])
    retriever.save(tmp_path / "served")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "served", k=2)
    copies = (again, copy.deepcopy(again), pickle.loads(pickle.dumps(retriever)))
    for one in copies:
        assert programs(one.invoke(ASKED)) == programs(retriever.invoke(ASKED))
    again.add_examples(rows(["pink"])[:3])
    assert "pink" in programs(again.invoke("is there a pink zebra"))
    assert "purple" in programs(again.invoke(ASKED))
    shutil.copy(tmp_path / "served" / "query_encoder" / "additions.json", tmp_path / "additions.json")
    again.save(tmp_path / "served")
    shutil.copy(tmp_path / "additions.json", tmp_path / "served" / "query_encoder" / "additions.json")
    with pytest.raises(CheckpointError, match=r"additions.json is not the file that was saved"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "served")


def test_an_engine_filled_before_takes_new_labels(retriever):
    model, index = retriever.store.encoder, MemoryIndex()
    SequentialCompositionalRetriever.from_encoder(model, rows(), index=index)
    retriever.add_examples(NEW[:3])
    later = SequentialCompositionalRetriever.from_encoder(model, [*rows(), *NEW[:3]], index=index, k=2)
    assert "purple" in programs(later.invoke(ASKED))


def test_added_questions_become_landmarks(retriever):
    """As ridge regression over all questions at once, less what training questions get when left out."""
    new = [{"source": f"of the {animal} of the", "target": f"owner({animal})"} for animal in ANIMALS[:3]]
    retriever.add_examples(new)
    encoder = retriever.store.encoder.query
    asked = [Item(question) for question in ("of the zebra of the", "is there a zebra", "how many are of the white")]
    views = encoder.views(asked)
    every = items(rows()) + items(new)
    landmarks = Landmarks(encoder.views(every))
    matrix = landmarks.likeness(landmarks.views) + RIDGE * np.eye(len(every))
    wanted = np.array([0.0] * len(rows()) + [1.0] * 3)
    near = landmarks.likeness(views)
    said = near @ np.linalg.solve(matrix, wanted - wanted.mean()) + wanted.mean()
    left_out = []
    for row in range(len(every)):
        kept = np.arange(len(every)) != row
        dual = np.linalg.solve(matrix[np.ix_(kept, kept)], (wanted - wanted.mean())[kept])
        left_out.append(matrix[row, kept] @ dual + wanted.mean())
    low, high = np.array(left_out[: len(rows())]), np.array(left_out[len(rows()) :])
    costs = {value: (low > value).mean() + MISSED * (high <= value).mean() for value in low}
    chance = np.clip(min(value for value, cost in costs.items() if cost == min(costs.values())), 0, 0.9)
    expected = ((said - chance) / (1 - chance)).clip(0, 1)
    assert expected[0] > 0.5

    labels = encoder.new_labels()
    labels.weights[:] = 0  # what phrases say
    likely = labels.likelihoods([item.source for item in asked], views, encoder.landmarks.likeness(views))
    places = encoder.inventory.spare(new[0]["target"])["owner"]
    np.testing.assert_allclose(likely[:, places], np.tile(expected[:, None], len(places)), atol=1e-3)


def test_a_program_that_does_not_parse_is_added_with_a_warning(retriever, caplog):
    broken = {"source": "is there a bat", "target": "exists(find(bat"}
    retriever.add_examples([rows()[0], broken])
    assert "1 of 2 added programs don't parse as 'functional'" in caplog.text
    assert "exists(find(bat" in caplog.text
    caplog.clear()
    retriever.add_example(rows()[1])
    assert caplog.text == ""


def test_a_program_is_picked_twice_unless_that_is_ruled_out(retriever):
    twins = [{**row, "source": f"tell me , {row['source']}"} for row in rows()]
    retriever.add_examples(twins)
    assert any(len({pick.metadata["target"] for pick in retriever.invoke(row["source"], k=4)}) < 4 for row in rows())
    masked = retriever.model_copy(update={"mask_same_program": True})
    for row in rows()[::7]:
        picks = [document.metadata["target"] for document in masked.invoke(row["source"], k=4)]
        assert len(set(picks)) == 4


def test_a_second_fit_forgets_what_was_fitted_beside_the_first(retriever):
    retriever.add_examples(NEW[:3])
    model, fewer = retriever.store.encoder, items(rows())[:24]
    before = model.encode_queries([ASKED])
    get_family("structure").fit(model.query, fewer, seed=0)
    again = model.encode_queries([ASKED])
    known = len(model.query.inventory)
    assert (again[:, known : known + SPARE] > 0).any()
    assert not np.array_equal(before, again)
    assert "purple" in programs(retriever.invoke(ASKED))
