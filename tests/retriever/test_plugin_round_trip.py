"""What `save` wrote `from_pretrained` reads: fields, keys, examples and what they taught, on every engine."""

import copy
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from toys import lexical, reseal

from langchain_rcr import CheckpointError, InputError, Item, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.families import get_family
from langchain_rcr.index.local import LocalIndex
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.pool.arguments import Fields

make = SequentialCompositionalRetriever
ROWS = [
    {"question": f"how many {w} are there", "query": f"count({w})", "db": "ab"[n % 2]} for n, w in enumerate("cdefgh")
]
ASKED = {"question": "how many d are there", "ask": "how many f are there", "db": "a"}
FIELDS: dict[str, Any] = {
    "k": 2,
    "input_keys": ["ask"],
    "example_keys": ["query", "db"],
    "filter": {"$or": [{"db": "b"}, {"db": {"$in": ["c"]}}]},
    "group": "db",
    "beam_width": 3,
    "order": "picked",
    "mask_same_program": True,
    "stop_early": True,
    "probabilities": False,
    "min_relevance": 0.5,
    "k_min": 1,
    "tags": ["ours"],
    "metadata": {"team": "data"},
    "auto_refit": True,
}


def rows(*colors: str) -> list[dict[str, str]]:
    return [
        {"source": f"{asks} {color} {animal}", "target": f"{what}(filter({color}, find({animal})))"}
        for asks, what in (("how many are there of the", "count"), ("is there a", "exists"))
        for color in colors or ("black", "white", "gray", "brown")
        for animal in ("cat", "dog", "mouse", "zebra")
    ]


def fit(**settings: Any) -> TriEncoder:
    items = [Item(row["source"], row["target"]) for row in rows()]
    model = TriEncoder.build("structure", items, state="saturating", numpy=True, **settings)
    get_family("structure").fit(model.query, items, seed=0)
    return model


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return lexical(ROWS, 32, keys=("question", "query"))


@pytest.fixture(scope="module")
def fitted() -> TriEncoder:
    return fit()


def reopened(retriever: Any, folder: Path, **options: Any) -> Any:
    """From its folder, over the same engine where that keeps the examples."""
    retriever.save(folder)
    index = retriever.store.index
    return make.from_pretrained(folder, **({} if isinstance(index, LocalIndex) else {"index": index}), **options)


def test_every_field_and_key_comes_back(encoder: TriEncoder, index: Any, tmp_path: Path) -> None:
    keys = {"source_key": "question", "target_key": "query"}
    retriever = make.from_encoder(encoder, ROWS, index=index, **keys)
    for name, value in FIELDS.items():
        one = retriever.model_copy(update={name: value})
        again = reopened(one, tmp_path / "saved")
        assert {**dict(again), "store": 0} == {**dict(one), "store": 0}
        assert again.select_examples(ASKED) == one.select_examples(ASKED)
    assert reopened(retriever, tmp_path / "saved", k=1, order="picked").k == 1
    missing = {*make.model_fields} - {*FIELDS} - {"store", "tokenizer", "max_tokens", "explore", "log", "name"}
    assert not missing, "a new field: add it to FIELDS"


def test_a_filter_may_name_a_set(encoder: TriEncoder, tmp_path: Path) -> None:
    keys = {"source_key": "question", "target_key": "query"}
    retriever = make.from_encoder(encoder, ROWS, filter={"db": {"$in": {"b", "a"}}}, **keys)
    assert reopened(retriever, tmp_path).filter == {"db": {"$in": ["a", "b"]}}


def test_editors_know_the_fields() -> None:
    assert {*Fields.__annotations__} | {"store"} == {*make.model_fields}
    for function in (make.__init__, make.from_pretrained, make.from_encoder):
        assert function.__annotations__["fields"] == "Unpack[Fields]"


