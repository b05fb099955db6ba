"""A retriever on disk: saved with its vectors, read back without encoding, refused where things don't fit."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from documents import same_documents
from toys import lexical, reseal

from langchain_rcr import CheckpointError, InputError, PoolError, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.pool.examples import pool_of
from langchain_rcr.pool.saved import load_vectors

EXAMPLES = [
    {"source": f"how many {word} are there", "target": f"count({word})", "n": n}
    for n, word in enumerate(["cats", "dogs", "mice", "hens", "cows"])
]
QUERY = "how many cats and hens are there"


def build(seed: int = 0) -> TriEncoder:
    return lexical(EXAMPLES, dim=32, seed=seed)


@pytest.fixture
def retriever() -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(build(), EXAMPLES, ids=list("abcde"), k=3)


def count_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    encoded: list[int] = []
    original = TriEncoder.encode_pool

    def counting(self: TriEncoder, items: Any) -> Any:
        encoded.append(len(items))
        return original(self, items)

    monkeypatch.setattr(TriEncoder, "encode_pool", counting)
    return encoded


def test_what_was_added_and_deleted_is_there_after_saving_and_nothing_is_encoded(
    retriever: SequentialCompositionalRetriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever.delete(["b"])
    retriever.add_example({"source": "a flock of geese", "target": "count(geese)"}, id="f")
    retriever.upsert([{"source": "no mice at all", "target": "none(mice)"}], ["c"])
    retriever.save(tmp_path / "saved")
    encoded = count_encoded(monkeypatch)
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", k=3)
    assert encoded == []
    assert same_documents(again.invoke(QUERY, k=5), retriever.invoke(QUERY, k=5))
    assert again.store.index.known("abcdef") == set("acdef")
    again.add_example({"source": "x", "target": "y"})
    assert encoded == [1]


def test_a_folder_that_another_process_saves_meanwhile_is_read_again(
    retriever: SequentialCompositionalRetriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called damaged: a server that reloads its pool met that now and then."""
    retriever.save(tmp_path / "saved")
    fuller = copy.deepcopy(retriever)
    fuller.add_example({"source": "a flock of geese", "target": "count(geese)"}, id="f")

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        fuller.save(tmp_path / "saved")
        return load_vectors(*arguments, **options)

    monkeypatch.setattr("langchain_rcr.pool.store.load_vectors", meanwhile)
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    assert again.store.index.known("abcdef") == set("abcdef")


@pytest.mark.parametrize("place", ["", ".", "folder"])
def test_a_folder_with_other_files_is_left_as_it_is(
    retriever: SequentialCompositionalRetriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "mine.txt").write_text("x")
    with pytest.raises(InputError, match=r"holds mine\.txt, which isn't a checkpoint's and would be lost: give a new"):
        retriever.save(place)
    assert (tmp_path / place / "mine.txt").read_text() == "x"
    retriever.save("new")
    retriever.save("new")
    (tmp_path / "new/.git").mkdir()
    (tmp_path / "new/.git/HEAD").write_text("ref: refs/heads/main")
    with pytest.raises(InputError, match=r"holds \.git/HEAD"):
        retriever.save("new")
    assert (tmp_path / "new/.git/HEAD").exists()


