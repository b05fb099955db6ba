"""The manifest of a checkpoint folder, of a run's data or of a training state: each file's size and SHA-256.

It is written last, so half-written files and flipped bits are noticed before they are used. It is not a signature:
whoever changes a file can change the manifest too. So whatever the digests say, nothing that a checkpoint names is
imported, fetched or opened outside its folder (SECURITY.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

from langchain_rcr.basics.files import read_json, write_json
from langchain_rcr.errors import CheckpointError

T = TypeVar("T")

MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card is the only file without a digest: it is for people, who may change it."""
FILES = ("*.json", "*.jsonl", "*.safetensors", "*.txt", "*.model", CARD)
"""What a checkpoint consists of, tokenizers included (vocab.txt, a sentencepiece model); never *.py, *.bin or *.pkl."""
_LONGEST_NAME = 255
"""Bytes that a file system allows."""
_POOL, _VECTORS = "pool.*", "pool.safetensors"
"""The examples and their vectors; without these the examples are encoded again."""


def seal(folder: Path) -> None:
    """Write the manifest of a folder. Entries of an earlier one are kept."""
    known = _listed(folder) if (folder / MANIFEST).is_file() else {}
    for name in sorted(_present(folder) - known.keys()):
        with (folder / name).open("rb") as file:
            known[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": file_digest(file, "sha256").hexdigest()}
    write_json(folder / MANIFEST, {"files": dict(sorted(known.items()))})


def stranger(folder: Path) -> str | None:
    """A file in a checkpoint's folder that was not saved with it; hidden files and the model card don't count."""
    known = {*_listed(folder), MANIFEST, CARD} if (folder / MANIFEST).is_file() else set[str]()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return next((name for path in files if (name := path.relative_to(folder).as_posix()) not in known), None)


def verify(folder: Path, *, pool: bool = False) -> None:
    """Raise a `CheckpointError` unless files are as saved: the pool's with `pool`, else all others."""
    listed = _listed(folder)
    for name in sorted(_present(folder) - listed.keys()):
        if fnmatch(name, _POOL) == pool and ("/" in name or _is_ours(name)):
            raise CheckpointError(f"{folder / name} was not saved with this checkpoint: remove it")
    for name, about in listed.items():
        file = inside(folder, name)
        if fnmatch(name, _POOL) != pool or (name == _VECTORS and not file.exists()):
            continue
        try:
            if not file.is_file():
                raise CheckpointError(f"{folder} is not a complete checkpoint: {name} is missing")
            with file.open("rb") as opened:
                found: dict[str, Any] = {"size": os.fstat(opened.fileno()).st_size}
                if found["size"] == about["size"]:
                    found |= {"sha256": file_digest(opened, "sha256").hexdigest()}
        except OSError as error:
            raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
        if found != about:
            what = f"{found['size']:,} bytes, not {about['size']:,}" if len(found) == 1 else "its SHA-256 differs"
            raise CheckpointError(f"{file} is not the file that was saved ({what}): damaged, or of another checkpoint?")


def reread(folder: Path, read: Callable[[], T]) -> T:
    """What `read` makes of a checkpoint folder; again if another process replaced it meanwhile.

    Raises:
        CheckpointError: as `read` raises it, of a folder that stayed the same.
    """
    while True:
        before = _written(folder)
        try:
            return read()
        except CheckpointError:
            if _written(folder) == before:
                raise


def _written(folder: Path) -> tuple[int, int] | None:
    """Tells whether this is still the same folder: its inode, which may be used again, and when that changed."""
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_ino, about.st_ctime_ns


def inside(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file; a `CheckpointError` if it is outside the folder or of a kind we don't write."""
    path, real = folder / name, folder.resolve()  # a circle of links is no error to realpath, unlike resolve
    # In the hub's cache, a file is a link to one of the repository's blobs.
    roots = [real, real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [real]
    sound = name.isprintable() and len(name.encode()) <= _LONGEST_NAME and _is_ours(path.name)
    if not sound or not any(map(Path(os.path.realpath(path)).is_relative_to, roots)):
        raise CheckpointError(
            f"{folder} names {name!r:.200}, which is not a file of a checkpoint, or lies outside its folder"
        )
    return path


def _is_ours(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in FILES)


def _listed(folder: Path) -> dict[str, Any]:
    """The files of the manifest, each with its size and SHA-256."""
    files = read_json(inside(folder, MANIFEST), ("files",))["files"]
    sound = isinstance(files, dict) and all(
        isinstance(about, dict) and about.keys() == {"size", "sha256"} and isinstance(about["size"], int)
        for about in files.values()
    )
    if not sound:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: not the sizes and digests of a checkpoint's files")
    return dict(files)


def _present(folder: Path) -> set[str]:
    """The files that need a digest; hidden ones don't."""
    found = set()
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(at, name).is_symlink()]
        found |= {Path(at, name).relative_to(folder).as_posix() for name in [*files, *links] if name[0] != "."}
    return found - {MANIFEST, CARD}
