"""Files as other tools write them: packed, Parquet, LangSmith's and OpenAI's exports."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rcr_trainer import cli
from rcr_trainer.data.check import Keys, guess_keys
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import opened, read_examples
from rcr_trainer.errors import DataError

from langchain_rcr.errors import MissingExtraError

CALL = {"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"what": "cats"}'}}
CHAT = [
    {"role": "system", "content": "Answer with SQL."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": [{"type": "text", "text": "how many cats"}]},
    {"role": "assistant", "content": "SELECT COUNT(*) FROM cats"},
]
LANGCHAIN = [
    {"type": "human", "data": {"content": "how many cats"}},
    {"type": "ai", "data": {"content": "", "tool_calls": [{"name": "count", "args": {"what": "cats"}, "id": "1"}]}},
]
PROGRAM = '{"name": "count", "arguments": {"what": "cats"}}'


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("row", "keys", "pair"),
    [
        (
            {
                "id": "a",
                "inputs": {"question": "q", "db_id": "geo"},
                "outputs": {"sql": "s"},
                "metadata": {"split": "x"},
            },
            Keys("inputs.question", "outputs.sql"),
            ("q", "s"),
        ),
        ({"inputs": {"ask": "q"}, "outputs": {"said": "s"}}, Keys("inputs.ask", "outputs.said"), ("q", "s")),
        ({"messages": CHAT}, Keys("messages.user", "messages.assistant"), ("how many cats", CHAT[-1]["content"])),
        (
            {"messages": [CHAT[3], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": []},
            Keys("messages.user", "messages.assistant"),
            ("how many cats", PROGRAM),
        ),
        (
            {"inputs": {"messages": LANGCHAIN[:1]}, "outputs": {"messages": LANGCHAIN}},
            Keys("inputs.messages.user", "outputs.messages.assistant"),
            ("how many cats", PROGRAM),
        ),
        ({"source": "q", "target": "s", "inputs": "text"}, Keys("source", "target"), ("q", "s")),
    ],
)
def test_exports_are_guessed(tmp_path: Path, row: dict[str, Any], keys: Keys, pair: tuple[str, str]) -> None:
    path = written(tmp_path / "a.jsonl", [row, row])
    assert guess_keys(path) == keys
    examples, _ = read_examples(path, source_key=keys.source, target_key=keys.target)
    assert [(each.source, each.target) for each in examples] == [pair, pair]


def test_what_is_no_chat_stays() -> None:
    assert opened({"messages": ["a"], "inputs": 3, "x": {"y": 1}}) == {"messages": ["a"], "inputs": 3, "x": {"y": 1}}
    assert opened([1]) == [1]
    assert opened({"messages": [{"role": "user", "content": "q"}]}) == {"messages.user": "q"}
    odd = [{"role": "assistant", "tool_calls": [3, {"function": {"name": "f", "arguments": "{"}}]}]
    assert opened({"messages": odd}) == {}
    both = json.loads(opened({"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]})["messages.assistant"])
    assert both == [json.loads(PROGRAM)] * 2


def test_packed_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"source": f"how many {word}", "target": f"count({word})"} for word in ("cats", "dogs")]
    path = written(tmp_path / "a.jsonl.gz", rows)
    expected = [Example(str(n), *row.values()) for n, row in enumerate(rows, start=1)]
    assert read_examples(path)[0] == expected
    assert cli.main(["data", "check", str(path)]) == 0
    assert "question: field 'source'; program: field 'target'; language: functional" in capsys.readouterr().out
    whole = path.read_bytes()
    for broken in (whole[:-9], b"no gzip", whole[:20] + b"\xff\xff\xff" + whole[23:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"can't read .*a\.jsonl\.gz") as caught:
            read_examples(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"unknown extension '.txt'; examples are read from .*\.parquet"):
        read_examples(written(tmp_path / "a.txt.gz", rows))


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"inputs": {"question": f"q{n}"}, "outputs": {"sql": f"s{n}"}, "n": n} for n in range(3)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    keys = guess_keys(path)
    examples, report = read_examples(path, source_key=keys.source, target_key=keys.target)
    assert examples == [Example(str(n + 1), f"q{n}", f"s{n}", {"n": n}) for n in range(3)]
    assert report.at([1, 2]) == "entries 1, 2"
    odd = {"day": datetime.date(2026, 1, 31), "price": decimal.Decimal("1.50"), "picture": b"\x00", "tags": ["a"]}
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0], **odd}]), path)
    (example,), _ = read_examples(path, source_key=keys.source, target_key=keys.target)
    assert example.fields == {"n": 0, "day": "2026-01-31", "price": "1.50", "tags": ["a"]}
    parquet.write_table(pyarrow.table([["a"], ["b"], ["c"]], names=["q", "q", "s"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: the field name 'q' occurs more than once"):
        read_examples(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"can't read .*a\.parquet: "):
        read_examples(path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow is not installed: pip install 'langchain-rcr\[parquet\]'"):
        read_examples(path)
