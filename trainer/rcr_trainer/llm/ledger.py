"""What was paid for: answers on disk before they are used, and a budget that holds over runs and processes."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rcr_trainer.errors import DataError
from rcr_trainer.llm.faults import BudgetExceeded
from rcr_trainer.llm.settings import LLMSettings

_APPLICATION = 0x52435243  # "RCRC"
_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, model TEXT NOT NULL, text TEXT, reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    account TEXT PRIMARY KEY,
    calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL
) WITHOUT ROWID;
"""
_AT_ONCE = 500
"""Keys in one query; SQLite takes at least 999 parameters."""
_WAIT_S = 60.0
"""Seconds to wait for another process that writes."""


_MOST_TOKENS = 10_000_000
"""Tokens that no model reads or writes in one call; the longest contexts have a tenth to all of it."""


def token_count(value: object) -> int:
    """A number of tokens as a server reports it; −1 where that is missing or can't be true."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return -1
    return int(value)


def canonical(value: object) -> str:
    """What goes into a key of the cache: the same text for what is sent as the same JSON, another for anything else."""

    def told(inner: Any) -> Any:
        # A response's format: two classes of one name may ask for different things.
        is_schema = isinstance(inner, type) and hasattr(inner, "model_json_schema")
        return inner.model_json_schema() if is_schema else repr(inner)

    try:
        return json.dumps(value, sort_keys=True, default=told)
    except TypeError:  # names of several types have no order until they are text
        return json.dumps(json.loads(json.dumps(value, default=told)), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer.

    Attributes:
        text: what the model wrote; None: nothing.
        reason: why `text` is no whole answer: "empty", "refused", "truncated" (cut off at the longest length allowed),
            "malformed" (the server's response is no answer) or "too_long" (the prompt, for a local model).
        prompt_tokens: tokens read, as the server reports them, else counted.
        completion_tokens: tokens written, likewise.
        cached: it was on disk before this call.
        program: the program in the text; None if there is none. Never on disk: it is parsed again each time.
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
        return Use(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )

    def __sub__(self, other: Use) -> Use:
        return self + Use(-other.calls, -other.prompt_tokens, -other.completion_tokens)


class AnswerCache:
    """An SQLite file: the digest of model, parameters and prompt → answer; and what accounts have spent.

    Several processes may share it, and it survives a kill at any moment. Prompts themselves aren't stored. All methods
    may be called from any thread.

    Args:
        path: the file, made if missing; None: in memory, for this object alone. Not on a network file system, whose
            locks SQLite can't rely on.

    Raises:
        DataError: the file is something else, or can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._lock = threading.Lock()
        with self._errors():
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                ":memory:" if self.path is None else self.path,
                timeout=_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._errors():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        # SQLite doesn't wait for another process that turns on the write-ahead log, but fails at once.
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                return self._make_tables()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _make_tables(self) -> None:
        # One process at a time: else the second finds the tables that the first has just made, and no mark yet.
        with self._transaction():
            application = self._pragma("application_id")
            tables = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if application != _APPLICATION and (application or tables):
                raise DataError(f"{self.path} is an SQLite file of another program: choose another path for the cache")
            if self._pragma("user_version") > _VERSION:
                raise DataError(f"{self.path} was written by a newer version of langchain-rcr: choose another path")
            if application != _APPLICATION:
                for statement in _SCHEMA.split(";")[:-1]:
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._database.execute(f"PRAGMA user_version = {_VERSION}")
        self._database.execute("PRAGMA journal_mode = WAL")
        # FULL: an answer is on disk once its transaction ends, also after a power cut.
        self._database.execute("PRAGMA synchronous = FULL")

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        """The answers that are there, marked as cached."""
        with self._lock, self._errors():
            return self._select(keys)

    def put(
        self, model: str, answers: Mapping[bytes, Answer], account: str | None = None, used: Use | None = None
    ) -> tuple[dict[bytes, Answer], Use | None]:
        """Write answers in one transaction; they are on disk when this returns.

        Where another process was first, its answer stays, and both go on with the same one.

        Args:
            model: its name, for people who look into the file.
            answers: by key.
            account: who pays.
            used: what it cost.

        Returns:
            The answers as they are in the file now, and all that the account has spent (None without an account).
        """
        rows = [
            (key, model, answer.text, answer.reason, answer.prompt_tokens, answer.completion_tokens)
            for key, answer in answers.items()
        ]
        with self._lock, self._errors(), self._transaction():
            before = self._database.total_changes
            self._database.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", rows)
            stored = dict(answers)
            if self._database.total_changes - before < len(rows):
                stored |= self._select(list(answers))
            if account is None:
                return stored, None
            used = used or Use()
            self._database.execute(
                "INSERT INTO spent VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, "
                "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "completion_tokens = completion_tokens + excluded.completion_tokens",
                (account, used.calls, used.prompt_tokens, used.completion_tokens),
            )
            return stored, self._spent(account)

    def spent(self, account: str) -> Use:
        """All that an account has spent, in earlier runs too."""
        with self._lock, self._errors():
            return self._spent(account)

    def __len__(self) -> int:
        with self._lock, self._errors():
            return int(self._database.execute("SELECT count(*) FROM answers").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _select(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        found: dict[bytes, Answer] = {}
        columns = "key, text, reason, prompt_tokens, completion_tokens"
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self._database.execute(f"SELECT {columns} FROM answers WHERE key IN ({marks})", some)  # noqa: S608
            found |= {row[0]: Answer(row[1], row[2], row[3], row[4], cached=True) for row in rows}
        return found

    def _spent(self, account: str) -> Use:
        query = "SELECT calls, prompt_tokens, completion_tokens FROM spent WHERE account = ?"
        return Use(*(self._database.execute(query, (account,)).fetchone() or ()))

    def _pragma(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"the cache of answers {self.path or 'in memory'} can't be used: {error}") from error


def check_cache(path: str | os.PathLike[str]) -> None:
    """Find now what `AnswerCache` would refuse later, without making a file.

    Raises:
        DataError: the file is something else, or can't be opened or made.
    """
    if Path(path).exists():
        AnswerCache(path).close()
        return
    there = next(each for each in Path(path).absolute().parents if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "can't be written" if there.is_dir() else "is no folder"
        raise DataError(f"the cache of answers {path} can't be used: {there} {what}")


class Ledger:
    """The budget: sets aside the worst case of a call before it is made, and books what it cost after.

    Args:
        settings: budget and prices.
        spent: by the account before.

    Attributes:
        spent: booked and on disk.
        pending: used, but not yet on disk.
        reserved: the worst case of the calls that are running.
    """

    def __init__(self, settings: LLMSettings, spent: Use) -> None:
        self.settings, self.spent = settings, spent
        self.pending = self.reserved = Use()

    @property
    def total(self) -> Use:
        """All that was used, on disk or not."""
        return self.spent + self.pending

    def book(self, used: Use, total: Use | None) -> None:
        """What was pending is on disk; `total` is what the account has spent by now, other processes' calls too."""
        self.pending -= used
        self.spent = self.spent + used if total is None else total

    def fits(self, worst: Use) -> bool:
        """Whether a call that uses at most `worst` can't break the budget, whatever the running calls cost."""
        total, limit = self.total + self.reserved + worst, self.settings
        money = limit.money(total.prompt_tokens, total.completion_tokens) or 0.0
        return not (
            (limit.budget_calls is not None and total.calls > limit.budget_calls)
            or (limit.budget_tokens is not None and total.tokens > limit.budget_tokens)
            # With slack for rounding, so that sums of cents that come out even are even.
            or (limit.budget_money is not None and money > limit.budget_money * (1 + 1e-9) + 1e-12)
        )

    def exceeded(self, name: str) -> BudgetExceeded:
        """What to raise where the next call of the model `name` doesn't fit."""
        limit, spent = self.settings, self.total
        limits = [
            f"{limit.budget_calls:,} calls" if limit.budget_calls is not None else "",
            f"{limit.budget_tokens:,} tokens" if limit.budget_tokens is not None else "",
            f"${limit.budget_money:,.2f}" if limit.budget_money is not None else "",
        ]
        money = limit.money(spent.prompt_tokens, spent.completion_tokens)
        return BudgetExceeded(
            f"the budget of {', '.join(filter(None, limits))} could be exceeded by the next call of {name!r} (spent: "
            f"{spent.calls:,} calls, {spent.tokens:,} tokens{'' if money is None else f', ${money:,.4f}'}); "
            "all answers are kept: raise it and resume"
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What calls cost at most.

    Attributes:
        use: calls and tokens, every answer at its longest.
        money: dollars; None without prices.
        exact: prompt tokens come from the model's own tokenizer; else every byte counts as a token, which is an
            upper bound, some three times what English text and programs come to.
    """

    use: Use
    money: float | None
    exact: bool

    def __str__(self) -> str:
        money = "" if self.money is None else f", ${self.money:,.2f}"
        note = "" if self.exact else " (a token for each byte of a prompt; real use is about a third)"
        tokens = f"{self.use.prompt_tokens:,} prompt and {self.use.completion_tokens:,} completion tokens"
        return f"at most {self.use.calls:,} calls, {tokens}{money}{note}"


@dataclass(slots=True)
class Stats:
    """Counts since a model was opened.

    Attributes:
        settings: the prices.
        nominal: prompts handed in.
        distinct: different ones among them.
        cached: prompts answered from disk.
        paid: prompts that the model answered (one each, however often they were handed in at once).
        used: what the paid ones read and wrote, and what failed attempts may have cost.
        counted: answers without a token count of the server's, counted here.
        retries: attempts that failed and were repeated, by reason.
        failures: prompts without a program, by reason (see `Answer.reason`); repeated prompts count each time.
        peak: most calls that ran at the same time.
    """

    settings: LLMSettings
    nominal: int = 0
    distinct: int = 0
    cached: int = 0
    paid: int = 0
    used: Use = field(default_factory=Use)
    counted: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    peak: int = 0

    @property
    def money(self) -> float | None:
        """Dollars spent; None without prices."""
        return self.settings.money(self.used.prompt_tokens, self.used.completion_tokens)

    @property
    def distinct_share(self) -> float:
        """Distinct calls ÷ nominal calls; 1 before any."""
        return self.distinct / self.nominal if self.nominal else 1.0

    def figures(self) -> dict[str, float]:
        """All of it for a metrics file, by reason one by one (`no_program_truncated`); no money without prices."""
        found: dict[str, float] = {
            "nominal_calls": self.nominal,
            "distinct_calls": self.distinct,
            "distinct_share": round(self.distinct_share, 4),
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
        return ", ".join(f"{name.replace('_', ' ')} {value:,.6g}" for name, value in self.figures().items())
