"""Files of checkpoints, data and training states have digests: damage is noticed, by resuming a run, too."""

import json
from pathlib import Path

import pytest
from rcr_trainer import pipeline
from rcr_trainer.data.examples import Example, Split, write_examples, write_split
from rcr_trainer.evaluation.stage import evaluation_stage
from rcr_trainer.runs.folder import Run
from rcr_trainer.settings import Settings
from toys import lexical
from training import train_line

from langchain_rcr import CheckpointError, SequentialCompositionalRetriever
from langchain_rcr.policy.manifest import seal, verify

EXAMPLES = [{"source": f"how many {word} are there", "target": f"count({word})"} for word in "abcdefgh"]
DAMAGE = ["half", "bit", "empty", "gone"]


def checkpoint(folder: Path) -> Path:
    lexical(EXAMPLES, dim=4).save_pretrained(folder)
    write_examples(folder / "pool.jsonl", [Example(**row, id=row["target"]) for row in EXAMPLES])
    seal(folder)
    return folder


def damaged(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[40] ^= 1  # in pool.jsonl this is still JSON
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"half": content[: len(content) // 2], "bit": content, "empty": b""}[how])


def test_every_file_but_the_model_card_has_a_digest(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert listed.keys() == files - {"manifest.json", "README.md"}
    retriever = SequentialCompositionalRetriever.from_pretrained(folder)
    retriever.save(tmp_path / "saved")
    assert {"pool.jsonl", "pool.safetensors"} <= json.loads((tmp_path / "saved/manifest.json").read_text())[
        "files"
    ].keys()


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, how: str) -> None:
    folder = checkpoint(tmp_path / "c")
    for name in json.loads((folder / "manifest.json").read_text())["files"]:
        before = (folder / name).read_bytes()
        damaged(folder / name, how)
        with pytest.raises(CheckpointError) as error:
            SequentialCompositionalRetriever.from_pretrained(folder)
        assert name in str(error.value)
        assert "\n" not in str(error.value)
        (folder / name).write_bytes(before)
    verify(folder)
    verify(folder, pool=True)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {"a": {"size": "x"}}}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify(folder)


def test_a_file_that_was_put_there_is_not_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / ".DS_Store").touch()
    (folder / "figure.png").touch()
    SequentialCompositionalRetriever.from_pretrained(folder)
    for name in ("backbone.json", "query_encoder/tokenizer_config.json", "pool.safetensors"):
        (folder / name).write_text("{}")
        with pytest.raises(CheckpointError, match=f"{name} was not saved with this checkpoint: remove it"):
            SequentialCompositionalRetriever.from_pretrained(folder)
        (folder / name).unlink()


@pytest.mark.slow  # a run each
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize(
    "name", ["checkpoint/pool.jsonl", "checkpoint-sft/query_encoder/model.safetensors", "data/train.jsonl"]
)
def test_a_damaged_checkpoint_is_no_finished_run(tmp_path: Path, how: str, name: str) -> None:
    config = Settings(output=tmp_path / "run")
    run = Run.create(tmp_path / "run", config)
    checkpoint(run.checkpoint)
    checkpoint(run.sft_checkpoint)
    write_split(
        run.data, Split("split", *[[Example(**row, id=row["target"]) for row in EXAMPLES[at::2]] for at in (0, 1)])
    )
    for stage in ("data", "sft", "evaluation"):
        with run.stage(stage):
            pass
    run.finish()
    damaged(tmp_path / "run" / name, how)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=rf"{Path(name).name}.*; --overwrite starts over"):
            pipeline.run(config, resume=resume)


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_data_are_not_compared(tmp_path: Path, how: str) -> None:
    run = Run.create(tmp_path / "run", Settings(output=tmp_path / "run"))
    checkpoint(run.checkpoint)
    write_split(
        run.data, Split("split", *[[Example(**row, id=row["target"]) for row in EXAMPLES[at::2]] for at in (0, 1)])
    )
    for stage in ("data", "sft"):
        with run.stage(stage):
            pass
    damaged(run.data / "train.jsonl", how)
    with pytest.raises(CheckpointError, match=r"data.*train\.jsonl"):
        evaluation_stage(run)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_damaged_state_is_not_gone_on_from(tmp_path: Path, how: str, name: str) -> None:
    result = train_line(tmp_path / "state", rounds=2)
    assert repr(train_line(tmp_path / "state", rounds=2)) == repr(result)  # only read
    damaged(tmp_path / "state" / name, how)
    with pytest.raises(CheckpointError, match=rf"can't be resumed from: .*{name}.*; delete it to start afresh"):
        train_line(tmp_path / "state", rounds=2)
