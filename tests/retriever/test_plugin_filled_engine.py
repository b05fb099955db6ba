"""An engine that isn't empty: the pool is what the examples say, on every engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_saved import EXAMPLES, QUERY, build, count_encoded
from test_plugin_selectors import WordCounts
from toys import lexical

from langchain_rcr import (
    CheckpointError,
    PoolError,
    SequentialCompositionalRetriever,
    TriEncoder,
    VectorStoreIndex,
)
from langchain_rcr.index.memory import MemoryIndex

IDS = list("abcde")
STRANGERS = [{"source": f"where do {word} live", "target": f"home({word})"} for word in ("owls", "bees")]


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return build()


def opened(encoder: TriEncoder, rows: list[dict[str, Any]], index: Any, **options: Any) -> Any:
    return SequentialCompositionalRetriever.from_encoder(encoder, rows, index=index, k=20, **options)


def texts(rows: list[dict[str, Any]]) -> list[str]:
    """Rows in any order, and their fields, too."""
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def shown(retriever: Any) -> list[str]:
    return texts(retriever.select_examples({"source": QUERY}))


def changed(**fields: Any) -> list[dict[str, Any]]:
    """The examples, the first of them with other fields."""
    return [{**EXAMPLES[0], **fields}, *EXAMPLES[1:]]


def test_others_are_refused_or_kept_where_that_is_asked_for(
    encoder: TriEncoder, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(encoder, EXAMPLES, index)
    first.save(tmp_path / "saved")
    encoded = count_encoded(monkeypatch)
    with pytest.raises(
        PoolError, match=r"holds 5 examples that are not among these 2: append=True keeps them"
    ) as caught:
        opened(encoder, STRANGERS, index)
    assert "\n" not in str(caught.value)
    assert (encoded, index.count()) == ([], 5)
    with pytest.raises(PoolError, match="holds 5 examples that are not among these 2: append=True"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", examples=STRANGERS, index=index)
    with pytest.raises(PoolError, match="holds 5 examples that are not among these 0: append=True"):
        opened(encoder, [], index)
    assert shown(opened(encoder, [], index, append=True)) == texts(EXAMPLES)
    assert shown(opened(encoder, STRANGERS, index, append=True)) == texts([*EXAMPLES, *STRANGERS])
    assert encoded == [2]
    # What was opened so is opened so again; with all of them as examples, too; and without any.
    opened(encoder, STRANGERS, index, append=True)
    opened(encoder, [*STRANGERS, *EXAMPLES], index)
    served = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", index=index, k=20)
    assert shown(served) == texts([*EXAMPLES, *STRANGERS])
    assert (encoded, index.count()) == ([2], 7)
    with pytest.raises(PoolError, match="holds 2 examples that are not among these 5"):
        opened(encoder, EXAMPLES, index)


@pytest.mark.parametrize("ids", [None, IDS], ids=["by content", "by id"])
def test_changed_examples_are_replaced(
    encoder: TriEncoder, index: Any, ids: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(encoder, EXAMPLES, index, ids=ids)
    encoded = count_encoded(monkeypatch)
    asleep = {"n": True, "source": "how many cats are asleep"}
    corrected = changed(**asleep, target="asleep(cats)")
    tagged = [{**row, "tag": [1.5, {"deep": None}]} for row in corrected]
    versions = (changed(n=7), 1), (changed(n=True), 1), (changed(**asleep), 1), (corrected, 1), (tagged, 5), (tagged, 0)
    for rows, count in versions:
        retriever = opened(encoder, rows, index, ids=ids)
        assert shown(retriever) == texts(rows)
        assert (index.count(), sum(encoded)) == (5, count)
        encoded.clear()


def test_a_removed_example_is_one_of_the_others(encoder: TriEncoder, index: Any) -> None:
    opened(encoder, EXAMPLES, index, ids=IDS)
    with pytest.raises(PoolError, match="holds 1 examples that are not among these 4"):
        opened(encoder, EXAMPLES[1:], index, ids=IDS[1:])
    # Nor is anything replaced before that is known.
    with pytest.raises(PoolError, match="holds 1 examples that are not among these 4"):
        opened(encoder, changed(n=7)[:4], index, ids=IDS[:4])
    assert {row.id: row.example for row in index.rows()} == dict(zip(IDS, EXAMPLES, strict=True))
    assert index.delete(["e"]) == 1
    assert shown(opened(encoder, EXAMPLES[:4], index, ids=IDS[:4])) == texts(EXAMPLES[:4])


@pytest.mark.parametrize("field", ["source", "target"])
def test_an_unrelated_pool_is_not_an_earlier_version(encoder: TriEncoder, field: str) -> None:
    index = MemoryIndex()
    opened(encoder, EXAMPLES, index)
    other = [{**row, field: f"other({n})"} for n, row in enumerate(EXAMPLES)]
    with pytest.raises(PoolError, match="holds 5 examples that are not among these 5"):
        opened(encoder, other, index)
    assert [row.example for row in index.rows()] == EXAMPLES


def test_what_an_engine_made_of_a_value_is_no_change(
    encoder: TriEncoder, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL gives lists for tuples, and whole numbers for large floats."""
    rows = [{**row, "n": (n, 2.0**60 + 2048, 0.1)} for n, row in enumerate(EXAMPLES)]
    opened(encoder, rows, index, ids=IDS)
    encoded = count_encoded(monkeypatch)
    opened(encoder, rows, index, ids=IDS)
    assert encoded == []


