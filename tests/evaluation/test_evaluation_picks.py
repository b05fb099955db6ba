"""picks.jsonl by hand, written whole, read back."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.harness import answer, evaluate
from rcr_trainer.evaluation.report import read_picks, write_picks
from rcr_trainer.llm.cache import Answer

from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec

POOL = [Example(str(i), f"q{i}", target) for i, target in enumerate(["a ( b )", "c", "a ( d )", "zz ( y )"])]
QUERIES = [Example("t0", "x0", "a ( b )"), Example("t1", "broken", "( ("), Example("t2", "x2", "a ( z )")]


def picked(**options):
    selectors = {
        "rcr": lambda queries, k, exclude: np.array([[1, 2, 0][:k]] * len(queries)),
        "random": lambda queries, k, exclude: np.array([[3, 1, 0][:k]] * len(queries)),
    }
    return evaluate(selectors, POOL, QUERIES, ProgramSpec(), **{"k": 2, "split": "toy", "seed": 0, **options})


def test_rows_by_hand():
    _, picks = picked()
    assert [each.id for each in picks] == ["t0", "t2"]
    first = picks[0]
    ours, theirs = first.selectors["rcr"], first.selectors["random"]
    assert (first.question, first.gold, ours.kind) == ("x0", "a ( b )", "trained")
    assert [each.program for each in picks] == [ProgramSpec().key(each.gold) for each in picks]
    assert first.structures == ["<root> -> a", "<root> -> a -> b", "a", "a -> b", "b"]
    assert ours.picks == [POOL[1], POOL[2]]
    assert ours.covered == [2, 0, 2, 0, 0]  # only the second pick has <root> -> a and a
    assert theirs.covered == [0] * 5
    assert picked(k=3)[1][0].selectors["rcr"].covered == [2, 3, 2, 3, 3]
    assert (ours.answer, ours.exact, ours.jaccard, ours.execution) == (None, None, None, None)


def test_answers_are_kept_with_the_picks():
    def generate(prompts):
        return [
            Answer("a(b)", program="a(b)") if "a ( d )" in prompt else Answer(None, "refused") for prompt in prompts
        ]

    report, picks = picked()
    llm = SimpleNamespace(generate=generate, name="m", prompt=APPENDIX_D, money=lambda *_: None)
    answer(report, picks, ProgramSpec(), llm, queries=1)
    row = picks[0].selectors["rcr"]
    assert (row.answer, row.exact, row.jaccard) == ("a(b)", True, 1.0)
    row = picks[0].selectors["random"]
    assert (row.answer, row.exact, row.jaccard) == (None, False, 0.0)
    assert picks[1].selectors["rcr"].exact is None  # not asked


def test_what_is_written_is_read_back(tmp_path):
    _, picks = picked()
    write_picks(tmp_path, picks)
    path = tmp_path / "picks.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[:3] == [
        {"example": {"id": e.id, "source": e.source, "target": e.target}} for e in (POOL[i] for i in (1, 2, 3))
    ]
    assert [line["id"] for line in lines[3:]] == ["t0", "t2"]
    assert lines[3]["structures"] == ["<root> -> a", "<root> -> a -> b", "a", "a -> b", "b"]
    assert lines[3]["selectors"] == {
        "rcr": {"kind": "trained", "picks": [0, 1], "covered": [2, 0, 2, 0, 0]},
        "random": {"kind": "trained", "picks": [2, 0], "covered": [0, 0, 0, 0, 0]},
    }
    assert read_picks(tmp_path) == picks


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda text: text.replace('"kind":"trained"', '"kind":"great"', 1),
            "line 4: selectors.rcr.kind: ",
        ),
        (lambda text: text + '{"id": "t9', r"picks.jsonl, line 6: "),
        (lambda text: text.replace('"random"', '"other"', 1), "damaged: the selectors don't have the same questions"),
        (lambda text: "".join(text.splitlines(True)[1:]), "damaged: it lacks examples that were picked"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, message):
    write_picks(tmp_path, picked()[1])
    path = tmp_path / "picks.jsonl"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_picks(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"can't read .*picks.jsonl: No such file"):
        read_picks(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    _, picks = picked()
    write_picks(tmp_path, picks)
    path = tmp_path / "picks.jsonl"
    old = path.read_bytes()
    picks[1].selectors["rcr"].answer = "half a character: \ud800"
    with pytest.raises(ValueError, match="utf-8"):
        write_picks(tmp_path, picks)
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["picks.jsonl"]


def test_no_questions_are_read_as_they_were_written(tmp_path):
    write_picks(tmp_path, [])
    assert read_picks(tmp_path) == []
