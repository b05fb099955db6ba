"""Writes files, JSON and folders atomically: to a locked temporary path beside the target, which is then renamed.

What a killed writer leaves behind isn't locked any more, so the next write of the same target removes it.
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

from langchain_rcr.errors import CheckpointError, InputError, RCRError, refusing

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` if the block ends without an error.

    Its folder is created if need be, and a symbolic link is followed.

    Raises:
        InputError: the file can't be written.
    """
    with _replacing(path, Path.touch) as (target, temporary):
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically: UTF-8, newlines as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode("utf-8", "backslashreplace"))  # half a surrogate pair, as in names of files


def read_json(path: Path, required: Sequence[str]) -> dict[str, Any]:
    """A JSON object from a checkpoint with the required keys and none twice, or a `CheckpointError`."""
    with refusing(f"{path} can't be read as JSON", CheckpointError):
        if not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path.parent} is not a complete checkpoint: {path.name} is missing")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unambiguous, parse_constant=no_number)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    if lacking := [key for key in required if key not in value]:
        raise CheckpointError(f"{path} was not written by langchain-rcr: it has no '{lacking[0]}'")
    return value


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key with two values, as another reader might take the one that wasn't checked."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found


def no_number(name: str) -> None:
    """Refuse NaN and infinity, which Python's reader would accept: its `parse_constant`."""
    raise ValueError(f"{name} is not a number in JSON")


def digest(value: Any) -> str:
    """A shortened SHA-256 of a JSON value; the order of its keys matters."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a temporary folder that replaces `path` as a whole if the block ends without an error.

    A symbolic link is followed.

    Being killed at any moment leaves the old folder or the new one, and perhaps a hidden `.NAME.…` beside it, which the
    next write removes. Only Linux can swap folders: on other systems, only the hidden one exists between two renames.

    Raises:
        InputError: `path` is a file, or nothing can be written there.
    """
    if Path(path).exists() and not Path(path).is_dir():
        raise InputError(f"{path} is a file: a folder is to be written there")
    with _replacing(path, Path.mkdir) as (target, temporary):
        try:
            yield temporary
        except RCRError as error:  # of a file within
            error.args = tuple(str(part).replace(str(temporary), str(target)) for part in error.args)
            raise
        _settle(temporary)
        _put(temporary, target)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")


@contextmanager
def _replacing(path: str | os.PathLike[str], make: Callable[[Path], None]) -> Iterator[tuple[Path, Path]]:
    """The target of a path, and a new, locked file or folder beside it, which is removed at the end if it still exists.

    File system errors become an `InputError` that names the user's path, not the temporary one.
    """
    target, lock = Path(os.path.realpath(path)), None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        while True:
            temporary = _beside(target)
            make(temporary)
            # Before it was locked, another process may have removed it as abandoned.
            with suppress(FileNotFoundError, BlockingIOError):
                lock = _lock(temporary)
                if lock is None or temporary.exists():
                    break
                os.close(lock)
        try:
            yield target, temporary
            remove_abandoned(target)
        finally:
            _remove(temporary)
            if lock is not None:
                os.close(lock)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{target} can't be written: {getattr(error, 'strerror', None) or error}") from error


def remove_abandoned(target: Path) -> None:
    """Remove what killed writers left beside the target (temporary paths without a lock), if the target exists."""
    if not target.exists():  # what is beside it may be the only copy, see `_put`
        return
    # There are several suffixes if a folder was written into a temporary one.
    ours = re.compile(rf"\.+{re.escape(target.name)}(?:\.[0-9a-f]{{8}})+")
    for path in [Path(entry) for entry in os.scandir(target.parent) if ours.fullmatch(entry.name)]:
        with suppress(OSError):
            lock = _lock(path)
            if lock is not None:
                _remove(path)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """An open handle that locks a file or folder; None if the system can't.

    Raises:
        FileNotFoundError: it is gone.
        BlockingIOError: it is locked.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None  # such as a network file system without locks
    return handle


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _settle(folder: Path) -> None:
    """Sync all files, and give them the folder's permissions: safetensors makes files readable only by their owner."""
    mode = folder.stat().st_mode & 0o666
    for entry in folder.rglob("*"):
        if entry.is_file():
            entry.chmod(mode)
        _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    if os.name == "nt":
        return  # Windows syncs neither folders nor files opened for reading
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(new: Path, target: Path) -> None:
    """Rename `new` to `target`; afterwards `new` is gone or is the old folder."""
    if not target.exists():
        new.replace(target)
    elif not _exchange(new, target):
        old = _beside(target)
        target.replace(old)
        try:
            new.replace(target)
        except OSError:
            old.replace(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step, unlike `rename`; False if the system can't."""
    with suppress(AttributeError, OSError, TypeError):
        rename = ctypes.CDLL(None).renameat2
        return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
    return False
