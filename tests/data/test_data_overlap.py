"""What test and training data share: counted by pair, question and program, and said before anything is trained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rcr_trainer import cli
from rcr_trainer.data.check import check_split, shared
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example, Split, write_split
from rcr_trainer.runs.tasks import check_task, divide, load_split, say_data
from rcr_trainer.settings import DataSettings, Settings

from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()
FLATTERS = "figures on them say nothing about new questions"


def examples(*pairs):
    return [Example(str(i), source, target) for i, (source, target) in enumerate(pairs)]


TRAINING = examples(
    ("how many rivers", "count ( river ( 'x' ) )"), ("which states", "state"), ("which states", "state ( big )")
)


def test_by_hand():
    held_out = examples(
        ("how many  Rivers", "count ( river ( 'x' ) )"),  # the pair, but for case and spaces
        ("which states", "count ( state )"),  # the question alone
        ("which states", "state ( big )"),  # the pair, once
        ("how many lakes", "count ( river ( 'y' ) )"),  # the program, up to its value
        ("something else", "else"),
    )
    assert shared(held_out, TRAINING) == ([0, 2], [1])
    assert shared(examples(("un café", "Café")), examples(("Un cafe\u0301", "café"))) == ([0], [])
    assert shared([], TRAINING) == shared(held_out, []) == ([], [])
    there, same, elsewhere = (
        [replace(each, fields={"db_id": name}) for each in some]
        for some, name in ((TRAINING, "a"), (held_out, "a"), (held_out, "b"))
    )
    assert shared(same, there) == ([0, 2], [1])
    assert shared(elsewhere, there) == ([0, 2], [])  # about another database it is another question
    dev, test = check_split(Split("mine", TRAINING, [], held_out), SPEC)
    assert dev.findings == []
    assert [(finding.text, finding.fix) for finding in test.findings] == [
        (f"pairs that are also in train: 2 of 5; {FLATTERS}", True),
        (f"questions that train has with another program: 1 of 5; {FLATTERS}", True),
        (
            "programs (values aside) that also occur in train: 3 of 5; normal where both come from one source, but "
            "they test no new combinations",
            False,
        ),
    ]


def test_what_a_split_of_its_own_shares_is_said_before_training(caplog):
    caplog.set_level("INFO")
    split = Split("mine", TRAINING, [], examples(("how many rivers", "count ( river ( 'x' ) )")))
    say_data(DataSettings(task="covr"), split, SPEC)
    assert [(record.levelname, record.getMessage().partition(";")[0]) for record in caplog.records] == [
        ("WARNING", "test: pairs that are also in train: 1 of 1"),
        ("INFO", "test: programs (values aside) that also occur in train: 1 of 1"),
    ]


def write(path, pairs):
    path.write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs), encoding="utf-8")


@pytest.fixture
def files(here):
    pairs = [(f"question {i}", f"f{i % 10} ( g{i % 7} )") for i in range(40)]
    write(here / "train.jsonl", pairs[:30])
    write(here / "test.jsonl", [*pairs[30:], ("Question  3", "f3 ( g3 )"), ("question 4", "other")])
    settings = {
        "data": {"task": "files", "train": "train.jsonl", "test": "test.jsonl", "dev_size": 5},
        "model": {"family": "lexical", "dim": 16},
        "sft": {"epochs": 1},
        "evaluation": {"selectors": ["bm25"]},
        "threads": 1,
    }
    (here / "my.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return here


FOUND = (
    "train.jsonl 30 examples, test.jsonl 12 examples; test.jsonl: programs (values aside) that also occur in "
    "train.jsonl: 1 of 12; normal where both come from one source, but they test no new combinations; to fix: "
    f"test.jsonl: pairs that are also in train.jsonl: 1 of 12; {FLATTERS}; "
    f"test.jsonl: questions that train.jsonl has with another program: 1 of 12; {FLATTERS} "
    "(`rcr-train data check` names the rows)"
)


@pytest.mark.slow
def test_a_run_says_it_before_it_trains_and_the_paragraph_repeats_it(files, capsys):
    assert cli.main(["run", "my.yaml", "--dry-run"]) == 0
    assert FOUND in capsys.readouterr().err.splitlines()
    assert cli.main(["run", "my.yaml"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines.index(FOUND) < lines.index("sft …")
    assert "1 of 12 questions are in the pool with their programs: rcr has seen" in " ".join(captured.out.split())
    assert cli.main(["run", "my.yaml"]) == 0
    assert "also" not in capsys.readouterr().err


def test_programs_of_a_split_folder_that_do_not_parse_are_reported(tmp_path, caplog):
    split = covr_split("110", 0, 12, 3)
    torn = [replace(each, target=each.target.rstrip(" )")) for each in split.train[:2]]
    write_split(tmp_path / "split", replace(split, train=[*torn, *split.train[2:]]))
    config = Settings.model_validate({"data": {"task": "files", "directory": tmp_path / "split"}})
    check_task(config, divide(config, load_split(config.data, 0)))
    assert "2 of 12 programs don't parse as 'functional'" in caplog.text
