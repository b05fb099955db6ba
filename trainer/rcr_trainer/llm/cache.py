"""Answers on disk: an SQLite file that several processes may share, and that survives a kill at any moment."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rcr_trainer.errors import DataError
from rcr_trainer.llm.answers import Answer
from rcr_trainer.llm.budget import Use

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
_WAIT_S = 60.0


class AnswerCache:
    """Maps the digest of model, parameters and prompt to an answer, and keeps what each account has spent.

    Prompts themselves aren't stored. All methods may be called from any thread.

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
                self._when_free(self._prepare)
        except BaseException:
            self._database.close()
            raise

    def _when_free(self, action: Callable[[], None]) -> None:
        # SQLite doesn't wait for those who change a file to WAL, and fails at once.
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _prepare(self) -> None:
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
            model: a name for whoever looks into the file.
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
                stored = {**stored, **self._select(list(answers))}
            if account is None:
                return stored, None
            used = used or Use()
            self._database.execute(
                "INSERT INTO spent VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO UPDATE SET calls = calls + ?2, "
                "prompt_tokens = prompt_tokens + ?3, completion_tokens = completion_tokens + ?4",
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
        return {key: answer for part in _parts(keys) for key, answer in self._select_part(part)}

    def _select_part(self, keys: Sequence[bytes]) -> Iterable[tuple[bytes, Answer]]:
        marks = ", ".join("?" * len(keys))
        columns = "key, text, reason, prompt_tokens, completion_tokens"
        rows = self._database.execute(f"SELECT {columns} FROM answers WHERE key IN ({marks})", keys)  # noqa: S608
        return [(row[0], Answer(row[1], row[2], row[3], row[4], cached=True)) for row in rows]

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


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), _AT_ONCE):
        yield keys[start : start + _AT_ONCE]
