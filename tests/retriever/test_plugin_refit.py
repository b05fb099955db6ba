"""A fit to what has been added since the last one, while questions are answered and the pool changes."""

import asyncio
import copy
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from test_plugin_relevance import ROWS, WordCounts
from test_plugin_saved import EXAMPLES, build

from langchain_rcr import (
    FaissIndex,
    InputError,
    SequentialCompositionalRetriever,
    TriEncoder,
    VectorStoreIndex,
)
from langchain_rcr.index.memory import MemoryIndex

make = SequentialCompositionalRetriever
NEW = [{"source": f"where do the {one} live", "target": f"home({one})"} for one in ("cats", "dogs", "mice", "bees")]


def shown(retriever: Any) -> list[Any]:
    return [retriever.select_examples({"source": row["source"]}) for row in [*ROWS, *NEW]]


def test_it_is_as_a_fit_to_all_examples(retriever: SequentialCompositionalRetriever) -> None:
    retriever.add_examples(NEW)
    short = retriever.model_copy(update={"k": 1})  # shares the store
    retriever.refit()
    expected = make.from_examples([*ROWS, *NEW], WordCounts(), language="functional", k=2)
    assert shown(retriever) == shown(expected)
    assert short.store.encoder.fingerprint() == expected.store.encoder.fingerprint()
    assert retriever.store.encoder.query.additions is None
    assert pickle.loads(pickle.dumps(retriever)).invoke(NEW[0]["source"]) == retriever.invoke(NEW[0]["source"])


def test_it_says_when_it_is_worth_its_time(
    retriever: SequentialCompositionalRetriever, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retriever = retriever.model_copy(update={"auto_refit": False})
    assert not retriever.needs_refit
    retriever.add_examples([*ROWS[:8], *NEW[:3]])  # 8 are known
    assert not retriever.needs_refit
    caplog.set_level(logging.WARNING)
    retriever.add_example(NEW[3])
    retriever.add_example({"source": "where do the hens live", "target": "home(hens)"})
    assert retriever.needs_refit
    (said,) = caplog.records
    assert said.message == (
        "44 examples, many of them new to the fit: call refit(), or await arefit(), which fit to these examples alone"
    )
    retriever.save(tmp_path)
    assert make.from_pretrained(tmp_path, embeddings=WordCounts()).needs_refit
    retriever.refit()
    assert not retriever.needs_refit


def test_an_example_that_is_added_while_it_is_saved_is_in_the_pool_and_learnt_or_neither(
    retriever: SequentialCompositionalRetriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding, original = threading.Thread(target=retriever.add_examples, args=(NEW,)), TriEncoder.save_pretrained

    def saved(encoder: TriEncoder, *given: Any, **more: Any) -> None:
        original(encoder, *given, **more)
        adding.start()
        adding.join(1)

    monkeypatch.setattr(TriEncoder, "save_pretrained", saved)
    retriever.save(tmp_path / "saved")
    adding.join()
    store = make.from_pretrained(tmp_path / "saved", embeddings=WordCounts()).store
    learnt = store.encoder.query.additions.items if store.encoder.query.additions else ()
    assert store.index.count() == len(ROWS) + len(learnt)
    assert retriever.store.index.count() == len(ROWS) + len(NEW)


def test_what_race_or_grpo_chose_stays(retriever: SequentialCompositionalRetriever) -> None:
    encoder = retriever.store.encoder
    encoder.vary({"label": 3.0, "cost": 0.05, "fade": 2.0, "order": "picked"})
    encoder.group, encoder.card = "db", "ours"
    changed = encoder.query.logged()
    after = encoder.refitted(retriever.store.schema.extended([*ROWS, *NEW]).items())
    assert after.query.logged() == changed
    assert (after.config, after.group, after.card) == (encoder.config, "db", "ours")


@pytest.mark.parametrize("index", [MemoryIndex, FaissIndex])
def test_what_changes_meanwhile_is_not_lost(
    index: type, fitted: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = copy.deepcopy(fitted.store.encoder)
    retriever = make.from_encoder(encoder, ROWS, ids=[str(n) for n in range(32)], index=index(), k=2)
    refitted = TriEncoder.refitted

    def meanwhile(self: TriEncoder, *arguments: Any, **options: Any) -> TriEncoder:
        made = refitted(self, *arguments, **options)
        retriever.add_examples(NEW[:2], ["a", "b"])
        retriever.upsert([{**ROWS[0], "note": "changed"}], ["0"])
        assert retriever.delete(["1", "b"]) == 2
        assert len(retriever.invoke("how many cats")) == 2
        return made

    monkeypatch.setattr(TriEncoder, "refitted", meanwhile)
    asyncio.run(retriever.arefit())
    assert isinstance(retriever.store.index, index)
    rows = {row.id: row.example for row in retriever.store.index.rows()}
    assert rows.keys() == {"0", "a", *map(str, range(2, 32))}
    assert (rows["0"]["note"], rows["a"]) == ("changed", NEW[0])
    assert retriever.invoke(NEW[0]["source"])[-1].id == "a"


def test_one_in_the_background_asks_for_no_other(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refitted = TriEncoder.refitted

    def meanwhile(self: TriEncoder, *arguments: Any, **options: Any) -> TriEncoder:
        made = refitted(self, *arguments, **options)
        retriever.add_examples(NEW)
        return made

    monkeypatch.setattr(TriEncoder, "refitted", meanwhile)
    retriever.store._fitting = threading.current_thread()
    retriever.store.refit()
    assert retriever.needs_refit
    assert "call refit()" not in caplog.text


def test_an_engine_elsewhere_needs_an_empty_one(fitted: SequentialCompositionalRetriever) -> None:
    retriever = make.from_encoder(
        copy.deepcopy(fitted.store.encoder), ROWS, index=VectorStoreIndex(InMemoryVectorStore)
    )
    retriever.add_examples(NEW)
    with pytest.raises(InputError, match=r"vectors in VectorStoreIndex belong to the old fit: .* refit\(index=…\)"):
        retriever.refit()
    retriever.refit(VectorStoreIndex(InMemoryVectorStore))
    assert retriever.store.index.count() == 36
    assert retriever.invoke(NEW[1]["source"])[-1].metadata["target"] == NEW[1]["target"]


def test_too_few_to_fit_becomes_enough(caplog: pytest.LogCaptureFixture) -> None:
    retriever = make.from_examples(ROWS[:10], WordCounts(), language="functional", k=2, auto_refit=False)
    assert not retriever.needs_refit
    retriever.add_examples(ROWS[10:])
    assert retriever.needs_refit
    assert "32 examples, many of them new to the fit" in caplog.text
    retriever.refit()
    assert retriever.store.encoder.family.name == "structure"
    assert shown(retriever) == shown(make.from_examples(ROWS, WordCounts(), language="functional", k=2))
    assert not retriever.needs_refit
    with pytest.raises(InputError, match="a policy of the lexical family isn't fitted: train it again with rcr-train"):
        make.from_encoder(build(), EXAMPLES).refit()


def test_the_first_few_programs_do_not_decide_how_all_are_read() -> None:
    broken = [{"source": row["source"], "target": "count(("} for row in ROWS[:3]]
    retriever = make.from_examples(broken, WordCounts(), language="functional", k=2, auto_refit=False)
    retriever.add_examples(ROWS)
    retriever.refit()
    assert retriever.store.encoder.spec.language == "functional"
    assert shown(retriever) == shown(make.from_examples([*broken, *ROWS], WordCounts(), language="functional", k=2))
