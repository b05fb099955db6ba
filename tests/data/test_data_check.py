"""`rcr-train data check` and `rcr-train init --train`: what is guessed of files, and what needs fixing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from rcr_trainer import cli
from rcr_trainer.data import check
from rcr_trainer.errors import DataError
from rcr_trainer.runs.layers import load_config

from langchain_rcr.programs.languages import guess_language

NAMES = (("city", "river"), ("iowa", "ohio", "utah"), ("largest", "smallest", "oldest"))
QUESTIONS = [f"which {thing} of {place} is the {word}" for thing, place, word in itertools.product(*NAMES)]


def write(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture
def files(here: Path) -> Path:
    rows = [
        {"question": question, "query": f"SELECT a{n} FROM t WHERE b = {n}"} for n, question in enumerate(QUESTIONS)
    ]
    write(here / "train.jsonl", rows[:12])
    (here / "test.csv").write_text(
        "".join(
            f"{row['question']};{row['query']}\n" for row in [{"question": "question", "query": "query"}, *rows[12:]]
        )
    )
    return here


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert cli.main(list(arguments)) == code
    return capsys.readouterr().out.splitlines()


def test_fields_language_and_delimiter_are_guessed_and_said(capsys, files):
    lines = said(capsys, "data", "check", "train.jsonl", "test.csv")
    assert lines[0] == (
        "question: field 'question'; program: field 'query'; language: sql (12 of 12 programs parse as sql, "
        "12 as functional)"
    )
    assert "train.jsonl: 12 rows, 12 examples" in lines
    assert "test.csv: 6 rows, 6 examples, fields between ';'" in lines
    assert lines[-1] == "Nothing needs fixing."


def test_every_row_that_needs_fixing_is_named_up_to_ten(capsys, files):
    with (files / "train.jsonl").open("a") as file:
        file.write("no json\n[1]\n" + '{"question": "x"}\n' * 10)
        file.write('{"question": null, "query": "SELECT a"}\n{"question": "w", "query": "SELECT FROM ("}\n')
    lines = said(capsys, "data", "check", "train.jsonl", "--language", "sql", code=1)
    at = lines.index("! rows that can't be read: 12")
    assert lines[at + 1] == "      line 13: invalid JSON (Expecting value, column 1)"
    assert lines[at + 2].startswith("      line 14: expected a JSON object, got a list")
    assert lines[at + 11] == "      … and 2 more"
    at = lines.index("! rows without question or program, which are left out: 1")
    assert lines[at + 1] == "      line 25"
    at = lines.index("! programs that don't parse as sql, which count by their tokens alone: 1 of 13")
    assert lines[at + 1] == "      line 26: SELECT FROM ("
    assert lines[-1] == "To fix: 3, marked with !"


def test_what_both_files_hold_is_found(capsys, files):
    with (files / "test.csv").open("a") as file:
        file.write(f"{QUESTIONS[0].upper()};select  a0 from T where b = 0\n{QUESTIONS[1]};SELECT other\n")
    lines = said(capsys, "data", "check", "train.jsonl", "test.csv", code=1)
    flatters = "figures on them say nothing about new questions"
    at = lines.index(f"! pairs that are also in train.jsonl: 1 of 8; {flatters}")
    assert lines[at + 1] == f"      line 8: {QUESTIONS[0].upper()}"
    at = lines.index(f"! questions that train.jsonl has with another program: 1 of 8; {flatters}")
    assert lines[at + 1] == f"      line 9: {QUESTIONS[1]}"


def test_a_file_with_braces_in_its_name_is_compared_too(capsys, files):
    (files / "train.jsonl").rename(files / "train-{date}.jsonl")
    write(files / "{0}.jsonl", [{"question": QUESTIONS[0], "query": "SELECT a0 FROM t WHERE b = 0"}])
    lines = said(capsys, "data", "check", "train-{date}.jsonl", "{0}.jsonl", code=1)
    flatters = "figures on them say nothing about new questions"
    assert f"! pairs that are also in train-{{date}}.jsonl: 1 of 1; {flatters}" in lines


def test_rows_that_repeat_others_are_named(capsys, here):
    rows = [{"source": question, "target": "f ( x )"} for question in QUESTIONS[:5]]
    write(here / "a.jsonl", [*rows, rows[1]])
    lines = said(capsys, "data", "check", "a.jsonl")
    repeated = "  rows that repeat an earlier one, so that a prompt may show both: 1 of 6"
    assert lines[lines.index(repeated) + 1] == "      line 6"


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        (["Question", "SQL", "db"], ("Question", "SQL")),
        (["query", "program"], ("query", "program")),
        (["question", "query"], ("question", "query")),
        (["utterance", "formula"], ("utterance", "formula")),  # the other one of two
    ],
)
def test_keys_are_known_by_their_names(tmp_path, fields, keys):
    write(tmp_path / "a.jsonl", [dict.fromkeys(fields, "text") | {"n": 3}])
    found = check.guess_keys(tmp_path / "a.jsonl")
    assert (found.source, found.target) == keys


def test_a_few_bad_rows_hide_no_keys_and_are_named(capsys, here):
    rows = [{"question": f"q{n}", "sql": f"SELECT a{n} FROM t"} for n in range(40)]
    write(here / "a.jsonl", [*rows, {"question": "x", "sql": 5}])
    lines = said(capsys, "data", "check", "a.jsonl", code=1)
    at = lines.index("! rows that can't be read: 1")
    assert lines[at + 1] == "      line 41: field 'sql' must hold text, got a number"
    said(capsys, "init", "--train", "a.jsonl", "a.yaml")
    assert load_config(here / "a.yaml").data.target_key == "sql"
    write(here / "b.jsonl", [*rows[:4], {"question": "x", "sql": 5}])
    with pytest.raises(DataError, match=r"program \(--target-key\); fields with text: question"):
        check.guess_keys(here / "b.jsonl")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[\n {\n  "question": "q"\n }\n]\n', "line 1: invalid JSON .*; a file that is one JSON list is named .json"),
        (b'[{"question": "q", "sql": "f"}]', "line 1: expected a JSON object, got a list; .* is named .json"),
        ('{"question": "q", "sql": "f"}\n'.encode("utf-16"), "line 1: not UTF-8 text .*: it is UTF-16, save it as"),
        (b'{"question": "q", "sql": "f"}\r' * 3, "line 1: invalid JSON .*; its lines end in CR alone"),
        (b'"q"\n"r"\n', "line 1: expected a JSON object, got text"),
        (b"\n\n", "holds no examples"),
    ],
)
def test_a_file_without_a_readable_row_says_why(tmp_path, data, message):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=message):
        check.guess_keys(tmp_path / "a.jsonl")


def test_keys_that_nobody_can_guess_are_asked_for(tmp_path):
    write(tmp_path / "a.jsonl", [{"a": "x", "b": "y", "c": "z"}])
    with pytest.raises(DataError, match=r"question \(--source-key\); fields with text: a, b, c"):
        check.guess_keys(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"program \(--target-key\)"):
        check.guess_keys(tmp_path / "a.jsonl", source="a")
    assert check.guess_keys(tmp_path / "a.jsonl", "a", "c") == check.Keys("a", "c")


@pytest.mark.parametrize(
    ("program", "language"),
    [
        ("SELECT a FROM b WHERE c = 3", "sql"),
        ("SELECT TOP 3 [a b] FROM [dbo].[c d]", "sql:tsql"),
        ("count ( river ( loc ( 'x' ) ) )", "functional"),
        ("(lambda $0 e (state:t $0))", "sexpr"),
        ('{"tool": "find", "n": 3}', "json"),
        ("[x for x in rivers(state='texas')]", "python"),
        ("]] nothing ((", "tokens"),
        ("SELECT ?x WHERE { ?x wdt:P31 wd:Q5 }", "tokens"),  # mere words, to functional
        ("return flights ;return #1 from denver", "tokens"),  # and a comment, to Python
        (r"^\d{3}-\d{4}$", "tokens"),
    ],
)
def test_languages_are_known_by_what_parses(program, language):
    assert guess_language([program] * 3)[0] == language


def test_that_no_language_reads_a_program_is_said_so():
    said = "none of 3 programs parses in another language"
    assert guess_language(["[IN:GET_WEATHER [SL:LOCATION rome ] ]"] * 3) == ("tokens", said)


def test_init_writes_settings_for_these_files(capsys, files):
    lines = said(capsys, "init", "--train", "train.jsonl", "--test", "test.csv", "mine.yaml")
    assert lines == [
        "mine.yaml written (train: train.jsonl, test: test.csv, source_key: question, target_key: query, "
        "language: sql)",
        "Next: rcr-train data check train.jsonl test.csv",
        "then: rcr-train run mine.yaml",
    ]
    config = load_config(files / "mine.yaml")
    assert (config.data.task, str(config.data.train), str(config.data.test)) == ("files", "train.jsonl", "test.csv")
    assert (config.data.source_key, config.data.target_key, config.program.language) == ("question", "query", "sql")
    said(capsys, "init", "--train", "train.jsonl")
    assert load_config(files / "config.yaml").evaluation.split == "dev"
    keys = ("--target-key=query", "--language=sql:sqlite")
    lines = said(capsys, "init", "--force", "--train", "train.jsonl", *keys, "--source-key", "question")
    flags = "--source-key=question --target-key=query --language=sql:sqlite"  # without which it may not find the fields
    assert lines[1] == f"Next: rcr-train data check train.jsonl {flags}"
    assert cli.main(["init", "--test", "test.csv", "other.yaml"]) == 2
    write(files / "ja.jsonl", [{"質問": "川は何本", "文 SQL": "SELECT COUNT(*) FROM 川"}])
    said(capsys, "init", "--train", "ja.jsonl", "--source-key", "質問", "--target-key", "文 SQL", "ja.yaml")
    assert "\n  source_key: 質問\n" in (files / "ja.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("path", "name", "word"),
    [
        ("s p.yaml", "s-p", "'s p.yaml'"),
        ("a+b.yaml", "a-b", "a+b.yaml"),
        (".cfg.yaml", "cfg", ".cfg.yaml"),
        ("./-dash.yaml", "dash", "./-dash.yaml"),
    ],
)
def test_init_writes_a_name_that_a_run_takes_and_commands_that_a_shell_takes(capsys, files, path, name, word):
    (files / "train.jsonl").rename(files / "-dash.jsonl")
    lines = said(capsys, "init", "--train=./-dash.jsonl", path)
    assert lines[1:] == ["Next: rcr-train data check ./-dash.jsonl", f"then: rcr-train run {word}"]
    assert load_config(files / path).name == name
    assert said(capsys, "init", path, "--force")[0].endswith(f"Next: rcr-train run {word}")


@pytest.mark.slow
def test_a_run_says_the_same_in_one_line(capsys, files):
    with (files / "train.jsonl").open("a") as file:
        file.write('{"question": null, "query": "SELECT a"}\n')
    said(capsys, "init", "--train", "train.jsonl", "--test", "test.csv", "--language", "sexpr")
    assert cli.main(["run", "config.yaml", "--dry-run", "--program.language=sql"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "train.jsonl 12 examples, test.csv 6 examples; to fix: train.jsonl: rows without question or program, "
        "which are left out: 1 (`rcr-train data check` names the rows)"
    ]
    assert cli.main(["run", "config.yaml", "--dry-run"]) == 0
    assert "12 of 12 programs parse as sql, 12 as functional: set program.language: sql" in capsys.readouterr().err


@pytest.mark.slow
def test_the_log_counts_the_development_questions_that_its_figure_is_for(capsys, files):
    rows = [*(files / "train.jsonl").read_text().splitlines()[:3], '{"question": "w", "query": "SELECT FROM ("}']
    write(files / "dev.jsonl", rows)
    said(capsys, "init", "--train", "train.jsonl", "--dev", "dev.jsonl")
    flags = ["--model.base=none", "--sft.exclude_own_program=false", "--evaluation.split=dev"]
    assert cli.main(["run", "config.yaml", "--evaluation.selectors=random", *flags]) == 0
    assert " (n = 3), lr" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# nothing\n", "seed: 3\n"])
def test_settings_that_name_no_data_are_no_run_of_covr(capsys, here, text):
    (here / "my.yaml").write_text(text)
    assert cli.main(["run", "my.yaml"]) == 2
    assert capsys.readouterr().err == (
        "rcr-train: error: my.yaml names no data: set data.task, or `rcr-train init --train my.jsonl` for your own "
        "files\n"
    )
