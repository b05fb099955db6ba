"""Answers on disk, and what an account has spent."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from rcr_trainer.errors import DataError
from rcr_trainer.llm.cache import Answer, AnswerCache, Use


def test_answers_come_back_as_they_were_marked_as_cached(tmp_path: Path) -> None:
    answers = {b"a": Answer("f ( x )", "", 5, 3), b"b": Answer(None, "refused", 2, 0)}
    with closing(AnswerCache(tmp_path / "new" / "answers.sqlite")) as cache:
        assert cache.put("m", answers, "run", Use()) == (answers, Use())
    with closing(AnswerCache(tmp_path / "new" / "answers.sqlite")) as cache:
        assert cache.get([b"a", b"b", b"c"]) == {
            b"a": Answer("f ( x )", "", 5, 3, cached=True),
            b"b": Answer(None, "refused", 2, 0, cached=True),
        }
        assert len(cache) == 2


def test_the_first_answer_stays_and_is_what_both_get(tmp_path: Path) -> None:
    with closing(AnswerCache(tmp_path / "a.sqlite")) as one, closing(AnswerCache(tmp_path / "a.sqlite")) as other:
        one.put("m", {b"a": Answer("first")}, "run", Use())
        stored, _ = other.put("m", {b"a": Answer("second"), b"b": Answer("third")}, "run", Use())
        assert {key: answer.text for key, answer in stored.items()} == {b"a": "first", b"b": "third"}
        assert one.get([b"a"])[b"a"].text == "first"


def test_spending_adds_up_over_objects_and_by_account(tmp_path: Path) -> None:
    with closing(AnswerCache(tmp_path / "a.sqlite")) as one, closing(AnswerCache(tmp_path / "a.sqlite")) as other:
        assert one.spent("run") == Use()
        assert one.put("m", {b"a": Answer("x")}, "run", Use(1, 10, 2))[1] == Use(1, 10, 2)
        assert other.put("m", {}, "run", Use(2, 5, 0))[1] == Use(3, 15, 2)
        assert other.put("m", {}, "another", Use(1, 1, 1))[1] == Use(1, 1, 1)
        assert one.spent("run") == Use(3, 15, 2)


def test_more_keys_than_sqlite_takes_at_once(tmp_path: Path) -> None:
    keys = [str(n).encode() for n in range(1234)]
    with closing(AnswerCache(tmp_path / "a.sqlite")) as cache:
        cache.put("m", {key: Answer(key.decode()) for key in keys}, "run", Use())
        assert {key: answer.text for key, answer in cache.get(keys).items()} == {key: key.decode() for key in keys}


def test_threads_may_share_one(tmp_path: Path) -> None:
    with closing(AnswerCache(tmp_path / "a.sqlite")) as cache:

        def write(start: int) -> None:
            for n in range(start, start + 20):
                cache.put("m", {str(n).encode(): Answer(str(n))}, "run", Use(1))

        threads = [threading.Thread(target=write, args=(20 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(cache) == 80
        assert cache.spent("run") == Use(80)


def test_it_is_a_write_ahead_log_that_is_flushed(tmp_path: Path) -> None:
    with closing(AnswerCache(tmp_path / "a.sqlite")) as cache:
        cache.put("m", {b"a": Answer("x")}, "run", Use())
        assert cache._database.execute("PRAGMA synchronous").fetchone() == (2,)
        with closing(sqlite3.connect(tmp_path / "a.sqlite")) as reader:
            assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert reader.execute("SELECT text FROM answers").fetchall() == [("x",)]


def test_in_memory_nothing_is_shared(here: Path) -> None:
    with closing(AnswerCache()) as one, closing(AnswerCache()) as other:
        one.put("m", {b"a": Answer("x")}, "run", Use())
        assert len(one) == 1
        assert len(other) == 0
    assert [*here.iterdir()] == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be taken for one by its length alone\n" * 20)
    foreign = tmp_path / "foreign.sqlite"
    with closing(sqlite3.connect(foreign)) as database:
        database.execute("CREATE TABLE mine (a)")
    newer = tmp_path / "newer.sqlite"
    AnswerCache(newer).close()
    with closing(sqlite3.connect(newer)) as database:
        database.execute("PRAGMA user_version = 99")
    for path, complaint in ((text, "not a database"), (foreign, "another program"), (newer, "newer version")):
        before = path.read_bytes()
        with pytest.raises(DataError, match=complaint):
            AnswerCache(path)
        assert path.read_bytes() == before
    with pytest.raises(DataError, match="can't be used"):
        AnswerCache(tmp_path)


@pytest.mark.slow
def test_many_that_make_the_same_file_at_once_wait_for_one_another(tmp_path: Path) -> None:
    meeting, files = threading.Barrier(4, timeout=60), [tmp_path / f"{n}.sqlite" for n in range(150)]

    def open_all(_: int) -> bool:
        for file in files:
            meeting.wait()
            AnswerCache(file).close()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_all, range(4))) == [True] * 4
