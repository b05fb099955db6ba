"""evaluation.json and the table."""

from __future__ import annotations

import json

import pytest
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import AnswersAsked, Choice, EvaluationReport, Picked, Question
from rcr_trainer.evaluation.table import report_text, table
from reports import report as report_on
from reports import scores

from langchain_rcr.errors import InputError


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
    assert bm25["prompt_length"] == 321.4
    assert bm25["intervals"] == {"coverage": [-1.23, 4.57]}
    assert (bm25["latency_ms"], bm25["latency_batch_ms"]) == (1.235, 0.012)
    coverage = {"0.3": 57.13, "0.5": 59.0}
    mmr = {"parameter": "lambda_mult", "value": 0.5, "coverage": coverage, "n": 50, "chosen_on": "dev"}
    assert values["trade_offs"]["mmr"] == mmr
    assert (values["skipped_queries"], values["left_out"]) == (2, {"dense": "no embeddings were given."})


def test_written_and_read_back(tmp_path):
    make(trade_offs={}).write(tmp_path / "run")
    (path,) = (tmp_path / "run").iterdir()
    assert path.name == "evaluation.json"
    report = EvaluationReport.read(tmp_path / "run")
    assert report.to_json() == path.read_text(encoding="utf-8")
    assert report.trade_offs == {}
    assert report.selectors["bm25"].intervals == {"coverage": (-1.23, 4.57)}
    make(repeated=2, advice="use it").write(tmp_path)
    read = EvaluationReport.read(tmp_path)
    assert (read.repeated, read.advice) == (2, "use it")
    assert read.trade_offs["mmr"].coverage == {0.3: 57.13, 0.5: 59.0}
    assert (read.trade_offs["dpp"].value, read.trade_offs["dpp"].chosen_on) == (0.1, "nothing")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    make().write(tmp_path)
    path = tmp_path / "evaluation.json"
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
        (lambda v: v.update(format_version=4), "format version 4, this library reads up to 3"),
    ],
)
def test_what_is_no_report_is_refused(change, message, tmp_path):
    values = json.loads(make().to_json())
    change(values)
    (tmp_path / "evaluation.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        EvaluationReport.read(tmp_path)
    assert "\n" not in str(caught.value)
    assert "evaluation.json" in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"can't read .*evaluation\.json"):
        EvaluationReport.read(tmp_path)
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="not an evaluation report"):
        EvaluationReport.read(tmp_path)


def test_best_plain_selector():
    assert make().best_plain() == "mmr"
    stronger = {name: scores(60.0 + n) for n, name in enumerate(("bm25_schema", "dpp", "set_bsr"))}
    assert make(selectors={**make().selectors, **stronger}).best_plain() == "set_bsr"
    assert make().best_plain("exact_match") is None
    assert make(selectors={"rcr": scores(67.0)}).best_plain() is None


def test_table():
    lines = table(make())
    assert lines[0] == "split covr-110: 100 test queries of 60 programs, pool of 3000, k = 4"
    assert lines[2:5] == [
        "| selector             | coverage % | full cov. % | chars | ms/query |",
        "|----------------------|-----------:|------------:|------:|---------:|",
        "| random               |       30.0 |        12.3 |   321 |     1.23 |",
    ]
    text = "\n".join(lines)
    assert "| rcr (ours)           |       67.0 |" in text
    assert "| oracle (of coverage) |" in text
    assert "2 queries left out: their gold program doesn't parse." in text
    assert "pool has" not in text
    assert "dense left out: no embeddings were given." in text
    assert ".." not in text
    assert "mmr: lambda_mult = 0.5 (best of 2 on dev)." in text
    assert "dpp: lam = 0.1 (default)." in text


def question(ours, plain, text="", **about):
    """A question with the picks of ours and of bm25."""
    shown = [Example("a", f"which rivers {text}", "f ( `a` )"), Example("b", "b?", "g")]
    selectors = {
        "rcr": Picked("trained", shown, [0, 1, 0], **ours),
        "bm25": Picked("plain", shown[:1], [1, 1, 1], **plain),
    }
    return Question("t1", f"how long\nis it {text}", "f ( b )", "f", ["b", "f", "f -> b"], selectors, **about)


def test_report_shows_question_by_question_what_came_of_ours_and_the_best_plain_selector():
    figures = {"rcr": scores(60.0, exact_match=50.0), "oracle": scores(80.0, exact_match=90.0)}
    figures["random"] = scores(30.0, exact_match=10.0, intervals={"exact_match": (1.0, 80.0)})
    figures["bm25"] = scores(50.0, exact_match=40.0, intervals={"exact_match": (-0.02, 12.3)})
    asked = question({"answer": "f ( c )", "exact": False}, {"answer": "f ( b )", "exact": True})
    text = report_text("mine", make(selectors=figures, advice="Deploy it."), [asked])
    assert text.startswith("# mine, seed 7\n\nsplit covr-110: 100 test queries")
    assert "\n\nDeploy it.\n\n## Our lead over each, points (95 % interval)\n\n" in text
    assert "| bm25 | +10.0 (+0.0 to +12.3) |" in text
    assert text.endswith(
        "## Questions (also with the picks of bm25, the best plain selector)\n\n"
        "### `t1` `how long is it`\n\ngold: `f ( b )`\n\n"
        "rcr: wrong: `f ( c )`; its picks lack 2 of 3 structures, `b` among them\n\n"
        "1. `which rivers` → `` f ( `a` ) ``\n1. `b?` → `g`\n\n"
        "bm25: right: `f ( b )`; its picks lack 0 of 3 structures\n\n"
        "1. `which rivers` → `` f ( `a` ) ``\n"
    )


def test_report_shows_the_questions_of_the_best_by_rows_which_may_have_no_examples():
    figures = {"rcr": scores(60.0, exact_match=50.0, execution=50.0)}
    figures["bm25"] = scores(50.0, exact_match=40.0, execution=40.0)
    figures["no_examples"] = scores(0.0, exact_match=10.0, execution=60.0)
    asked = question({"answer": "f ( c )", "exact": False}, {"answer": "f ( b )", "exact": True})
    asked.selectors["no_examples"] = Picked("plain", [], [0, 0, 0], "f ( d )", exact=False, execution=True)
    report = make(selectors=figures, answers=AnswersAsked("m", 100, 90, told=100))
    text = report_text("mine", report, [asked])
    assert "\n\n## Questions (also without examples)\n\n" in text
    assert text.endswith("\n\nno_examples: other, with the same result: `f ( d )`\n\n")
    assert "bm25: " not in text
    report.answers.told = 0
    assert "(also with the picks of bm25, the best plain selector)" in report_text("mine", report, [asked])


def test_report_takes_no_text_of_the_data_for_markup():
    planted = "``` <script>x</script> [a](http://b)\n# heading"
    text = report_text("mine", make(), [question({}, {}, planted)])
    line = next(line for line in text.splitlines() if line.startswith("### "))
    assert line == "### `t1` ```` how long is it ``` <script>x</script> [a](http://b) # heading ````"
    assert "rcr: its picks lack 2 of 3 structures, `b` among them" in text
