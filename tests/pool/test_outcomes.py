"""The log of outcomes: what a line holds, outcomes that come later, rotation, writers side by side, bad lines."""

import inspect
import json
import pickle
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_rcr import InputError, OutcomeLog
from langchain_rcr.basics.files import digest
from langchain_rcr.pool import outcomes

PICKS = [("b", 2, 0.25), ("a", 1, 0.5)]


def test_a_line_has_digests_and_ids_but_no_text_unless_it_may(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "new" / "outcomes.jsonl")
    log.record("how many cats", PICKS, True, policy="p", explore=0.5)
    (line,) = log.path.read_text().splitlines()
    assert "cats" not in line
    assert json.loads(line).keys() == {
        *("time", "question", "picks", "probabilities", "outcome", "explore", "policy", "run")
    }
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    (read,) = log.read()
    assert (read.question, read.picks, read.probabilities) == (digest("how many cats"), ("a", "b"), (0.5, 0.25))
    assert (read.outcome, read.explore, read.policy, read.text) == (1.0, 0.5, "p", None)
    OutcomeLog(log.path, text=True).record("how many cats", PICKS, None)
    assert [each.text for each in log.read()] == [None, "how many cats"]


def test_a_log_is_named_by_a_path_or_a_text(tmp_path: Path) -> None:
    log = OutcomeLog(str(tmp_path / "outcomes.jsonl"), keep=3)
    assert log == OutcomeLog(tmp_path / "outcomes.jsonl", False, 50_000_000, 3) == pickle.loads(pickle.dumps(log))
    assert inspect.signature(OutcomeLog).parameters["path"].annotation == "str | Path"  # what a type checker sees