def test_a_tokenizer_is_asked_for_and_several_keys_come_back(encoder: TriEncoder, tmp_path: Path) -> None:
    retriever = make.from_encoder(
        encoder, ROWS, source_key=["question", "db"], target_key="query", max_tokens=20, tokenizer=str.split
    )
    retriever.save(tmp_path)
    with pytest.raises(InputError, match="max_tokens = 20 needs a tokenizer"):
        make.from_pretrained(tmp_path)
    again = make.from_pretrained(tmp_path, tokenizer=str.split)
    assert again.source_keys == ("db", "question")
    assert again.select_examples(ASKED) == retriever.select_examples(ASKED)
    with pytest.raises(InputError, match="the field 'metadata' of the retriever can't be saved: Object of type object"):
        retriever.model_copy(update={"metadata": {"a": object()}}).save(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"fields": {}},
        {"source_key": "question", "target_key": "query", "fields": []},
        {"source_key": ["question"], "target_key": "query", "fields": {"store": 1}},
        {"source_key": ["question"], "target_key": "query", "fields": {"k": "many"}},
        {"source_key": ["question"], "target_key": "query", "fields": {"stop_early": {}}},
        {"source_key": ["question"], "target_key": "query", "fields": {"beam_width": 10**9}},
        {"source_key": [["question"]], "target_key": 3, "fields": {}},
    ],
)
def test_a_strangers_fields_are_refused(encoder: TriEncoder, tmp_path: Path, content: dict[str, Any]) -> None:
    make.from_encoder(encoder, ROWS, source_key="question", target_key="query").save(tmp_path)
    (tmp_path / "retriever.json").write_text(json.dumps(content))
    reseal(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
        make.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_reopened_engine_teaches_what_was_added(fitted: TriEncoder, index: Any, tmp_path: Path) -> None:
    """A restart: the checkpoint is older than the additions, which the engine alone has kept."""
    retriever = make.from_encoder(copy.deepcopy(fitted), rows(), index=index, k=2)
    retriever.save(tmp_path / "saved")
    new = [{"source": "are there of the", "target": "exists(find(cat))"}, *rows("purple")[:3]]
    retriever.add_examples(new)
    asked = [*(row["source"] for row in new), "is there a black purple zebra"]
    expected = [[document.metadata["target"] for document in found] for found in retriever.batch(asked)]
    again = make.from_pretrained(tmp_path / "saved", index=index)
    assert [[document.metadata["target"] for document in found] for found in again.batch(asked)] == expected
    assert all(row["target"] in found for row, found in zip(new, expected, strict=False))
    appended = make.from_encoder(copy.deepcopy(fitted), rows(), index=index, k=2, append=True)
    assert [[document.metadata["target"] for document in found] for found in appended.batch(asked)] == expected


def test_from_a_large_engine_it_learns_in_the_background(
    fitted: TriEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("langchain_rcr.pool.store._MOST_READ_AT_ONCE", 30)
    caplog.set_level("INFO")
    index, reading = MemoryIndex(), threading.Event()
    retriever = make.from_encoder(copy.deepcopy(fitted), rows(), index=index, k=1)
    retriever.save(tmp_path)
    retriever.add_examples(rows("purple"))
    every = index.rows
    monkeypatch.setattr(index, "rows", lambda *ids: (ids or reading.wait(60)) and every(*ids))
    again = make.from_pretrained(tmp_path, index=index)
    assert again.invoke("is there a black zebra")  # before anything was read
    assert again.store.encoder.query.additions is None
    reading.set()
    asked, until = [row["source"] for row in rows("purple")], time.monotonic() + 60
    while again.batch(asked) != retriever.batch(asked):
        assert time.monotonic() < until
    assert "learning in the background from 40 examples in MemoryIndex" in caplog.text


def test_what_the_fit_left_out_teaches_nothing_when_it_is_reopened(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    index = MemoryIndex()
    make.from_encoder(fit(landmarks=20), rows(), index=index).save(tmp_path)
    for again in (make.from_pretrained(tmp_path), make.from_pretrained(tmp_path, index=index)):
        assert len(again.store.encoder.query.dual) == 20
        assert again.store.encoder.query.additions is None
        assert again.invoke("is there a black zebra")
    assert "were added" not in caplog.text
