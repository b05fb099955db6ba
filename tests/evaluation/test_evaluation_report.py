"""evaluation.json and the table."""

from __future__ import annotations

import io
import json

import pytest
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import AnswersAsked, Choice, EvaluationReport
from rcr_trainer.evaluation.table import write_table
from reports import report as report_on
from reports import scores as scores_of

from langchain_rcr.errors import InputError


def scores(coverage, **figures):
    return scores_of(coverage, by_step=[coverage - 20.0, coverage - 10.0, coverage - 5.0, coverage], **figures)


def make(**changes):
    values = {
        "k": 4,
        "n": 100,
        "programs": 60,
        "split": "covr-110",
        "seed": 7,
        "selectors": {
            "random": scores(30.0),
            "fixed": scores(50.0),
            "bm25": scores(54.321, intervals={"coverage": (-1.234, 4.567)}),
            "mmr": scores(59.0),
            "oracle": scores(80.0),
            "rcr": scores(67.0),
        },
        "pool_size": 3000,
        "skipped_queries": 2,
        "left_out": {"dense": "no embeddings were given."},
        "trade_offs": {
            "mmr": Choice("lambda_mult", 0.5, {0.3: 57.128, 0.5: 59.0}, 50),
            "dpp": Choice("lam", 0.1, {}, 0, "nothing"),
        },
        "versions": {"numpy": "2.0"},
    }
    return report_on(**{**values, **changes})


def test_json_has_the_agreed_keys_and_rounding():
    values = json.loads(make().to_json())
    assert [values[key] for key in ("k", "n", "split", "seed")] == [4, 100, "covr-110", 7]
    assert values["programs"] == 60
    bm25 = values["selectors"]["bm25"]
    assert bm25["coverage"] == 54.32
    assert bm25["full_coverage"] == 12.35
    assert bm25["duplicate_rate"] == 3.0
    others = ("specific_coverage", "label_complete", "hub_share", "prompt_length")
    assert [bm25[key] for key in others] == [45.6, 78.9, 23.4, 321.4]
    assert bm25["intervals"] == {"coverage": [-1.23, 4.57]}
    assert (bm25["latency_ms"], bm25["latency_batch_ms"]) == (1.235, 0.012)
    assert bm25["coverage_by_step"] == [34.32, 44.32, 49.32, 54.32]
    coverage = {"0.3": 57.13, "0.5": 59.0}
    mmr = {"parameter": "lambda_mult", "value": 0.5, "coverage": coverage, "n": 50, "chosen_on": "dev"}
    assert values["trade_offs"]["mmr"] == mmr
    assert (values["skipped_queries"], values["left_out"]) == (2, {"dense": "no embeddings were given."})


def test_written_and_read_back(tmp_path):
    path = make(trade_offs={}).write(tmp_path / "run")
    assert path == tmp_path / "run" / "evaluation.json"
    assert [entry.name for entry in path.parent.iterdir()] == ["evaluation.json"]
    report = EvaluationReport.read(path)
    assert report == EvaluationReport.read(path.parent)
    assert report.to_json() == path.read_text(encoding="utf-8")
    assert report.trade_offs == {}
    assert report.selectors["bm25"].intervals == {"coverage": (-1.23, 4.57)}
    read = EvaluationReport.read(make(gold="pool", none_in_pool=3, repeated=2, advice="use it").write(tmp_path))
    assert (read.gold, read.none_in_pool, read.repeated, read.advice) == ("pool", 3, 2, "use it")
    assert read.trade_offs["mmr"].coverage == {0.3: 57.13, 0.5: 59.0}
    assert (read.trade_offs["dpp"].value, read.trade_offs["dpp"].chosen_on) == (0.1, "nothing")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = make().write(tmp_path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(InputError, match=r"evaluation\.json can't be written: disk full"):
        make(n=5).write(tmp_path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("k"), "k: Field required"),
        (lambda v: v["selectors"]["bm25"].pop("coverage"), r"selectors\.bm25\.coverage: Field required"),
        (lambda v: v["selectors"]["bm25"].update(coverage="high"), r"selectors\.bm25\.coverage"),
        (lambda v: v.update(format_version=3), "format version 3, this library reads up to 2"),
        (lambda v: v.update(steps=5), "curve has not 5 steps"),
    ],
)
def test_what_is_no_report_is_refused(change, message, tmp_path):
    values = json.loads(make().to_json())
    change(values)
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        EvaluationReport.read(path)
    assert "\n" not in str(caught.value)
    assert "evaluation.json" in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"can't read .*evaluation\.json"):
        EvaluationReport.read(tmp_path)
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="no evaluation report"):
        EvaluationReport.read(tmp_path)


def test_best_plain_selector():
    assert make().best_plain() == ("mmr", 59.0)
    stronger = {name: scores(60.0 + n) for n, name in enumerate(("bm25_schema", "dpp", "set_bsr"))}
    assert make(selectors={**make().selectors, **stronger}).best_plain() == ("set_bsr", 62.0)
    assert make().best_plain("exact_match") is None
    assert make(selectors={"rcr": scores(67.0)}).best_plain() is None


def test_table_as_plain_text():
    stream = io.StringIO()
    write_table(make(), stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("split covr-110: 100 test queries of 60 programs, pool of 3000, k = 4")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["bm25"] == ["bm25", "54.3", "12.3", "45.6", "78.9", "23.4", "321", "1.23"]
    assert "rcr (ours)" in text
    assert "oracle (of coverage)" in text
    assert "2 queries left out: their gold program doesn't parse." in text
    assert "pool has" not in text
    assert "dense left out: no embeddings were given." in text
    assert ".." not in text
    assert "mmr: lambda_mult = 0.5 (best of 2 on dev)." in text
    assert "dpp: lam = 0.1 (default)." in text
    assert text.isascii() or "─" in text


def test_table_says_what_counts():
    stream = io.StringIO()
    write_table(make(gold="pool", none_in_pool=3, repeated=12), stream)
    text = " ".join(stream.getvalue().split())
    assert "Of the gold programs only what the pool has counts." in text
    assert "3 queries left out: the pool has nothing of their gold program." in text
    assert "12 queries are in the pool, too, with question and program." in text


def test_table_on_a_terminal_marks_ours_in_colour(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    stream.isatty = lambda: True
    write_table(make(), stream)
    (line,) = (line for line in stream.getvalue().splitlines() if "(ours)" in line)
    assert "\x1b[1;32m" in line


def test_plain_text_even_where_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    write_table(make(), stream)
    assert "\x1b" not in stream.getvalue()


def test_a_table_with_all_columns_is_no_wider_than_the_others():
    names = ("rcr", "rcr_without_rl", "set_bsr_distinct", "oracle")
    full = report_on({name: scores(80.0, implied_shown=100.0, exact_match=100.0, execution=100.0) for name in names})
    full.answers = AnswersAsked("m", n=200, programs=150)
    stream = io.StringIO()
    write_table(full, stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in stream.getvalue()
    assert all(
        any(word in line for line in lines) for word in ("exact", "same", "implied", "query", "rcr_without_rl (SFT)")
    )
