"""Where a run comes from: command, git revision, versions, machine, time."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

from langchain_rcr.basics.extras import library_versions
from rcr_trainer.llm.redaction import redact
from rcr_trainer.settings import Settings

FORMAT_VERSION = 1
"""Of run.json."""


def provenance(config: Settings) -> dict[str, Any]:
    """The record that a run begins with."""
    return {
        "format_version": FORMAT_VERSION,
        "name": config.name,
        "seed": config.seed,
        "command": [redact(word) for word in sys.argv],
        "git": _git_revision(),
        "versions": library_versions(),
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
