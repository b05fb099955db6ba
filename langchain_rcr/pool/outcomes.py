"""An append-only log of what questions got and what came of it, from which `rcr-train learn` learns."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from glob import escape
from itertools import chain
from numbers import Real
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter
from pydantic_core import from_json

from langchain_rcr.basics.files import digest
from langchain_rcr.errors import InputError

_BEGINS = '{"time": '
"""How lines begin; within a line, quotes are escaped."""
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A question, its picks and what came of them."""

    __pydantic_config__ = _STRICT
    time: str  # of writing; with it, the same line twice is one question
    question: str  # its digest (`basics.files.digest`)
    picks: tuple[str, ...]  # the ids of its examples, in the order of picking
    # Those with which each was drawn from what was left (1.01: rounding); None if not computed.
    probabilities: tuple[Annotated[float, Field(ge=0, lt=1.01)] | None, ...]
    outcome: FiniteFloat | None  # the larger, the better; None: not known
    explore: FiniteFloat  # the retriever's setting when it picked
    policy: str  # the fingerprint of its encoder
    run: str | None = None  # an id under which the outcome may come later
    text: str | None = None  # the question, if the log may hold it


@dataclass(frozen=True, slots=True)
class _Later:
    """An outcome for a run recorded before."""

    __pydantic_config__ = _STRICT
    time: str
    run: str
    outcome: FiniteFloat | None


_LINE = TypeAdapter[Outcome | _Later](Outcome | _Later)


@dataclass(frozen=True, slots=True, init=False)
class OutcomeLog:
    """A JSON Lines file of outcomes that several threads and processes may append to.

    A line has no text, only ids of examples and a digest of the question, which those who know it can recognise.

    Args:
        path: the file. A full one is renamed NAME.TIME.
        text: write the questions too. Without them, learning needs a file that has them.
        max_bytes: the size at which a file is full.
        keep: how many full ones are kept; the oldest go.
    """

    path: Path
    text: bool
    max_bytes: int
    keep: int

    def __init__(self, path: str | Path, text: bool = False, max_bytes: int = 50_000_000, keep: int = 20) -> None:
        for name, value in zip(OutcomeLog.__slots__, (Path(path).absolute(), text, max_bytes, keep), strict=True):
            object.__setattr__(self, name, value)

    def record(
        self,
        question: str,
        picks: Sequence[tuple[Any, Any, Any]],
        outcome: float | None,
        *,
        run: str | None = None,
        policy: str = "",
        explore: float = 0.0,
    ) -> None:
        """Append a question; `picks` has id, step and probability of each pick, in any order.

        Raises:
            InputError: the outcome is not a finite number, a pick has no id or step, or the file can't be written.
        """
        if wrong := [one for one in picks if not isinstance(one[0], str) or not isinstance(one[1], int)]:
            raise InputError(f"not a pick of this retriever: id {wrong[0][0]!r:.80}, step {wrong[0][1]!r:.80}")
        ids, _, probabilities = zip(*sorted(picks, key=itemgetter(1)), strict=True) if picks else ((), (), ())
        known = checked_outcome(outcome)
        self._append(Outcome(_now(), digest(question), ids, probabilities, known, explore, policy, run, question))

    def outcome(self, run: str | None, outcome: float) -> None:
        """Append the outcome of a question recorded before, by its run; the last one counts.

        Raises:
            InputError: there is no run, the outcome is not a finite number, or the file can't be written.
        """
        if not run:
            raise InputError(f"an outcome comes later by the run that was recorded, not by {run!r}: record(…, run=…)")
        self._append(_Later(_now(), str(run), checked_outcome(outcome)))

    def read(self) -> Iterator[Outcome]:
        """What was recorded, oldest first, each with its last outcome; a line that is there twice counts once.

        Raises:
            InputError: there is no such file, or a line isn't an outcome; the message names it.
        """
        newest = [*_lines(self.path)]  # first: if a writer renames it meanwhile, its lines are there twice
        full = self._full()
        if not (newest or full or self.path.is_file()):
            raise InputError(f"{self.path}: there is no such log")
        lines = [*dict.fromkeys((*chain.from_iterable(map(_lines, full)), *newest))]
        later = dict[str | None, float | None]((each.run, each.outcome) for each in lines if isinstance(each, _Later))
        for line in lines:
            if isinstance(line, Outcome):
                yield replace(line, outcome=later.get(line.run, line.outcome))

    def _append(self, line: Outcome | _Later) -> None:
        values = {name: getattr(line, name) for name in line.__slots__ if name != "text" or self.text}
        content = (json.dumps(values, ensure_ascii=False) + "\n").encode()
        try:
            with suppress(FileNotFoundError):  # there is none yet, or another writer has just renamed it
                if self.path.stat().st_size + len(content) > self.max_bytes:
                    self._rotate()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                if file.write(content) < len(content):  # in one call, so that lines of several writers don't mix
                    raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            raise InputError(f"{self.path} can't be written: {error.strerror or error}") from error

    def _rotate(self) -> None:
        # If two writers both find it full, the second renames what the first has begun: no line is lost.
        self.path.replace(self.path.with_name(f"{self.path.name}.{time.time_ns()}"))
        full = self._full()
        for old in full[: max(0, len(full) - self.keep)]:
            old.unlink(missing_ok=True)

    def _full(self) -> list[Path]:
        found = self.path.parent.glob(f"{escape(self.path.name)}.*")
        return sorted(path for path in found if path.suffix[1:].isdigit() and path.is_file())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def checked_outcome(outcome: float | None) -> float | None:
    """The outcome as a float; an `InputError` if it is not a finite number."""
    if outcome is None:
        return None
    if not isinstance(outcome, Real | np.bool_) or not abs(outcome) <= sys.float_info.max:
        raise InputError(f"an outcome must be a finite number, not {outcome!r:.80}")
    return float(outcome)


def _lines(file: Path) -> Iterator[Outcome | _Later]:
    """The lines of a file, none if it is gone or a folder."""
    # A letter may be cut off, too.
    with suppress(FileNotFoundError, IsADirectoryError), file.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, start=1):
            found = None
            with suppress(ValueError, AttributeError, KeyError, TypeError):
                # What is before it was cut off by a full disk.
                found = _LINE.validate_python(from_json(text[max(0, text.rfind(_BEGINS)) :]))
            if isinstance(found, _Later) or (found and len(found.picks) == len(found.probabilities)):
                yield found
            elif text.endswith("\n") or text[: len(_BEGINS)] != _BEGINS[: len(text)]:  # else it is cut off
                raise InputError(f"{file}, line {number}: not a line of an outcome log")
