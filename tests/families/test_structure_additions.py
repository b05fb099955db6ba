"""Labels that come in after training: their columns, who needs them, checkpoints, engines."""

import copy
import pickle
import shutil

import numpy as np
import pytest

from langchain_rcr import Item, PoolError, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.errors import CheckpointError
from langchain_rcr.families import get_family
from langchain_rcr.families.folds import PROGRAM, Folds
from langchain_rcr.families.structure import cues, needs
from langchain_rcr.families.structure.additions import MISSED
from langchain_rcr.families.structure.inventory import SPARE, Inventory
from langchain_rcr.families.structure.kernel import RIDGE
from langchain_rcr.families.structure.needs import NumpyNeedEncoder
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
    assert "purple" not in programs(retriever.invoke(ASKED))
    retriever.add_examples(NEW[:3])
    assert "purple" in programs(retriever.invoke(ASKED))
    assert "purple" in programs(retriever.invoke("how many are there of the purple mouse"))
    after = [programs(found) for found in retriever.batch(questions)]
    assert not any("purple" in shown for shown in after)
    assert all(row["target"] in shown for row, shown in zip(rows(), after, strict=True))


def test_vectors_of_before_stay_valid(retriever):
    model = retriever.store.encoder
    old, fingerprint = model.encode_pool(items(rows())), model.fingerprint()
    retriever.add_example(NEW[0])
    again = model.encode_pool(items(rows()))
    assert model.fingerprint() == fingerprint
    np.testing.assert_array_equal(old.candidate, again.candidate)
    np.testing.assert_array_equal(old.context, again.context)


def test_an_added_question_needs_what_its_program_has(retriever):
    """Known words that mean something new."""
    model = retriever.store.encoder.query
    added = {"source": "are there of the", "target": "exists(find(cat))"}
    names = np.array(model.inventory.names)

    def likely():
        return model.likelihoods(model.featurize([Item(added["source"])])).detach().numpy()[0]

    before = likely()
    retriever.add_example(added)
    assert before[names == "cat"] < 0.5 < likely()[names == "cat"]
    assert retriever.invoke(added["source"])[-1].metadata["target"] == added["target"]


def test_added_in_parts_or_at_once_is_the_same(retriever):
    twins = [{**row, "source": f"tell me , {row['source']}"} for row in rows()[:7]] + NEW
    other = copy.deepcopy(retriever)
    retriever.add_examples(twins)
    for example in twins:
        other.add_example(example)
    for asked in (ASKED, "tell me , is there a brown dog"):
        vectors = [each.store.encoder.encode_queries([asked]) for each in (retriever, other)]
        np.testing.assert_allclose(*vectors, rtol=1e-2, atol=1e-3)


def test_only_so_many_are_learnt(retriever, monkeypatch, caplog):
    monkeypatch.setattr(needs, "MOST", 4)
    retriever.add_examples([{**row, "source": f"tell me , {row['source']}"} for row in rows()[:5]] + NEW[:3])
    assert [item.source for item in retriever.store.encoder.query.additions.items[:3]] == [
        row["source"] for row in NEW[:3]
    ]
    assert "4 examples were added since the fit" in caplog.text
    before = retriever.store.encoder.encode_queries([ASKED])
    retriever.add_example(NEW[3])
    np.testing.assert_array_equal(retriever.store.encoder.encode_queries([ASKED]), before)


def test_labels_without_a_column_leave_room_for_added_examples(monkeypatch, caplog):
    """Of more labels than columns, the pool's own examples teach the rest, as if they had been added."""
    model = TriEncoder.build("structure", items(rows()), state="saturating", dim=10)
    get_family("structure").fit(model.query, items(rows()), seed=0)
    monkeypatch.setattr(needs, "MOST", 8)
    retriever = SequentialCompositionalRetriever.from_encoder(model, rows(), k=2)
    assert len(model.query.additions.items) == 8
    retriever.upsert(rows(), [f"again {at}" for at in range(len(rows()))])
    retriever.add_examples(NEW[:3])
    assert len(model.query.additions.items) == 11
    assert "purple" in programs(retriever.invoke(ASKED))
    assert not caplog.text
    retriever.add_examples(NEW[3:])
    assert retriever.needs_refit


def test_only_so_many_labels_without_a_column_are_learnt(monkeypatch):
    model = TriEncoder.build("structure", items(rows()), state="saturating", dim=6)
    get_family("structure").fit(model.query, items(rows()), seed=0)
    monkeypatch.setattr(needs, "MOST", 8)
    for _ in range(2):
        SequentialCompositionalRetriever.from_encoder(model, rows(), k=2)
        assert len(model.query.additions.items) == 8


def test_examples_of_training_teach_nothing_new(retriever):
    model = retriever.store.encoder
    before = model.encode_queries([ASKED])
    retriever.add_examples(rows()[:5])
    assert model.query.additions is None
    np.testing.assert_array_equal(model.encode_queries([ASKED]), before)


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


