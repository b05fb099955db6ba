"""SequentialCompositionalRetriever.from_pretrained: run folders, checkpoint folders, and what is wrong with others."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from rcr_trainer.data.examples import Example, write_examples
from toys import lexical, reseal

from langchain_rcr import (
    CheckpointError,
    ExamplePool,
    InputError,
    Item,
    PoolError,
    SequentialCompositionalRetriever,
)
from langchain_rcr.pool.saved import read_jsonl, write_jsonl

EXAMPLES = [
    {"source": f"what is the {word} of texas", "target": f"answer({word}(texas))"}
    for word in ("capital", "area", "population", "density", "border")
]
QUERY = "what is the area and the population of texas"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    encoder = lexical(EXAMPLES, dim=32, seed=1)
    encoder.save_pretrained(tmp_path / "run" / "checkpoint")
    write_jsonl(tmp_path / "run" / "checkpoint" / "pool.jsonl", ExamplePool(EXAMPLES, ids=list("abcde")))
    reseal(tmp_path / "run" / "checkpoint")
    return tmp_path / "run"


def test_a_run_and_its_checkpoint_give_the_same(run: Path) -> None:
    one = SequentialCompositionalRetriever.from_pretrained(run, k=3)
    two = SequentialCompositionalRetriever.from_pretrained(str(run / "checkpoint"), k=3)
    assert one.invoke(QUERY) == two.invoke(QUERY)
    assert {document.id for document in one.invoke(QUERY, k=5)} == set("abcde")
    assert one.select_examples({"source": QUERY})[0] in EXAMPLES


def test_what_was_saved_picks_as_it_did(run: Path) -> None:
    encoder = lexical(EXAMPLES, dim=32, seed=1)
    before = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list("abcde"))
    again, expected = SequentialCompositionalRetriever.from_pretrained(run).invoke(QUERY), before.invoke(QUERY)
    assert [pick.id for pick in again] == [pick.id for pick in expected]
    logits = [pytest.approx(pick.metadata["logit"], rel=1e-5) for pick in expected]
    assert [pick.metadata["logit"] for pick in again] == logits


def test_the_file_that_the_trainer_writes_is_read(tmp_path: Path) -> None:
    write_examples(tmp_path / "pool.jsonl", [Example("a", "où {x}\u2028y", "f(x)"), Example("7", "b", '{"c": 1}')])
    pool = read_jsonl(tmp_path / "pool.jsonl")
    assert pool.ids == ("a", "7")
    assert pool.items() == [Item("où {x}\u2028y", "f(x)"), Item("b", '{"c": 1}')]


def test_own_examples_take_the_place_of_the_stored_ones(run: Path) -> None:
    (run / "checkpoint" / "pool.jsonl").unlink()
    rows = [{"q": "area", "sql": "1"}, {"q": "capital", "sql": "2"}]
    retriever = SequentialCompositionalRetriever.from_pretrained(
        run, examples=rows, ids=["x", "y"], k=1, source_key="q", target_key="sql", mask_same_program=True
    )
    assert retriever.mask_same_program
    assert retriever.invoke("capital")[0].id == "y"


def test_bad_arguments_are_named(run: Path) -> None:
    with pytest.raises(PoolError, match=r"examples\[0\] has no 'target' .*; source_key and target_key say"):
        SequentialCompositionalRetriever.from_pretrained(run, examples=[{"source": "x"}])
    with pytest.raises(InputError, match="ids were given without examples"):
        SequentialCompositionalRetriever.from_pretrained(run, ids=["a"])
    with pytest.raises(InputError, match="k must be greater than or equal to 1, not 0"):
        SequentialCompositionalRetriever.from_pretrained(run, k=0)


def _one_line(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SequentialCompositionalRetriever.from_pretrained(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'} is not a checkpoint: no such folder" in _one_line(tmp_path / "nowhere")


def test_a_foreign_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "tri_encoder.json is missing" in _one_line(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("closed", ["checkpoint", "checkpoint/query_encoder", "checkpoint/README.md"])
def test_what_may_not_be_read_is_named(run: Path, closed: str) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:  # others may not look into tmp_path
        folder = Path(shutil.copytree(run, Path(name) / "run"))
        Path(name).chmod(0o755)
        (folder / closed).chmod(0)
        try:
            if root:
                os.seteuid(65534)  # root may read anything
            for where in (folder, folder / "checkpoint"):
                with pytest.raises(CheckpointError, match="Permission denied"):
                    SequentialCompositionalRetriever.from_pretrained(where)
        finally:
            if root:
                os.seteuid(0)
            (folder / closed).chmod(0o755)


def test_a_checkpoint_without_pool_says_what_to_pass(run: Path) -> None:
    (run / "checkpoint" / "pool.jsonl").unlink()
    assert _one_line(run).endswith("has no pool.jsonl: pass examples=…, or the engine that holds them as index=…")


def test_a_damaged_pool_is_named_by_line(run: Path) -> None:
    with (run / "checkpoint" / "pool.jsonl").open("a", encoding="utf-8") as file:
        file.write("{oops\n")
    assert "pool.jsonl is not the file that was saved (4" in _one_line(run)
    reseal(run / "checkpoint")
    assert "pool.jsonl, line 6: not JSON" in _one_line(run)


def test_missing_weights_are_named(run: Path) -> None:
    weights = sorted((run / "checkpoint").rglob("*.safetensors"))[0]
    weights.unlink()
    assert weights.name in _one_line(run)


def test_a_newer_format_is_refused(run: Path) -> None:
    file = run / "checkpoint" / "tri_encoder.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"format_version": 99}), encoding="utf-8")
    assert "99" in _one_line(run)
