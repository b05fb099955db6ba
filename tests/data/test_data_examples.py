from __future__ import annotations

import json
from pathlib import Path

import pytest
from rcr_trainer.data.examples import Example, Split, write_examples, write_split
from rcr_trainer.data.files import read_split
from rcr_trainer.errors import DataError


def _split() -> Split:
    train = [Example("a", "what's 'that' é 本 \u2028 ?", 'f("x")'), Example("b", "two\nlines", "g ( )")]
    return Split("toy", train, [Example("c", "s", "t")], [Example("d", "u", "v")], {"task": "toy", "seed": 3})


def test_split_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_split(tmp_path / "deep" / "toy", _split())
    back = read_split(tmp_path / "deep" / "toy")
    assert back == Split("toy", _split().train, _split().dev, _split().test, {"task": "toy", "seed": 3})
    assert json.loads((tmp_path / "deep/toy/split.json").read_text())["counts"] == {
        "train": 2,
        "dev": 1,
        "test": 1,
    }


def test_files_of_a_split(tmp_path: Path) -> None:
    split = _split()
    split.dev = []
    write_split(tmp_path / "toy", split)
    names = ["manifest.json", "split.json", "test.jsonl", "train.jsonl"]
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    assert (tmp_path / "toy/test.jsonl").read_bytes() == b'{"id": "d", "source": "u", "target": "v"}\n'


def test_writing_again_replaces_the_old_split_wholly(tmp_path: Path) -> None:
    write_split(tmp_path / "toy", _split())
    smaller = Split("toy", [Example("z", "y", "x")], [], [])
    write_split(tmp_path / "toy", smaller)
    assert read_split(tmp_path / "toy") == smaller


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"holds other files \(thesis.tex\)"):
        write_split(tmp_path, _split())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_write_leaves_the_old_split(tmp_path: Path) -> None:
    write_split(tmp_path / "toy", _split())
    broken = Split("toy", [Example("1", "half a pair \ud800", "x")], [], [])
    with pytest.raises(DataError, match="can't write"):
        write_split(tmp_path / "toy", broken)
    assert read_split(tmp_path / "toy").train == _split().train
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_examples(path, _split().test)
    before = path.read_bytes()

    def failing():
        yield Example("1", "s", "t")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_examples(path, failing())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "split.json").unlink(), "no split.json"),
        (lambda folder: (folder / "split.json").write_text("{"), "is not a JSON file"),
        (lambda folder: (folder / "split.json").write_text("9" * 5_000), "is not a JSON file: .* a number too long"),
        (lambda folder: (folder / "split.json").write_text("[]"), "not of a split's form"),
        (lambda folder: (folder / "train.jsonl").unlink(), "no such file"),
        (lambda folder: (folder / "dev.jsonl").unlink(), "announces"),
        (
            lambda folder: (folder / "dev.jsonl").write_bytes((folder / "test.jsonl").read_bytes()),
            "id 'd' is in dev.jsonl and in test.jsonl .without data.id_key, rows are numbered",
        ),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, damage, message: str) -> None:
    write_split(tmp_path / "toy", _split())
    damage(tmp_path / "toy")
    with pytest.raises(DataError, match=message) as caught:
        read_split(tmp_path / "toy")
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no split at .*: it holds no split\.json"):
        read_split(tmp_path / "nowhere")


def test_an_empty_part_comes_back_empty(tmp_path: Path) -> None:
    write_split(tmp_path / "toy", Split("toy", [Example("1", "s", "t")], [], []))
    assert read_split(tmp_path / "toy").test == []
