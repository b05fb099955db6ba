"""Where a run comes from: command, git revision, versions, machine, time."""

from __future__ import annotations

import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rcr_trainer.redaction import redact
from rcr_trainer.settings import Settings

FORMAT_VERSION = 1
"""Of run.json."""
_LIBRARIES = ("langchain-rcr", "langchain-core", "numpy", "torch", "transformers")


def provenance(config: Settings) -> dict[str, Any]:
    """The record that a run begins with."""
    versions: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(_LIBRARIES)}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return {
        "format_version": FORMAT_VERSION,
        "name": config.name,
        "seed": config.seed,
        "command": [redact(word) for word in sys.argv],
        "git": _git_revision(),
        "versions": versions,
        "platform": platform.platform(),
        "started": now(),
        "status": "running",
        "stages": {},
    }


def _git_revision() -> str | None:
    """The commit of the working directory, with "+changes" where tracked files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
