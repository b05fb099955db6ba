"""What test and training data share: counted by pair, question and program, and said before anything is trained."""

from __future__ import annotations

import json

import pytest
from rcr_trainer import cli
from rcr_trainer.data import Example, Overlap, overlap

from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec()


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
    assert overlap(held_out, TRAINING, SPEC) == Overlap(n=5, pairs=2, questions=3, programs=3)
    assert overlap([], TRAINING, SPEC) == Overlap(0, 0, 0, 0)
    assert overlap(held_out, [], SPEC) == Overlap(5, 0, 0, 0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Overlap(150, 0, 0, 0), ""),
        (Overlap(150, 0, 0, 90), ""),
        (
            Overlap(150, 12, 12, 90),
            "12 of 150 test pairs are also in the training file: figures on them say nothing about new questions",
        ),
        (
            Overlap(150, 12, 15, 90),
            "12 of 150 test pairs are also in the training file, 3 of 150 test questions are in the training file with "
            "another program: figures on them say nothing about new questions",
        ),
    ],
)
def test_what_flatters_is_a_warning(found, said):
    assert found.warning("test", "the training file") == said


def test_programs_that_repeat_are_no_fault():
    assert Overlap(150, 0, 0, 0).note("test", "train.jsonl") == ""
    assert Overlap(150, 12, 12, 90).note("test", "train.jsonl") == (
        "90 of 150 test programs (values aside) also occur in train.jsonl: normal where both come from one source; "
        "they don't test new combinations"
    )


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
        "tensorboard": False,
        "threads": 1,
    }
    (here / "my.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return here


FLATTERS = "figures on them say nothing about new questions"
FOUND = (
    "train.jsonl 30 examples, test.jsonl 12 examples; to be mended: test.jsonl: pairs that are also in train.jsonl: "
    f"1 of 12; {FLATTERS}; test.jsonl: questions that train.jsonl has with another program: 1 of 12; {FLATTERS} "
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
    assert "1 of 12 questions are in the pool with their programs, which flatters." in " ".join(captured.out.split())
    assert cli.main(["run", "my.yaml"]) == 0
    assert "also" not in capsys.readouterr().err
