"""Puts answers on disk before they are used, and a budget that holds across runs and processes, in one SQLite file."""

from __future__ import annotations

import math
import operator
import os
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from rcr_trainer.errors import DataError
from rcr_trainer.llm.faults import BudgetExceeded
from rcr_trainer.llm.settings import LLMSettings

if sys.platform != "win32":
    import fcntl

_APPLICATION = 0x52435243  # "RCRC"
_VERSION = 1
_SCHEMA = (
    """CREATE TABLE answers (
        key BLOB PRIMARY KEY, model TEXT NOT NULL, text TEXT, reason TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE spent (
        account TEXT PRIMARY KEY,
        calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
    ) WITHOUT ROWID""",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)
_WAIT_S = 60.0
"""Seconds to wait while another process writes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt.

    Attributes:
        text: what the model wrote; None if nothing.
        reason: why `text` isn't a whole answer: "empty", "refused", "truncated" (it reached the length limit),
            "tool_call" (and nothing else), "malformed" (the response was no answer) or "too_long" (the prompt was).
        prompt_tokens, completion_tokens: read and written, as the server reports them, else counted.
        cached: whether it was on disk before this call.
        program: the program in the text; None if there is none. Not stored, but parsed each time.
    """

    text: str | None
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False
    program: str | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Calls, and the tokens they read and wrote."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Use) -> Use:
        return Use(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Use) -> Use:
        return Use(*map(operator.sub, astuple(self), astuple(other)))


class AnswerCache:
    """An SQLite file of answers, keyed by a digest of model, parameters and prompt, and of each account's spending.

    Several processes may share it, and it survives a kill at any moment. Prompts aren't stored. Thread-safe, except for
    claims. `path` is created if missing, and `path`.lock beside it; None: in memory. It can't be on a network file
    system, where SQLite can't rely on locks. A file that is no such cache, or can't be opened, is a `DataError`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._lock = threading.RLock()
        with self._access():
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            file = ":memory:" if self.path is None else self.path
            self._database = sqlite3.connect(
                file, timeout=_WAIT_S, isolation_level="IMMEDIATE", check_same_thread=False
            )
            try:
                self._prepare()
                shared = self.path is not None and sys.platform != "win32"
                self._claims = Path(f"{self.path}.lock").open("ab") if shared else None  # noqa: SIM115
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        # While another process switches to the write-ahead log, SQLite fails at once instead of waiting.
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                return self._create_tables()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _create_tables(self) -> None:
        with self._database:
            # Lock before looking, or a second process could find tables that don't have their mark yet.
            self._database.execute("BEGIN IMMEDIATE")
            application = self._number("PRAGMA application_id")
            if application != _APPLICATION and (application or self._number("SELECT count(*) FROM sqlite_master")):
                raise DataError(f"{self.path} is an SQLite file of another program: choose another path for the cache")
            if self._number("PRAGMA user_version") > _VERSION:
                raise DataError(f"{self.path} was written by a newer version of langchain-rcr: choose another path")
            for statement in _SCHEMA if application != _APPLICATION else ():
                self._database.execute(statement)
        self._database.execute("PRAGMA journal_mode = WAL")
        # FULL: once its transaction has ended, an answer survives even a power cut.
        self._database.execute("PRAGMA synchronous = FULL")

    def claim(self, keys: Iterable[bytes]) -> bool:
        """Claim the right to ask for these answers until `release`; False if another process has claimed one of them.

        A claim is a lock on one byte of a file, which the kernel frees when the process ends, however it ends.
        """
        if self._claims is None:
            return True
        try:
            for key in keys:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key))
        except (BlockingIOError, PermissionError):
            self.release(keys)
            return False
        return True

    def release(self, keys: Iterable[bytes]) -> None:
        """Let other processes ask for these answers."""
        if self._claims is not None:
            for key in keys:
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _place(key))

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Answer]:
        """The answers that are there, marked as cached."""
        query = "SELECT text, reason, prompt_tokens, completion_tokens FROM answers WHERE key = ?"
        with self._access():
            rows = [(key, self._database.execute(query, (key,)).fetchone()) for key in keys]
        return {key: replace(Answer(*row), cached=True) for key, row in rows if row is not None}

    def put(
        self, model: str, answers: Mapping[bytes, Answer], account: str, used: Use
    ) -> tuple[dict[bytes, Answer], Use]:
        """Write answers and what they cost an account in one transaction; all is on disk when this returns.

        If another process was first, its answer stays, so that both continue with the same one: returns the answers as
        the file now has them, and all that the account has spent. The model's name is for people who look into it.
        """
        rows = [
            (key, model, answer.text, answer.reason, answer.prompt_tokens, answer.completion_tokens)
            for key, answer in answers.items()
        ]
        with self._access(), self._database:
            added = self._database.executemany(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", rows
            )
            stored = dict(answers) if added.rowcount == len(rows) else self.get(answers)
            self._database.execute(
                "INSERT INTO spent VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, "
                "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "completion_tokens = completion_tokens + excluded.completion_tokens",
                (account, used.calls, used.prompt_tokens, used.completion_tokens),
            )
            return stored, self.spent(account)

    def spent(self, account: str) -> Use:
        """All that an account has spent, including earlier runs."""
        query = "SELECT calls, prompt_tokens, completion_tokens FROM spent WHERE account = ?"
        with self._access():
            return Use(*(self._database.execute(query, (account,)).fetchone() or ()))

    def __len__(self) -> int:
        with self._access():
            return self._number("SELECT count(*) FROM answers")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()
            if self._claims is not None:
                self._claims.close()

    def _number(self, query: str) -> int:
        return int(self._database.execute(query).fetchone()[0])

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Let in one thread at a time; errors name the file."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"the cache of answers {self.path or 'in memory'} can't be used: {error}") from error


def _place(key: bytes) -> int:
    """A key's byte in the file of claims, which holds nothing."""
    return int.from_bytes(key[:7])


