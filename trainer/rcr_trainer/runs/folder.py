"""A run folder: its settings, provenance and results, which stages are done, and its lock.

    config.yaml       the resolved settings
    run.json          seed, command, git revision, versions, times, status, finished stages
    data/             the split that the run uses (`rcr_trainer.data.files.read_split`)
    metrics.jsonl     one JSON object a line: stage, step, time and the metrics
    state/            what an unfinished training stage needs to resume after a kill
    checkpoint/       the trained policy and pool.jsonl, its candidates
    checkpoint-sft/   with GRPO only: the policy that SFT left, from which GRPO began
    evaluation.json   the comparison
    picks.jsonl       for each question and selector its picks, what they cover, the answer (`evaluation.report`)
    report.md         all of this in Markdown
    run.lock          the process that works on the run, or worked on it last (`hold`)

A stage counts only once run.json says so, which is written after the stage's files are in place. So after a crash at
any moment, the folder is either as before the stage or as after it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from langchain_rcr.basics.extras import library_versions
from langchain_rcr.basics.files import read_json, remove_abandoned, write_json, write_text
from langchain_rcr.errors import CheckpointError
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.redaction import redact
from rcr_trainer.runs.layers import SPENDING, differences, run_config, settings, to_yaml
from rcr_trainer.settings import Settings

if TYPE_CHECKING:
    from langchain_rcr.families.backbone import Known

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_RESULTS = (
    *("data", "metrics.jsonl", "state", "checkpoint", "checkpoint-sft"),
    *("evaluation.json", "picks.jsonl", "report.md"),
)
_FORMAT_VERSION = 1
"""Of run.json."""
INCIDENTAL = (
    *("name", "output", "threads"),
    *("llm.api_key_env", "llm.timeout", "llm.concurrency", "llm.attempts", "llm.backoff", "llm.cache"),
    *SPENDING,
)
"""Settings that change no result: a run may be resumed with other values, such as a larger budget."""


class Run:
    """One run folder, from `create` or `open`.

    Attributes:
        writes: whether this object writes into the folder; False if another process does.
        foreign: the settings whose values come from the folder, not the caller: see `rcr_trainer.runs.trust`.
        vectors: frozen text vectors, so that the base model reads every text only once across stages.
    """

    def __init__(self, path: Path, config: Settings, record: dict[str, Any]) -> None:
        self.path, self.config, self._record = path, config, record
        self.data, self.state = path / "data", path / "state"
        self.checkpoint, self.sft_checkpoint = path / "checkpoint", path / "checkpoint-sft"
        self.writes, self.foreign = True, frozenset[str]()
        self.vectors: Known = {}

    @classmethod
    def create(cls, folder: Path, config: Settings, *, resume: bool = False, overwrite: bool = False) -> Run:
        """Begin a run in a new folder, or continue the one that is there. The caller holds the folder (`hold`).

        A finished run of the same settings keeps its stages, so that only missing ones remain. `resume` continues an
        interrupted run; `overwrite` starts over in the folder of an earlier run, whose results are cleared. Without
        them, such a folder is a `ConfigError`, as is always one that holds something else or a run of other settings.
        """
        run = cls.found(folder, config, resume=resume, overwrite=overwrite)
        if run is None:
            record = {
                "format_version": _FORMAT_VERSION,
                "name": config.name,
                "seed": config.seed,
                "command": [redact(word) for word in sys.argv],
                "git": _git_revision(),
                "versions": library_versions(),
                "platform": platform.platform(),
                "started": _now(),
                "status": "running",
                "stages": {},
            }
            run = cls(folder, config, record)
            run._save()
            for name in _RESULTS:
                _remove(folder / name)
        for stage in ("sft", "grpo"):
            remove_abandoned(run.state / stage)
        run.config = config
        # Last: until its results are cleared, an earlier run's folder has that run's settings.
        write_text(folder / "config.yaml", to_yaml(config))
        return run

    @classmethod
    def found(cls, folder: Path, config: Settings, *, resume: bool, overwrite: bool) -> Run | None:
        """The run that `create` would continue; None if it would begin one. Raises as it does; writes nothing."""
        names = names_in(folder)
        nothing_to_lose = not {"checkpoint", "state"} & names and not resume
        if overwrite or nothing_to_lose or not {"run.json", "config.yaml"} <= names:
            return None
        run = cls.open(folder, trust=True)
        changed = differences(run.config, config, ignore=INCIDENTAL)
        if changed:
            what = f"with other settings: {in_short(changed)}; give this one another name, or --overwrite"
            raise ConfigError(f"{folder} holds a run {what}")
        if run.status != "finished" and not resume:
            raise ConfigError(
                f"{folder} holds a run that was not finished: --resume continues it, --overwrite starts over"
            )
        return run

    @classmethod
    def open(cls, path: str | Path, *, flags: Mapping[str, str] | None = None, trust: bool = False) -> Run:
        """Open an existing run: a run folder, or the checkpoint folder inside one.

        Args:
            path: the folder.
            flags: settings that override those written there, as `load_config` takes them.
            trust: whether what is written there counts as the caller's own word; see `rcr_trainer.runs.trust`.

        Raises:
            CheckpointError: it is no run, is damaged, was written by a newer version or, without `trust`, has links
                that lead outside.
        """
        path = Path(path)
        inside = path.name == "checkpoint" and not (path / "run.json").exists()
        folder = path.parent if inside else path
        for entry in () if trust else folder.rglob("*"):
            # Reading would show its target, writing results would replace it.
            if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(folder.resolve()):
                raise CheckpointError(
                    f"{entry} is a link to a place outside of the run: --trust allows that in a run of your own"
                )
        if not (folder / "run.json").is_file():
            reason = f"neither a run folder nor its checkpoint: there is no {folder / 'run.json'}"
            raise CheckpointError(f"{path} is {reason if folder.is_dir() else 'not a run: no such folder'}")
        record = read_json(folder / "run.json", ("format_version", "stages", "status"))
        if (written := record["format_version"]) != _FORMAT_VERSION:
            raise CheckpointError(
                f"{folder / 'run.json'} has format {written}, this version reads {_FORMAT_VERSION}: "
                "upgrade langchain-rcr"
            )
        if not isinstance(record["stages"], dict):
            raise CheckpointError(f"{folder / 'run.json'} is damaged: not the record of a run")
        if not (folder / "config.yaml").is_file():
            raise CheckpointError(f"{folder} is damaged: config.yaml is missing")
        run = cls(folder, run_config(folder / "config.yaml", flags), record)
        if not trust:
            run.foreign = frozenset(settings().keys() - (flags or {}).keys())
        return run

    @property
    def status(self) -> str:
        """running, finished, failed or interrupted; a killed run stays at running."""
        return str(self._record["status"])

    def done(self, stage: str) -> bool:
        """Whether a stage is finished."""
        return stage in self._record["stages"]

    @contextmanager
    def stage(self, name: str, **about: int) -> Iterator[None]:
        """Run a stage: it counts as done when the block ends without an error.

        A finished run stays finished while a stage is repeated or added. `about` is written into run.json.
        """
        self._set_status("running")
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._set_status("interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed")
            raise
        seconds = round(time.perf_counter() - began, 2)
        self._record["stages"][name] = {"finished": _now(), "seconds": seconds, **about}
        self._save()
        if self.writes:
            _remove(self.state)

    def repeat(self, stage: str, config: Settings) -> None:
        """Mark a stage to be done again, under other settings, which become the run's."""
        self._record["stages"].pop(stage, None)
        self._save()
        self.config = config
        write_text(self.path / "config.yaml", to_yaml(config))

    def finish(self) -> None:
        """Mark the run as finished: every stage that was asked for is done."""
        self._set_status("finished")

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append metrics, measured after a step of a stage, to metrics.jsonl."""
        if not self.writes:
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        line = {"stage": stage, "step": step, "time": round(time.time(), 3), **finite}
        path = self.path / "metrics.jsonl"
        # A kill may have cut off the last line.
        with path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            lead = b"" if file.read() in (b"", b"\n") else b"\n"
            file.write(lead + json.dumps(line).encode() + b"\n")

    def drop_metrics(self, stage: str) -> None:
        """Drop what was logged for a stage, before it starts over, and lines cut off by a kill."""
        if not self.writes:
            return
        path, kept = self.path / "metrics.jsonl", list[str]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if json.loads(line)["stage"] != stage:
                    kept.append(f"{line}\n")
        write_text(path, "".join(kept))

    def _set_status(self, status: str) -> None:
        if self.status != "finished":
            self._record["status"] = status
            self._save()

    def _save(self) -> None:
        if self.writes:
            write_json(self.path / "run.json", self._record)


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
        with suppress(OSError):  # a full disk is told by the next file, with its name
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()} (since {_now()})".encode())
        yield


def check_free(folder: Path) -> None:
    """Refuse a run folder as `hold` does if another process works on it; writes nothing."""
    if (folder / LOCK).is_file():
        with (folder / LOCK).open(encoding="utf-8") as file:
            _take(file, folder)


def _take(file: TextIO, folder: Path) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 20)  # past the text, which others must be able to read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read() or "another process"
        raise ConfigError(
            f"{folder} is in use by {holder}: wait until that ends, or give this run another name"
        ) from None
    except OSError as error:
        logger.warning("%s can't be locked (%s): don't start a second run in it", folder, error.strerror)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git_revision() -> str | None:
    """The commit of the working directory, with "+changes" where tracked files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None


def names_in(folder: Path) -> set[str]:
    """The names in a folder that is or may become a run's."""
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    # run.json alone means killed at the start, so there is nothing to lose.
    others = any(name not in ("run.json", LOCK) and not name.startswith(".") for name in names)
    if others and not {"run.json", "config.yaml"} <= names:
        raise ConfigError(f"{folder} is not empty and no run folder: give the run another name, or output")
    return names


def in_short(changed: Sequence[str]) -> str:
    """The first two differences, and how many more there are."""
    return ", ".join(changed[:2]) + (f" and {len(changed) - 2} more" if len(changed) > 2 else "")


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
