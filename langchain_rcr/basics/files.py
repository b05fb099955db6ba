"""Writes files, JSON and folders atomically: to a temporary path beside the target, which is then renamed.

The writer locks its temporary path. What a killed writer left has no lock any more, and the next write of the same
target removes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from langchain_rcr.errors import CheckpointError, InputError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` if the block ends without an error: temporary file, fsync, rename.

    Args:
        path: the file to write; its folder is created if it is missing. A symbolic link is followed.

    Yields:
        The open temporary file.

    Raises:
        InputError: the file can't be written there.
    """
    target = Path(os.path.realpath(path))
    with _input_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(target, Path.touch) as temporary:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        _sync(target.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically (UTF-8, newlines as they are); see `atomic_file`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, required: Sequence[str]) -> dict[str, Any]:
    """A JSON object that has the required keys.

    Raises:
        CheckpointError: the file is missing, is not JSON, has a key twice, or lacks one.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unambiguous, parse_constant=_no_number)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    lacking = [key for key in required if key not in value]
    if lacking:
        raise CheckpointError(f"{path} was not written by langchain-rcr: it has no '{lacking[0]}'")
    return value


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values for one key each reader may take another one, so that what was checked isn't what is used."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def digest(value: Any) -> str:
    """A short SHA-256 of a JSON value; the order of its keys counts."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a temporary folder that replaces `path` if the block ends without an error.

    A kill at any moment leaves the old folder or the new one, and perhaps a hidden folder `.NAME.…` beside it, which
    the next write removes. On systems that can't swap two folders (all but Linux), `path` is missing for a moment
    between two renames, while the hidden folder is the old one.

    Args:
        path: the folder to write; one that exists is replaced as a whole. A symbolic link is followed.

    Yields:
        The temporary folder, on the same file system as `path`.

    Raises:
        InputError: `path` is a file, or nothing can be written there.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise InputError(f"{path} is a file: a folder is to be written there")
    with _input_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(target, Path.mkdir) as temporary:
            yield temporary
            _settle(temporary)
            _put(temporary, target)
        _sync(target.parent)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")


@contextmanager
def _temporary(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A new file or folder beside the target, locked until the block ends; what is still there then is removed."""
    # If the target is missing, what is beside it may be the only copy: see `_put`.
    if target.exists():
        _remove_abandoned(target)
    path, lock = _made(target, make)
    try:
        yield path
        _remove_abandoned(target)
    finally:
        _remove(path)
        if lock is not None:
            os.close(lock)


def _made(target: Path, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    while True:
        path = _beside(target)
        make(path)
        # Before it was locked, another process may have taken it for abandoned.
        with suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(path)
            if lock is None or path.exists():
                return path, lock
            os.close(lock)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed writers of the target left beside it: temporary paths that nobody holds a lock on."""
    # Longer ones are those of a folder that was written into a temporary one.
    ours = re.compile(rf"\.+{re.escape(target.name)}(?:\.[0-9a-f]{{8}})+")
    for path in [Path(entry) for entry in os.scandir(target.parent) if ours.fullmatch(entry.name)]:
        with suppress(OSError):
            lock = _lock(path)
            if lock is not None:
                _remove(path)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """A handle that holds the lock of a file or folder; None if the system can't lock it.

    Raises:
        FileNotFoundError: it is gone.
        BlockingIOError: another handle holds the lock.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # A network file system without locks, say.
        os.close(handle)
        return None
    return handle


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _input_errors(target: Path) -> Iterator[None]:
    """Turn an error of the file system into an `InputError` that names the user's path, not the temporary one."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{target} can't be written: {getattr(error, 'strerror', None) or error}") from error


def _settle(folder: Path) -> None:
    """Sync every file, and give it the folder's read permissions: safetensors writes files for the owner only."""
    mode = folder.stat().st_mode & 0o666
    for entry in folder.rglob("*"):
        if entry.is_file():
            entry.chmod(mode)
        _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name == "nt":
        return  # Windows syncs neither folders nor files opened for reading.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(new: Path, target: Path) -> None:
    """Rename `new` to `target`; afterwards `new` is gone, or is the folder that was there."""
    if not target.exists():
        new.replace(target)
        return
    if _exchange(new, target):
        return
    old = _beside(target)
    target.replace(old)
    try:
        new.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, which `rename` can't do with a non-empty target; False if the system can't."""
    with suppress(AttributeError, OSError, TypeError):
        rename = ctypes.CDLL(None).renameat2
        return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
    return False