def check_cache(path: Path) -> None:
    """Find now what `AnswerCache` would refuse later, without creating a file."""
    if path.exists():
        AnswerCache(path).close()
        return
    there = next(each for each in path.absolute().parents if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "can't be written" if there.is_dir() else "is not a folder"
        raise DataError(f"the cache of answers {path} can't be used: {there} {what}")


class Budget:
    """What may be spent: the worst case of a call is reserved before it is made."""

    def __init__(self, settings: LLMSettings, spent: Use) -> None:
        self._settings, self.spent = settings, spent
        self.reserved = Use()  # of the calls that are running

    def fits(self, worst: Use) -> bool:
        """Whether a call that uses at most `worst` can't exceed the budget, whatever the running calls cost."""
        total = self.spent + self.reserved + worst
        # Allow for rounding, so that cents that add up to the limit fit.
        return all(used <= most * (1 + 1e-9) + 1e-12 for _, most, used in limits(self._settings, total))

    def exceeded(self, name: str) -> BudgetExceeded:
        """What to raise if the next call of the model `name` doesn't fit."""
        spent, units = self.spent, {"calls": "{:,} calls", "tokens": "{:,} tokens", "money": "${:,.4f}"}
        said = ", ".join(units[what].format(most) for what, most, _ in limits(self._settings, spent))
        money = self._settings.money(spent.prompt_tokens, spent.completion_tokens)
        return BudgetExceeded(
            f"the budget of {said} could be exceeded by the next call of {name!r} (spent: "
            f"{spent.calls:,} calls, {spent.tokens:,} tokens{'' if money is None else f', ${money:,.4f}'}); "
            "all answers are kept: raise it and resume"
        )


def limits(settings: LLMSettings, use: Use) -> Iterator[tuple[str, float, float]]:
    """Each budget that is set: calls, tokens or money, its limit, and what `use` takes of it."""
    money = settings.money(use.prompt_tokens, use.completion_tokens)
    for what, used in (("calls", use.calls), ("tokens", use.tokens), ("money", money)):
        most = getattr(settings, f"budget_{what}")
        if most is not None and used is not None:
            yield what, most, used


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that calls cost, with every answer at its longest."""

    use: Use
    money: float | None  # dollars; None without prices
    exact: bool  # the model's own tokenizer counted the prompts; else each byte counts as a token

    def __add__(self, other: Estimate) -> Estimate:
        money = None if self.money is None or other.money is None else self.money + other.money
        return Estimate(self.use + other.use, money, self.exact and other.exact)

    def __str__(self) -> str:
        money = "" if self.money is None else f", ${math.ceil(100 * self.money - 1e-9) / 100:,.2f}"
        note = "" if self.exact else " (a token for each byte of a prompt; real use is about a third)"
        tokens = f"{self.use.prompt_tokens:,} prompt and {self.use.completion_tokens:,} completion tokens"
        return f"at most {self.use.calls:,} calls, {tokens}{money}{note}"


@dataclass(slots=True)
class Stats:
    """Counts since a model was opened."""

    settings: LLMSettings
    nominal: int = 0  # prompts handed in
    distinct: int = 0  # different ones among them
    cached: int = 0  # prompts answered from disk
    paid: int = 0  # different prompts that the model answered
    used: Use = field(default_factory=Use)  # for those, and what failed attempts may have cost
    counted: int = 0  # answers whose tokens were counted here, as the server didn't report them
    retries: Counter[str] = field(default_factory=Counter)  # attempts that failed and were repeated, by reason
    failures: Counter[str] = field(default_factory=Counter)  # prompts without a program, each time, by `Answer.reason`
    peak: int = 0  # most calls running at the same time

    @property
    def money(self) -> float | None:
        """Dollars spent; None without prices."""
        return self.settings.money(self.used.prompt_tokens, self.used.completion_tokens)

    def figures(self) -> dict[str, float]:
        """All of it for a metrics file, with a figure for each reason (`no_program_truncated`)."""
        found: dict[str, float] = {
            "nominal_calls": self.nominal,
            "distinct_calls": self.distinct,
            "distinct_share": round(self.distinct / self.nominal, 4) if self.nominal else 1.0,
            "cached": self.cached,
            "paid_calls": self.paid,
            "prompt_tokens": self.used.prompt_tokens,
            "completion_tokens": self.used.completion_tokens,
            "counted": self.counted,
            "peak_concurrency": self.peak,
        }
        if self.money is not None:
            found["money"] = self.money
        found |= {f"retries_{reason}": count for reason, count in self.retries.items()}
        found |= {f"no_program_{reason}": count for reason, count in self.failures.items()}
        return {name: float(value) for name, value in found.items()}

    def __str__(self) -> str:
        tokens = f"{self.used.prompt_tokens:,} prompt and {self.used.completion_tokens:,} completion tokens"
        said = [f"{self.nominal:,} prompts ({self.distinct:,} distinct)", f"{self.paid:,} calls", tokens]
        said += [f"${self.money:,.4g}"] if self.money is not None else []
        said += [f"{count:,} retries ({reason})" for reason, count in self.retries.items()]
        said += [f"{count:,} without a program ({reason})" for reason, count in self.failures.items()]
        return ", ".join(said)