def test_it_is_saved_with_the_store(retriever, tmp_path, monkeypatch):
    retriever.add_examples(NEW[:3])
    retriever.save(tmp_path / "served")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "served", k=2)
    before = retriever.store.encoder.encode_queries([ASKED])
    read = []
    views = NumpyNeedEncoder.views
    monkeypatch.setattr(NumpyNeedEncoder, "views", lambda self, items: read.extend(items) or views(self, items))
    np.testing.assert_allclose(again.store.encoder.encode_queries([ASKED]), before, rtol=1e-4, atol=1e-5)
    assert [item.source for item in read] == [ASKED]  # the added questions aren't read again
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


def test_the_only_example_that_an_engine_has_beside_the_pool_is_learnt(fitted):
    index, model = MemoryIndex(), copy.deepcopy(fitted)
    SequentialCompositionalRetriever.from_encoder(copy.deepcopy(fitted), [*rows(), NEW[0]], index=index)
    SequentialCompositionalRetriever.from_encoder(model, rows(), index=index, append=True)
    assert [item.source for item in model.query.additions.items] == [NEW[0]["source"]]


def test_added_questions_become_landmarks(retriever):
    """As ridge regression over all questions at once, less what training questions get when left out."""
    new = [{"source": f"of the {animal} of the", "target": f"owner({animal})"} for animal in ANIMALS[:3]]
    retriever.add_examples(new)
    encoder = retriever.store.encoder.query
    asked = [Item(question) for question in ("of the zebra of the", "is there a zebra", "how many are of the white")]
    every = items(rows()) + items(new)
    landmarks = encoder.views(every)
    matrix = landmarks.likeness(landmarks) + RIDGE * np.eye(len(every))
    targets = np.asarray(encoder.inventory.rows([item.target for item in every], spare=True))
    mean = np.concatenate([encoder.mean.numpy(), np.zeros(SPARE)])
    near = landmarks.likeness(encoder.views(asked))
    said = near @ np.linalg.solve(matrix, targets - mean) + mean
    features = encoder.featurize(asked)
    np.testing.assert_allclose(features.raw, said[:, :-SPARE], atol=1e-3)

    place = encoder.inventory.spare(new[0]["target"])["owner"][0] - SPARE
    wanted, left_out = targets[:, place], []
    for row in range(len(every)):
        kept = np.arange(len(every)) != row
        left_out.append(matrix[row, kept] @ np.linalg.solve(matrix[np.ix_(kept, kept)], wanted[kept]))
    low, high = np.array(left_out)[wanted == 0], np.array(left_out)[wanted > 0]
    costs = {value: (low > value).mean() + MISSED * (high <= value).mean() for value in low}
    chance = np.clip(min(value for value, cost in costs.items() if cost == min(costs.values())), 0, 0.9)

    labels = encoder._with_additions().labels
    count = len(labels._phrases)
    present = cues.incidence(labels._phrases.bags(every), np.arange(count), count)
    np.testing.assert_allclose(labels.weights, cues.fit(present, targets[:, -SPARE:]), rtol=1e-5)
    labels.weights[:] = 0  # what phrases say
    for factor, least in ((1, 0.5), (9, 1)):
        expected = ((factor * said[:, place] - chance) / (1 - chance)).clip(0, 1)
        assert expected[0] >= least
        likely = labels.likelihoods([item.source for item in asked], (factor * said[:, -SPARE:]).astype(np.float32))
        np.testing.assert_allclose(likely[:, place], expected, atol=1e-3)


def test_a_program_that_does_not_parse_is_added_with_a_warning(retriever, caplog):
    broken = {"source": "is there a bat", "target": "exists(find(bat"}
    retriever.add_examples([rows()[0], broken])
    assert "1 of 2 programs don't parse as 'functional'" in caplog.text
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


def test_whether_a_fit_is_due_is_judged_once_for_the_same_additions(retriever, monkeypatch):
    """It goes through all that was learnt, which every later addition would pay."""
    judged = []

    def unseen(encoder, names):
        judged.append(len(names))
        return np.ones(len(names), dtype=bool)

    monkeypatch.setattr(NumpyNeedEncoder, "unseen", unseen)
    monkeypatch.setattr(needs, "MOST", 4)
    retriever.add_examples(NEW[:4])
    for row in NEW[4:]:
        retriever.add_example(row)
    assert judged == [4]


def test_a_new_question_beside_those_held_out_is_seen_with_what_was_added(fitted):
    encoder = copy.deepcopy(fitted).query
    encoder.grow([Item("how many black zebra", "exists(filter(white, find(cat)))")])
    every = [*items(rows()), Item("how many of the black zebra", "count(filter(black, find(zebra)))")]
    folds = Folds.of(every, SPEC)
    held = get_family("structure").held_out(encoder, every, folds, np.full(len(every), PROGRAM))
    np.testing.assert_allclose(held.raw[-1], encoder.featurize(every[-1:]).raw[0], atol=1e-5)
    assert abs(held.raw[0] - encoder.featurize(every[:1]).raw[0]).max() > 0.01
