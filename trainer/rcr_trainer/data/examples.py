"""Examples, splits into train, dev and test, and how both are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from langchain_rcr.basics.files import atomic_directory, atomic_file, write_json
from langchain_rcr.basics.items import Item, folded
from langchain_rcr.policy.manifest import MANIFEST, seal
from rcr_trainer.errors import DataError

PARTS = ("train", "dev", "test")


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its program."""

    id: str  # unique within its split; the same whenever the data are read
    source: str
    target: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The rest of its row, such as `db_id`: JSON values by name, none called id, source or target."""
    group: str | None = field(default=None, compare=False)
    """The value of the field that `data.group` names; examples are picked only for questions of their own group."""
    home: str = field(default="", compare=False)
    """The value of the field that `data.prefer` names; see `Item`."""

    @property
    def item(self) -> Item:
        """Question and program, as encoders and prompts take them."""
        return Item(self.source, self.target, self.home)

    @property
    def plain(self) -> tuple[str, str]:
        """Question and program as pairs are compared: case, spaces and Unicode's normal form don't count."""
        return " ".join(folded(self.source).split()), " ".join(folded(self.target).split())


@dataclass(slots=True)
class Split:
    """A task's examples, divided (sizes in the paper's Appendix A)."""

    name: str
    train: list[Example]  # the pool and the training questions
    dev: list[Example] = field(default_factory=list)  # for choosing settings
    test: list[Example] = field(default_factory=list)  # for reporting
    meta: dict[str, Any] = field(default_factory=dict)
    """How the split was made, and the language in which a run reads its programs; written to ``split.json``."""

    def mapped(self, change: Callable[[Example], Example]) -> Split:
        """The split with each example changed."""
        parts: dict[str, Any] = {part: [*map(change, getattr(self, part))] for part in PARTS}
        return replace(self, **parts)

    def counts(self) -> dict[str, int]:
        """The number of examples in each part."""
        return {part: len(getattr(self, part)) for part in PARTS}


def write_examples(path: str | Path, examples: Iterable[Example]) -> None:
    """Write examples as JSON lines, atomically; a `DataError` for text that is not Unicode (a lone surrogate)."""
    with atomic_file(path) as file:
        for example in examples:
            row = {"id": example.id, "source": example.source, "target": example.target, **example.fields}
            try:
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8"))
            except UnicodeEncodeError as error:
                what = f"example {example.id!r} is not Unicode text: {error.reason}"
                raise DataError(f"can't write {path}: {what}") from None


def write_split(directory: str | Path, split: Split) -> None:
    """Write a split's folder, atomically, without an empty dev.jsonl; a `DataError` if it holds other files."""
    directory = Path(directory)
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise DataError(f"can't write a split to {directory}: it isn't a plain folder")
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if foreign := sorted(found - {"split.json", MANIFEST, *(f"{part}.jsonl" for part in PARTS)}):
        raise DataError(f"{directory} holds other files ({', '.join(foreign[:3])}): give another folder")
    fixed = {"name": split.name, "counts": split.counts()}
    with atomic_directory(directory) as folder:
        for part in PARTS:
            examples = getattr(split, part)
            if examples or part != "dev":
                write_examples(folder / f"{part}.jsonl", examples)
        write_json(folder / "split.json", fixed | split.meta | fixed)
        seal(folder)


def read_text(path: Path) -> str:
    """The text in a UTF-8 file, or a `DataError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason}") from error


def read_json_as(kind: Any, path: Path, form: str, entry: str = "") -> Any:
    """The value in a JSON file, validated as a type that pydantic knows, or a `DataError` with the first fault's place.

    It calls the type `form`, and an entry of the outermost list `entry`.
    """
    text = read_text(path)
    try:
        return TypeAdapter(kind).validate_python(json.loads(text))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = "".join(f", {key if n else f'{entry}{key}'}" for n, key in enumerate(fault["loc"]))
        raise DataError(f"{path}{where}: not of {form} form: {fault['msg']}") from None
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, json.JSONDecodeError) else "too deep, or a number too long"
        raise DataError(f"{path} is not a JSON file: {reason}") from error