def test_what_replaces_others_comes_as_they_go(encoder: TriEncoder, index: Any) -> None:
    retriever = opened(encoder, EXAMPLES, index, ids=IDS)
    rows = index.rows(["a", "b", "nobody", ""])
    assert sorted(row.id for row in rows) == ["a", "b"]
    vectors = encoder.encode_pool(retriever.store.schema.extended([row.example for row in rows]).items())
    with pytest.raises(PoolError, match="the id 'b' is taken"):
        index.add(rows, vectors, replace=["a", "c"])
    assert index.known([*IDS, "x"]) == {*IDS}
    index.add([row._replace(id=one) for row, one in zip(rows, "ax", strict=True)], vectors, replace=["a", "c", "gone"])
    assert {row.id for row in index.rows()} == {*"abdex"} == index.known([*IDS, "x"])
    assert index.count() == 5


def test_of_two_processes_that_fill_an_engine_at_once_both_serve(
    encoder: TriEncoder, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = type(index).add

    def slow(self: Any, rows: Any, vectors: Any, **options: Any) -> None:
        monkeypatch.undo()
        add(self, rows, vectors, **options)  # the other process
        add(self, rows, vectors, **options)

    monkeypatch.setattr(type(index), "add", slow)
    assert shown(opened(encoder, EXAMPLES, index)) == texts(EXAMPLES)


def test_two_selectors_over_one_collection() -> None:
    """The default collection of a store that lives in this process, say."""
    shared = InMemoryVectorStore(WordCounts())

    class Default(InMemoryVectorStore):
        def __init__(self, embedding: Any) -> None:
            super().__init__(embedding)
            self.store = shared.store

    make: Callable[..., Any] = SequentialCompositionalRetriever.from_examples
    weather = [{"source": f"how {word} is it", "target": f"weather({word})"} for word in ("hot", "wet", "cold")]
    money = [{"source": f"what is a {word} worth", "target": f"rate({word})"} for word in ("franc", "yen")]
    options = {"language": "functional", "k": 5}
    make(weather, WordCounts(), Default, **options)
    with pytest.raises(PoolError, match="VectorStoreIndex holds 3 examples that are not among these 2: append=True"):
        make(money, WordCounts(), Default, **options)
    both = make(money, WordCounts(), Default, append=True, **options)
    assert len(both.select_examples({"source": "how hot is it"})) == 5
    one = MemoryIndex()
    make(weather, WordCounts(), index=one, **options)
    with pytest.raises(PoolError, match="MemoryIndex holds 3 examples"):
        make(money, WordCounts(), index=one, **options)


@pytest.mark.slow
def test_a_changed_pool_over_an_old_collection_says_what_to_rebuild(tmp_path: Path) -> None:
    chroma = pytest.importorskip("langchain_chroma")
    from chromadb.config import Settings

    make: Callable[..., Any] = SequentialCompositionalRetriever.from_examples
    rows = [{"source": f"how many {a} {b} are there", "target": f"count({a}({b}))"} for a in "vwxyz" for b in "abcde"]
    store = {"persist_directory": str(tmp_path), "client_settings": Settings(anonymized_telemetry=False)}
    options = {"language": "functional", "collection_name": "old"}
    make(rows, WordCounts(), chroma.Chroma, **options, **store)
    again = make(rows, WordCounts(), chroma.Chroma, **options, **store)
    assert again.store.index.count() == len(rows)
    more = [*rows, *({"source": f"name the {b}", "target": f"list(every({b}))"} for b in "abcde")]
    rebuild = "give the examples a new collection, or delete this one first; they are encoded anew"
    # The one meets the old vectors with its probe, the other reads what the pool says of itself.
    with pytest.raises(CheckpointError, match=f"others filled it: {rebuild}"):
        make(more, WordCounts(), chroma.Chroma, **options, **store)
    with pytest.raises(CheckpointError, match=f"holds {len(rows)} examples encoded by other encoders .*: {rebuild}"):
        make(
            more,
            WordCounts(),
            index=VectorStoreIndex(chroma.Chroma, collection_name="old", **store),
            language="functional",
        )
    foreign = {"collection_name": "foreign", **store}
    chroma.Chroma.from_texts(["a text"], WordCounts(), **foreign)
    with pytest.raises(CheckpointError, match=f"others filled it: {rebuild}"):
        make(more, WordCounts(), index=VectorStoreIndex(chroma.Chroma, **foreign), language="functional")


@pytest.mark.slow
def test_a_store_whose_first_document_decides_which_fields_there_are(tmp_path: Path) -> None:
    """Milvus dropped the vectors of all examples, as the probe of `from_examples` had none."""
    milvus = pytest.importorskip("langchain_milvus")
    make: Callable[..., Any] = SequentialCompositionalRetriever.from_examples
    file = {"uri": str(tmp_path / "p.db")}
    one, other = (
        make(EXAMPLES, WordCounts(), kind, language="functional", **options)
        for kind, options in ((milvus.Milvus, {"connection_args": file}), (None, {}))
    )
    assert one.select_examples({"source": "how hot is it"}) == other.select_examples({"source": "how hot is it"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Milvus", "QdrantVectorStore"])
def test_so_do_stores_that_cannot_be_asked_without_vectors(encoder: TriEncoder, tmp_path: Path, name: str) -> None:
    def make() -> VectorStoreIndex:
        if name == "Milvus":
            milvus = pytest.importorskip("langchain_milvus")
            return VectorStoreIndex(milvus.Milvus, connection_args={"uri": str(tmp_path / "old.db")}, auto_id=False)
        client = {"path": str(tmp_path)}
        qdrant = pytest.importorskip("langchain_qdrant").QdrantVectorStore
        return VectorStoreIndex(qdrant.construct_instance, client_options=client, collection_name="old")

    index = make()
    opened(encoder, EXAMPLES, index)
    if name == "QdrantVectorStore":
        index.documents.store.client.close()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="others filled it: give the examples a new collection, or delete"):
        opened(lexical(EXAMPLES, 48), EXAMPLES, make())