def test_a_log_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = OutcomeLog("outcomes.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # as a daemon goes to /
    log.record("how many cats", PICKS, True)
    assert (tmp_path / "outcomes.jsonl").is_file()


def test_an_outcome_may_come_later_and_the_last_one_counts(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    log.record("one", PICKS, None, run="r1")
    log.record("two", PICKS, 0.5, run="r2")
    log.record("three", PICKS, None, run="r3")
    for outcome in (0, 1):
        log.outcome("r1", outcome)
    assert [each.outcome for each in log.read()] == [1.0, 0.5, None]
    log.record("four", PICKS, None)
    *_, last = log.read()
    with pytest.raises(InputError, match="by the run that was recorded, not by None"):
        log.outcome(last.run, 1.0)


def test_a_line_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    for _ in range(2):  # asked twice, with the same picks
        log.record("one", PICKS, 1.0)
    log.record("two", PICKS, None, run="r")
    log.outcome("r", 0.0)
    log.outcome("r", 1.0)
    lines = log.path.read_text()
    log.path.with_name("outcomes.jsonl.1").write_text(lines)  # as a tool that copies logs may leave it
    log.path.write_text(lines + lines.splitlines(keepends=True)[-2])
    assert [each.outcome for each in log.read()] == [1.0, 1.0, 1.0]


def test_full_files_are_kept_beside_up_to_a_number(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", max_bytes=600, keep=2)
    for number in range(12):
        log.record(str(number), PICKS, number)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 3
    assert max(sizes) <= 600
    outcomes = [each.outcome for each in log.read()]
    assert outcomes == sorted(outcomes)
    assert outcomes[-1] == 11.0
    odd = OutcomeLog(tmp_path / "outcomes [eu].jsonl", max_bytes=600, keep=2)
    for number in range(12):
        odd.record(str(number), PICKS, number)
    assert [each.outcome for each in odd.read()] == outcomes


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of files")
def test_a_line_that_a_full_disk_cuts_off_is_an_error_and_costs_no_other(tmp_path: Path) -> None:
    import resource

    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    log.record("one", PICKS, 1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 100, unlimited[1]))
    try:
        with pytest.raises(InputError, match="can't be written: the disk is full"):
            log.record("two", PICKS, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [each.text for each in log.read()] == ["one"]
    log.record("three", PICKS, 1)
    assert [each.text for each in log.read()] == ["one", "three"]
    with log.path.open("ab") as file:
        file.write('{"time": "", "text": "é'.encode()[:-1])  # half of a letter
    log.record('{"time": 4', PICKS, 1)
    sound = log.path.read_bytes()
    log.path.write_bytes(sound + b'{"ti')
    assert [each.text for each in log.read()] == ["one", "three", '{"time": 4']


def test_writers_side_by_side_lose_no_line(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", max_bytes=5000, keep=100)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: log.record(str(number), PICKS, number), range(200)))
    assert sorted(each.outcome for each in log.read() if each.outcome is not None) == [*map(float, range(200))]


@pytest.mark.parametrize(
    "change",
    [
        *({"picks": value} for value in (None, 1, ["a"], [1, 2])),
        *({"probabilities": value} for value in (None, ["x", 0.5], [-0.5, 0.5], [[1], 1], [0.5])),
        *({"outcome": value} for value in ("x", [], float("inf"), 10**400)),
        *({"explore": value} for value in ("x", [[1]], [None])),
        *({name: []} for name in ("question", "policy", "run")),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    log.record("one", PICKS, 1)
    assert len(PICKS) == 2
    log.path.write_text(json.dumps(json.loads(log.path.read_text()) | change) + "\n")
    with pytest.raises(InputError, match=r"outcomes\.jsonl, line 1: not a line of an outcome log"):
        list(log.read())


SOUND = {"question": "", "picks": [], "probabilities": [], "outcome": 1, "explore": 1, "policy": "", "run": None}


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '{"a": 1}', '{"time": "", "run": "r"}', '{"time": ' + "[" * 100_000),
        json.dumps({"time": "", **SOUND, "text": "\ud800"}),
        json.dumps({"time": "", **SOUND, "color": "red"}),
    ],
)
def test_a_line_of_something_else_is_named(tmp_path: Path, line: str) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    log.record("one", PICKS, 1)
    log.path.write_text(log.path.read_text() + line + "\n")
    with pytest.raises(InputError, match=r"outcomes\.jsonl, line 2: not a line of an outcome log"):
        list(log.read())


def test_what_cant_be_recorded_is_refused(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    for endless in (float("nan"), float("-inf"), 10**400):
        with pytest.raises(InputError, match="an outcome must be a finite number, not "):
            log.record("one", PICKS, endless)
    assert outcomes.checked_outcome(np.bool_(True)) == 1.0
    for lacking in ((None, None, None), (None, 1, None), ("a", None, None)):
        with pytest.raises(InputError, match=f"not a pick of this retriever: id {lacking[0]!r}, step {lacking[1]}"):
            log.record("one", [lacking], 1)
    with pytest.raises(InputError, match="there is no such log"):
        list(log.read())
    with pytest.raises(InputError, match="there is no such log"):
        list(OutcomeLog(tmp_path).read())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="can't be written"):
        OutcomeLog(tmp_path / "file" / "outcomes.jsonl").record("one", PICKS, 1)


def test_all_is_read_while_a_writer_renames_a_full_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", max_bytes=600, keep=9)
    names = ["one", "two", "three", "four", "five", "six"]
    log.record(names[0], PICKS, 1.0)
    read, raced = outcomes._lines, list[Path]()

    def renamed_just_before(file: Path) -> Iterator[dict[str, Any]]:
        if not raced and file == log.path:
            raced.append(file)
            for name in names[1:]:  # what was to be read has another name now
                log.record(name, PICKS, 0.0)
        return read(file)

    monkeypatch.setattr(outcomes, "_lines", renamed_just_before)
    assert [each.question for each in log.read()] == [*map(digest, names)]
    assert len([*tmp_path.iterdir()]) > 1


def test_what_is_named_like_a_full_file_but_is_none_is_passed_over(tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    (tmp_path / "outcomes.jsonl.1").symlink_to(tmp_path / "gone")
    (tmp_path / "outcomes.jsonl.2").mkdir()
    with pytest.raises(InputError, match="there is no such log"):
        next(log.read())
    log.record("one", PICKS, 1.0)
    assert len([*log.read()]) == 1
