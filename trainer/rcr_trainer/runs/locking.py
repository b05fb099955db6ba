"""The lock of a run folder: only one process writes into it."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rcr_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK = "run.lock"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a run folder, created if missing, until the block ends.

    The kernel frees the lock when its process ends, however it ends. A file system without locks (NFS has them) gets a
    warning instead.

    Raises:
        ConfigError: another process works on the run, or nothing can be written there.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: give the run another name, or output")
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror}") from None
    with file:
        _take(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} (since {now()})")
        file.flush()
        yield


def check_free(folder: Path) -> None:
    """Refuse a run folder as `hold` does if another process works on it; writes nothing."""
    if (folder / LOCK).is_file():
        with (folder / LOCK).open(encoding="utf-8") as file:
            _take(file, folder)


def _take(file: TextIO, folder: Path) -> None:
    try:
        _lock(file)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read() or "another process"
        raise ConfigError(
            f"{folder} is in use by {holder}: wait until that ends, or give this run another name"
        ) from None
    except OSError as error:
        logger.warning("%s can't be locked (%s): don't start a second run in it", folder, error.strerror)


def _lock(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 20)  # past the text, which others must be able to read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
