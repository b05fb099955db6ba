"""An example, a split into train, dev and test, and the folder that a split is kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import atomic_directory, atomic_file, write_json
from langchain_rcr.basics.items import Item
from langchain_rcr.policy.manifest import MANIFEST, seal
from rcr_trainer.errors import DataError

PARTS = ("train", "dev", "test")


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its program.

    Args:
        id: unique within its split; stable from one reading of the data to the next.
        source: the question, as a user would ask it.
        target: the program that answers it.
        fields: what else its row has, such as `db_id`: JSON values by name, none called id, source or target.
        group: within which it is picked or may pick, the value of its field `data.group`; None: there are no groups.
    """

    id: str
    source: str
    target: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    group: str | None = field(default=None, compare=False)

    @property
    def item(self) -> Item:
        """Question and program, as encoders and prompts take them."""
        return Item(self.source, self.target)


@dataclass(slots=True)
class Split:
    """A task's examples, divided into train, dev and test (sizes in the paper's Appendix A).

    Args:
        name: what the split is called, e.g. ``template``.
        train: the pool that examples are picked from, and what is trained on.
        dev: for choosing settings; may be empty.
        test: for reporting.
        meta: how the split was made, and by which language a run reads its programs; written to ``split.json``.
    """

    name: str
    train: list[Example]
    dev: list[Example] = field(default_factory=list)
    test: list[Example] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """The number of examples of each part."""
        return {part: len(getattr(self, part)) for part in PARTS}


def write_examples(path: str | Path, examples: Iterable[Example]) -> None:
    """Write examples as JSON lines (UTF-8; id, source, target, their fields); the file appears whole or not at all.

    Raises:
        InputError: the file can't be written.
        DataError: a text is not Unicode (a lone surrogate).
    """
    with atomic_file(path) as file:
        for example in examples:
            row = {"id": example.id, "source": example.source, "target": example.target, **example.fields}
            try:
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
            except UnicodeEncodeError as error:
                raise DataError(
                    f"can't write {path}: example {example.id!r} is not Unicode text: {error.reason}"
                ) from None


def write_split(directory: str | Path, split: Split) -> None:
    """Write a split's folder: train.jsonl, test.jsonl, dev.jsonl unless empty, split.json, and their digests.

    Everything is written beside the folder first and put in place by renaming, so that an interrupted write
    leaves either the old split or the new one. A folder that holds anything but a split is left alone.

    Args:
        directory: the folder; made, or replaced when it holds an earlier split.
        split: what to write.

    Raises:
        DataError: the folder holds other files.
        InputError: it can't be written.
    """
    directory = Path(directory)
    _refuse_foreign(directory)
    fixed = {"name": split.name, "counts": split.counts()}
    with atomic_directory(directory) as folder:
        for part in PARTS:
            examples = getattr(split, part)
            if examples or part != "dev":
                write_examples(folder / f"{part}.jsonl", examples)
        write_json(folder / "split.json", fixed | split.meta | fixed)
        seal(folder)


def read_split(directory: str | Path) -> Split:
    """Read a folder written by `write_split`.

    Raises:
        DataError: a file is missing or damaged, or an id is in more than one part.
    """
    from rcr_trainer.data.files import read_examples

    directory = Path(directory)
    if not (directory / "split.json").is_file():
        raise DataError(f"no split at {directory}: it holds no split.json")
    meta = read_json_file(directory / "split.json")
    if not isinstance(meta, dict):
        raise DataError(f"{directory / 'split.json'} holds no JSON object")
    split = Split(str(meta.pop("name", directory.name)), [])
    owner: dict[str, str] = {}
    for part in PARTS:
        path = directory / f"{part}.jsonl"
        if path.stat().st_size if path.exists() else part != "dev":
            setattr(split, part, read_examples(path, id_key="id")[0])
        for example in getattr(split, part):
            if (other := owner.setdefault(example.id, part)) != part:
                raise DataError(f"{directory}: id {example.id!r} is in {other}.jsonl and in {part}.jsonl")
    if (counts := meta.pop("counts", split.counts())) != split.counts():
        raise DataError(f"{directory}: split.json announces {counts}, the files hold {split.counts()}")
    split.meta = meta
    return split


def read_text(path: str | Path) -> str:
    """The text in a UTF-8 file.

    Raises:
        DataError: it can't be read, or is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error.reason}") from error


def read_json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        DataError: it can't be read, or is no JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is no JSON file: {str(error).splitlines()[0]}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON file: too deep, or a number too long") from error


def _refuse_foreign(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise DataError(f"can't write a split to {directory}: it isn't a plain folder")
    known = {"split.json", MANIFEST, *(f"{part}.jsonl" for part in PARTS)}
    found = directory.iterdir() if directory.exists() else ()
    if foreign := sorted(path.name for path in found if path.name not in known):
        raise DataError(f"{directory} holds other files ({', '.join(foreign[:3])}): give another folder")