@pytest.mark.slow
def test_saving_replaces_as_a_whole_and_a_failure_leaves_what_was_there(
    retriever: SequentialCompositionalRetriever, tmp_path: Path
) -> None:
    retriever.save(tmp_path / "saved")
    retriever.add_example({"source": "x", "target": "y", "when": object()}, id="odd")
    with pytest.raises(PoolError, match=rf"example 'odd' can't be written to {tmp_path}/saved: field 'when': Object"):
        retriever.save(tmp_path / "saved")
    assert len(SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved").invoke(QUERY, k=5)) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    retriever.delete(["odd", "a"])
    retriever.save(tmp_path / "saved")
    assert SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved").store.index.count() == 4


def test_vectors_of_another_encoder_or_pool_are_refused_with_what_to_do(
    retriever: SequentialCompositionalRetriever, tmp_path: Path
) -> None:
    retriever.save(tmp_path / "saved")
    other = SequentialCompositionalRetriever.from_encoder(build(seed=1), EXAMPLES, ids=list("abcde"))
    other.save(tmp_path / "other")
    vectors = tmp_path / "saved" / "pool.safetensors"
    kept = vectors.read_bytes()
    vectors.write_bytes((tmp_path / "other" / "pool.safetensors").read_bytes())
    reseal(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"another encoder.*encode the examples again"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    vectors.write_bytes(kept[:-7])
    with pytest.raises(CheckpointError, match=r"pool\.safetensors"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    vectors.write_bytes(kept)
    pool = tmp_path / "saved" / "pool.jsonl"
    lines = pool.read_text().splitlines()
    pool.write_text("\n".join(lines[::-1]))
    reseal(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"pool\.safetensors"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    pool.write_text("\n".join(lines).replace("cats", "bats"))
    with pytest.raises(CheckpointError, match=r"pool\.jsonl is not the file that was saved"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    reseal(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"pool\.safetensors.*other examples"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    vectors.unlink()
    assert len(SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved").invoke(QUERY, k=5)) == 5


def test_ids_are_made_of_the_content_so_that_an_engine_knows_examples_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = build()
    rows = [*EXAMPLES, EXAMPLES[0]]
    first = SequentialCompositionalRetriever.from_encoder(encoder, rows)
    encoded = count_encoded(monkeypatch)
    again = SequentialCompositionalRetriever.from_encoder(encoder, rows, index=first.store.index)
    assert encoded == []
    assert again.store.index.count() == 6
    more = SequentialCompositionalRetriever.from_encoder(
        encoder, [*rows, {"source": "new", "target": "new"}], index=first.store.index
    )
    assert encoded == [1]
    assert more.store.index.count() == 7


def test_fields_with_keys_of_any_type_have_ids_that_stay() -> None:
    loop: list[Any] = []
    loop.append(loop)
    fields = [{1: "a", "b": 2}, {(1, 2): "a"}, {None: "a", "b": 2}, {True: 1, None: {2: 3, "c": 4}}, loop]
    rows = [{**row, "meta": meta} for row, meta in zip(EXAMPLES, fields, strict=True)]
    made = [pool_of(each, None, "source", "target") for each in (rows, copy.deepcopy(rows[:4]))]
    assert list(made[0].examples)[:4] == rows[:4]
    assert made[1].ids == made[0].ids[:4]
    assert len({*made[0].ids}) == 5
    turned = [{"meta": {"b": 2, 1: "a"}, **EXAMPLES[0]}]
    assert pool_of(turned, None, "source", "target").ids == made[0].ids[:1]


def test_an_engine_with_another_encoders_vectors_is_refused(retriever: SequentialCompositionalRetriever) -> None:
    with pytest.raises(CheckpointError, match="another encoder"):
        SequentialCompositionalRetriever.from_encoder(build(seed=1), EXAMPLES, index=retriever.store.index)


def test_a_filled_engine_serves_without_examples(retriever: SequentialCompositionalRetriever, tmp_path: Path) -> None:
    retriever.save(tmp_path / "saved")
    served = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved", index=retriever.store.index, k=3)
    expected = [pick.id for pick in retriever.invoke(QUERY)]
    assert [pick.id for pick in served.invoke(QUERY)] == expected
    (tmp_path / "saved" / "pool.jsonl").write_text(json.dumps({"source": "only"}))
    reseal(tmp_path / "saved")
    assert [pick.id for pick in served.invoke(QUERY)] == expected
    with pytest.raises(CheckpointError, match=r"pool\.jsonl, line 1.*'target'.*; source_key= and target_key= name"):
        SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")


async def test_deleting_and_replacing(retriever: SequentialCompositionalRetriever) -> None:
    first = retriever.invoke(QUERY)[0]
    assert retriever.delete([first.id, "nobody"]) == 1
    assert first.id not in {document.id for document in retriever.invoke(QUERY, k=4)}
    assert await retriever.adelete([first.id]) == 0
    assert await retriever.aupsert([{"source": QUERY, "target": "replaced"}], ["e"]) == ["e"]
    assert retriever.invoke(QUERY)[0].metadata["target"] == "replaced"
    assert retriever.store.index.count() == 4
    assert await retriever.aadd_examples(EXAMPLES[:2]) != await retriever.aadd_examples(EXAMPLES[:2])
    for wrong, message in (
        ("abc", "must be a sequence of ids, not 'abc'"),
        ([3], "an id must be a string, not 3"),
        (None, "ids must be a sequence of ids, not None"),
    ):
        with pytest.raises(InputError, match=message):
            retriever.delete(wrong)  # type: ignore[arg-type]
    assert retriever.delete(iter(["e", "nobody"])) == 1  # type: ignore[arg-type]
    made = await SequentialCompositionalRetriever.afrom_encoder(build(), EXAMPLES, k=1)
    assert len(await made.ainvoke(QUERY)) == 1
