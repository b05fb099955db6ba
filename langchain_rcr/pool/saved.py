"""What a saved folder holds beside the encoder: the examples, their vectors, and the retriever's fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import read_json
from langchain_rcr.errors import CheckpointError, InputError, PoolError
from langchain_rcr.families.untrusted import refusing
from langchain_rcr.policy.manifest import inside, verify
from langchain_rcr.pool.examples import ExamplePool
from langchain_rcr.pool.jsonl import read_jsonl

CHECKPOINT_FOLDER = "checkpoint"
"""Where a run folder keeps its checkpoint."""

POOL_FILE = "pool.jsonl"
"""The examples of a checkpoint."""

VECTORS_FILE = "pool.safetensors"
"""Their vectors, where a store was saved."""


RETRIEVER_FILE = "retriever.json"
"""The keys of question and program, and the retriever's own fields, where one was saved."""


def checkpoint_folder(path: Path) -> Path:
    """The checkpoint in a run folder, or the folder itself; a `CheckpointError` if there is none."""
    folder = path / CHECKPOINT_FOLDER
    if folder.is_dir():
        return folder
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder: give a run folder of rcr-train, a checkpoint folder or hub:ORG/NAME"
        )
    return path


def stored_fields(folder: Path) -> dict[str, Any]:
    """What `save` kept of a retriever: `source_key`, `target_key` and its `fields`; empty where none was saved."""
    if not (folder / RETRIEVER_FILE).is_file():
        return {"fields": {}}
    file = inside(folder, RETRIEVER_FILE)
    found = read_json(file, ("source_key", "target_key", "fields"))
    with refusing(f"{file} is damaged", CheckpointError):
        ExamplePool(source_key=found["source_key"], target_key=found["target_key"])
        if not (isinstance(found["target_key"], str) and isinstance(found["fields"], dict)):
            raise InputError("not the keys and fields of a retriever")
    return found


def stored_pool(folder: Path, source_key: str | Sequence[str], target_key: str) -> ExamplePool:
    """The examples of a checkpoint folder; a `CheckpointError` if there are none, or one lacks these keys."""
    file = inside(folder, POOL_FILE)
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {POOL_FILE}: pass examples=…, or the engine that holds them as index=…")
    verify(folder, pool=True)
    try:
        return read_jsonl(file, source_key=source_key, target_key=target_key)
    except PoolError as error:
        hint = "; source_key= and target_key= name other fields" if " has no '" in str(error) else ""
        raise CheckpointError(f"{error}{hint}") from error
