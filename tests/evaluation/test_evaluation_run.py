"""The comparison of a whole run with a language model: whom it asks, what that costs, and what a failure leaves."""

import json
import sqlite3
from contextlib import closing

import pytest
from answering import Composing, answering, asks
from demo_run import exact, report
from openai_server import OpenAIServer
from places import MODEL
from rcr_trainer import cli, pipeline
from rcr_trainer.baselines.simple import BM25Selector
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import read_split
from rcr_trainer.evaluation.report import MARKDOWN, PICKS, REPORT, read_picks
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.layers import load_config
from rcr_trainer.runs.tasks import Task, compared
from rcr_trainer.settings import EvaluationSettings, Settings

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.prompt import APPENDIX_D
from langchain_rcr.programs import ProgramSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("demo")]

PARSER = MODEL
LABELS = ProgramSpec(max_size=1)
SERVER = ["--llm.model=m", "--llm.base_url=http://127.0.0.1:9/v1"]


# ---------------------------------------------------------------- whom it asks


@pytest.mark.parametrize(("kind", "by_default"), [("completion", False), ("chat", False), ("local", True)])
def test_only_free_models_are_called_by_default(kind, by_default):
    named, nobody = LLMSettings(kind=kind, model="m"), LLMSettings(kind=kind)
    assert EvaluationSettings().asks(named) is by_default
    assert EvaluationSettings().asks(nobody) is False
    assert EvaluationSettings(answers=True).asks(named) is True
    assert EvaluationSettings(answers=False).asks(named) is False


def test_answers_without_a_model_are_refused():
    with pytest.raises(ValueError, match=r"evaluation\.answers = True contradicts llm\.model = null: name a model"):
        Settings.model_validate({"evaluation": {"answers": True}})


def test_a_run_names_the_model_and_scores_as_a_plain_loop_does(capsys, here):
    with answering(spec=LABELS) as server:
        assert cli.main(["run", "demo.yaml", *asks(server)]) == 0
    assert "Exact match: 8 queries of 8 programs, answered by m." in capsys.readouterr().out
    values = json.loads((here / "runs/demo/evaluation.json").read_text())
    asked = {"model": "m", "n": 8, "programs": 8, "missing": "", "unpaid": False, "order": "reversed", "told": 0}
    assert values["answers"] == asked
    assert list(values["selectors"]) == ["rcr", "random", "bm25"]
    split = read_split(here / "runs/demo/data")
    gold = {example.source: example.target for example in [*split.train, *split.test]}
    model = Composing(programs=gold, spec=LABELS)
    picks = BM25Selector([{"source": e.source, "target": e.target} for e in split.train]).pick(
        [e.source for e in split.test], 4
    )
    right = [
        model.answer(APPENDIX_D.text([Item(split.train[i].source, split.train[i].target) for i in row], query.source))
        == query.target
        for query, row in zip(split.test, picks, strict=True)
    ]
    assert 0 < sum(right) < 8
    assert values["selectors"]["bm25"]["exact_match"] == 100 * sum(right) / 8


def test_answers_are_compared_by_their_results_where_programs_can_be_run(here, capsys):
    (here / "runner.py").write_text("def sizes(program):\n    return len(program.split())\n", encoding="utf-8")
    with answering(spec=LABELS) as server:
        flags = [*asks(server), "--reward.executor=runner:sizes"]
        assert cli.main(["run", "demo.yaml", *flags]) == 0
        assert cli.main(["run", "demo.yaml", *asks(server), "--name=plain"]) == 0
    assert report("runs/plain").selectors["rcr"].execution is None
    picks = read_picks("runs/demo")
    for name, scores in report().selectors.items():
        rows = [(each.selectors[name], each.gold) for each in picks if each.selectors[name].answer is not None]
        same = [len(own.answer.split()) == len(gold.split()) for own, gold in rows]
        assert [own.execution for own, _ in rows] == same
        assert scores.execution == 100 * sum(same) / 8 >= scores.exact_match
    assert cli.main(["evaluate", "runs/demo"]) == 2
    assert "import runner:sizes (reward.executor): --trust" in capsys.readouterr().err
    assert cli.main(["evaluate", "runs/demo", "--trust"]) == 0  # its own settings have the executor
    assert report().selectors["rcr"].execution is not None


def test_a_missing_database_is_named_before_anything_is_trained_or_asked(here, capsys):
    (here / "all.jsonl").write_text(
        "".join(
            json.dumps({"source": f"how many {n}", "target": "SELECT 1", "tenant": name}) + "\n"
            for n, name in enumerate("ab" * 10)
        )
    )
    (here / "a.sqlite").touch()
    flags = ["--data.task=files", "--data.train=all.jsonl", "--data.test=all.jsonl", "--program.language=sql"]
    with OpenAIServer(lambda prompt: "SELECT 1") as server:
        assert cli.main(["run", "demo.yaml", *flags, *asks(server), "--reward.database={tenant}.sqlite"]) == 2
        assert server.requests == []
    said = capsys.readouterr().err
    assert "2': the database " in said
    assert said.endswith("/b.sqlite can't be read: no such file\n")


def test_a_database_is_needed_only_where_answers_run(here, capsys):
    for part, tenant in (("train", "b"), ("test", "a")):
        rows = [{"source": f"how many {n}", "target": f"SELECT {n}", "tenant": tenant} for n in range(20)]
        (here / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (here / "a.sqlite").touch()
    flags = ["--data.task=files", "--data.train=train.jsonl", "--data.test=test.jsonl", "--program.language=sql"]
    flags += ["--sft.exclude_own_program=false", "--reward.database={tenant}.sqlite"]
    with OpenAIServer(lambda prompt: "SELECT 1") as server:
        assert cli.main(["run", "demo.yaml", *flags, *asks(server)]) == 0
    assert report().selectors["rcr"].execution == 100 / 20


def test_rows_decide_whatever_exact_match_says_and_asking_without_examples_is_a_row(here, capsys):
    """Shown examples, it writes the right SQL in another way; without, it has the gold SQL of every other question."""
    with closing(sqlite3.connect(here / "books.sqlite")) as database, database:
        database.execute("CREATE TABLE book (pages INT)")
        database.executemany("INSERT INTO book VALUES (?)", [(1,), (2,)])

    def gold(n):
        return f"SELECT {' + '.join(['pages'] * (n + 1))} FROM {'book' if n < 35 else 'shelf'}"

    for part, numbers in {"train": range(1, 31), "test": range(36)}.items():
        rows = [
            {"source": f"{part} {n}", "target": gold(n), "schema": "CREATE TABLE book (pages INT)"} for n in numbers
        ]
        (here / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(prompt):
        n = int(prompt.rpartition("Source: test ")[2].split()[0])
        if prompt.count("Source: ") > 1:
            return f"{gold(n)} WHERE pages > 0"
        return gold(n) if n % 2 == 0 else "SELECT 0 FROM book"

    files = ["--data.task=files", "--data.train=train.jsonl", "--data.test=test.jsonl", "--program.language=sql:sqlite"]
    flags = [*files, "--reward.database=books.sqlite"]
    with OpenAIServer(answer) as server:
        assert cli.main(["run", "demo.yaml", *flags, *asks(server), "--evaluation.selectors=no_examples"]) == 0
        found = report()
        assert exact() == {"rcr": 0, "no_examples": 50}
        assert found.selectors["no_examples"].execution == pytest.approx(100 * 18 / 35, abs=0.01)
        assert "gets the right rows for 100.0 % of 35 questions, without examples, the best of what" in found.advice
        assert "rcr is worth deploying." in found.advice
        capsys.readouterr()
        by_default = ["--trust", "--evaluation.selectors=null"]
        assert cli.main(["evaluate", "runs/demo", *by_default]) == 0
        assert "Same rows: the 35 of them whose gold program gives a result to compare." in capsys.readouterr().out
        assert cli.main(["run", "demo.yaml", *flags, *asks(server), "--dry-run", "--evaluation.selectors=null"]) == 0
    found = report()
    assert {"no_examples", "bm25", "bm25_schema", "oracle"} < found.selectors.keys()
    assert "That is no clear difference: random, which needs no training, will do" in found.advice
    scores = found.selectors["no_examples"]
    assert scores.coverage == scores.prompt_length == scores.latency_ms == scores.latency_batch_ms == 0
    asked, out = len(found.selectors), capsys.readouterr().out
    assert f"answered with {asked} selectors' picks\nlanguage model: at most {36 * asked} calls" in out
    with closing(AnswerCache("runs/answers.sqlite")) as kept:
        assert (
            f"runs/answers.sqlite keeps {len(kept)} answers, none of which is asked for again\nthe run would be" in out
        )


@pytest.mark.parametrize("schema", [None, "", "CREATE TABLE book (pages INT)"])
@pytest.mark.parametrize("answers", [None, True, False])
def test_who_is_compared_by_default(answers, schema):
    query = Example("0", "q", "f", {} if schema is None else {"schema": schema})
    task = Task([], [], [], [query], [], ProgramSpec())
    llm = {"kind": "local", "model": None if answers is None else "m"}

    def names(**given):
        config = Settings.model_validate({"llm": llm, "evaluation": {"answers": answers, **given}})
        return compared(config, task), compared(config)

    usual = ["random", "bm25", "dense", "mmr", "dpp", "set_bsr", "knn_structures", "oracle"]
    own, known = names()
    assert [name for name in own if name not in usual] == ["no_examples"] * (answers is True) + ["bm25_schema"] * bool(
        schema
    )
    assert [name for name in own if name in usual] == usual
    assert known == [name for name in own if name != "bm25_schema"]
    assert names(split="dev") == (known, known)
    assert names(selectors=["bm25", "random", "bm25"]) == (["bm25", "random"],) * 2
    assert names(selectors=[]) == ([], [])


def test_after_grpo_both_policies_are_answered(capsys, here):
    flags = ["--grpo.enabled=true", "--grpo.epochs=1", "--grpo.max_steps=1", "--grpo.group_size=2"]
    with answering() as server:
        assert cli.main(["run", "demo.yaml", *asks(server), "--evaluation.answer_queries=3", *flags]) == 0
    assert list(exact()) == ["rcr", "rcr_without_rl", "random", "bm25"]
    assert None not in exact().values()
    assert (report().answers.n, report().n) == (3, 8)
    out = " ".join(capsys.readouterr().out.split())
    assert "8 questions with 8 different programs are too few to tell whether rcr is worth deploying" in out
    assert "There is no telling whether reinforcement helped (full coverage: " in out


def test_a_server_is_named_but_not_asked(capsys, here):
    assert cli.main(["run", "demo.yaml", *SERVER]) == 0
    captured = capsys.readouterr()
    assert "m is not asked, as it may charge for it: evaluation.answers: true" in captured.err
    assert report().answers is None
    assert "xact" not in captured.out
    assert not (here / "runs" / "answers.sqlite").exists()


def test_no_api_key_and_no_such_folder_are_found_before_there_is_a_run(capsys, here):
    reinforced = ["--grpo.enabled=true", "--reward.names=correctness", "--evaluation.answers=false"]
    for flags in (["--evaluation.answers=true"], reinforced):
        assert cli.main(["run", "demo.yaml", "--llm.model=m", *flags]) == 2
        assert "no API key" in capsys.readouterr().err
    assert cli.main(["run", "demo.yaml", "--llm.kind=local", "--llm.model=nowhere"]) == 2
    assert "'nowhere' can't be loaded" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_finished_run_without_a_model_is_given_one(capsys, here, monkeypatch):
    assert cli.main(["run", "demo.yaml"]) == 0
    assert report().answers is None
    coverage = {name: scores.coverage for name, scores in report().selectors.items()}
    flags = ["--llm.kind=local", f"--llm.model={PARSER}", "--evaluation.answer_queries=4"]
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/demo", *flags]) == 0
    assert "Exact match: 4 queries of 4 programs, answered by" in capsys.readouterr().out
    assert (report().answers.model, report().answers.n) == (str(PARSER), 4)
    assert {name: scores.coverage for name, scores in report().selectors.items()} == coverage
    found = exact()
    assert max(found.values()) > 0
    assert Run.open("runs/demo").config.llm.model is None

    # From elsewhere: the same account, and nothing is asked twice.
    folder = here / "runs" / "demo"
    answers = here / "runs" / "answers.sqlite"
    with closing(AnswerCache(answers)) as cache:
        spent = cache.spent(str(folder.resolve()))
    assert spent.calls > 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert cli.main(["evaluate", str(folder), *flags, f"--llm.budget_calls={spent.calls}"]) == 0
    assert exact(folder) == found
    with closing(AnswerCache(answers)) as cache:
        assert cache.spent(str(folder.resolve())) == spent
    assert list((here / "elsewhere").iterdir()) == []


# ---------------------------------------------------------------- what that costs


def test_more_budget_and_resume_answer_the_rest(capsys, here):
    with OpenAIServer() as server:
        flags = ["--llm.model=m", f"--llm.base_url={server.base_url}", "--evaluation.answers=true"]
        assert cli.main(["run", "demo.yaml", *flags, "--llm.budget_calls=10"]) == 0
        said, spent = capsys.readouterr(), "no exact match for random, bm25: the budget of 10 calls could be exceeded"
        assert said.err.count(spent) == " ".join(said.out.split()).count(spent.capitalize()) == 1
        assert [name for name, figure in exact().items() if figure is not None] == ["rcr"]
        assert all(scores.coverage > 0 for scores in report().selectors.values())
        assert Run.open("runs/demo").status == "finished"
        weights = here / "runs" / "demo" / "checkpoint" / "tri_encoder.json"
        trained = weights.stat().st_mtime_ns
        for more in (["--llm.budget_calls=10"], ["--llm.budget_calls=10", "--resume"]):
            assert cli.main(["run", "demo.yaml", *flags, *more]) == 0
            assert len(server.requests) == 10  # no more than was allowed, and nothing twice
        assert cli.main(["run", "demo.yaml", *flags, "--llm.budget_calls=100", "--resume"]) == 0
        assert None not in exact().values()
        asked = [request.prompt for request in server.requests]
        assert len(asked) == len(set(asked))
        capsys.readouterr()
        assert cli.main(["run", "demo.yaml", *flags]) == 0
        assert "evaluation: done before" in capsys.readouterr().err
        assert [request.prompt for request in server.requests] == asked
    assert weights.stat().st_mtime_ns == trained


def test_a_spent_budget_leaves_an_earlier_comparison_with_more_answers(capsys, here):
    with answering(spec=LABELS) as server:
        assert cli.main(["run", "demo.yaml", *asks(server)]) == 0
        files = {name: (here / "runs/demo" / name).read_bytes() for name in (REPORT, PICKS, MARKDOWN)}
        calls = len(server.requests)
        flags = ["evaluate", "runs/demo", "--trust", "--k=2"]
        capsys.readouterr()
        assert cli.main([*flags, f"--llm.budget_calls={calls}"]) == 2
        assert "the comparison in runs/demo has more answers, and stays" in capsys.readouterr().err
        assert len(server.requests) == calls
        assert files == {name: (here / "runs/demo" / name).read_bytes() for name in files}
        assert Run.open("runs/demo").status == "finished"
        # One that is no worse replaces it: here one without any answers, since the other is damaged.
        (here / "runs/demo" / REPORT).write_text("{}")
        assert cli.main([*flags, f"--llm.budget_calls={calls}"]) == 0
        assert report().k == 2
        assert cli.main([*flags, f"--llm.budget_calls={2 * calls}"]) == 0
    assert None not in exact().values()


def test_a_model_that_cannot_be_asked_fails_the_stage_and_leaves_coverage_or_the_evaluation_before(capsys, here):
    with OpenAIServer() as server:
        server.fault_of = lambda request: "404"
        assert cli.main(["run", "demo.yaml", *asks(server)]) == 2
    assert "llm.model" in capsys.readouterr().err.splitlines()[-1]
    assert report().selectors["rcr"].coverage > 0
    assert not Run.open("runs/demo").done("evaluation")
    assert cli.main(["evaluate", "runs/demo", "--evaluation.answers=false"]) == 0
    with answering() as server:
        assert cli.main(["run", "demo.yaml", "--overwrite", *asks(server)]) == 0
    names = ("evaluation.json", "picks.jsonl", "report.md", "checkpoint/README.md")
    before = {name: (here / "runs/demo" / name).read_bytes() for name in names}
    with OpenAIServer() as server:
        server.fault_of = lambda request: "401"
        flags = ["--llm.kind=chat", "--llm.model=m", f"--llm.base_url={server.base_url}", "--evaluation.answers=true"]
        assert cli.main(["evaluate", "runs/demo", *flags]) == 2
        assert "the key is missing or wrong" in capsys.readouterr().err
        assert server.requests
    assert {name: (here / "runs/demo" / name).read_bytes() for name in names} == before


def test_an_evaluation_with_other_settings_is_not_shown_as_the_runs_own(capsys, here):
    assert cli.main(["run", "demo.yaml"]) == 0
    assert "Other settings than the run's own" not in capsys.readouterr().out
    card = here / "runs/demo/checkpoint/README.md"
    before = card.read_text(encoding="utf-8")
    assert cli.main(["evaluate", "runs/demo", "--split=dev", "--k=6", "--threads=1"]) == 0
    said = "Other settings than the run's own: evaluation.split ('test', now 'dev'), evaluation.k (4, now 6)."
    assert said in " ".join(capsys.readouterr().out.split())
    assert card.read_text(encoding="utf-8") == before
    assert cli.main(["run", "demo.yaml", "--resume"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert "than the run's own: evaluation.split" in (here / "runs/demo/report.md").read_text(encoding="utf-8")
    config = load_config(here / "demo.yaml")
    assert not pipeline.is_done(config)
    pipeline.resumed(config)
    assert (report().k, report().part, report().changed) == (4, "test", [])
    assert pipeline.is_done(config)
    assert cli.main(["evaluate", "runs/demo", "--k=6"]) == 0
    assert cli.main(["evaluate", "runs/demo"]) == 0
    assert (report().k, report().changed) == (4, [])


def test_a_dry_run_counts_the_answers(capsys, here):
    paid = [*SERVER, "--evaluation.answers=true", "--llm.max_tokens=10"]
    assert cli.main(["run", "demo.yaml", "--dry-run", *paid]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "pool 60, training 52, dev 8, test 8",
        "evaluation: 8 test queries, answered with 3 selectors' picks",
    ]
    assert lines[2].startswith("language model: at most 24 calls, ")
    assert "and 240 completion tokens" in lines[2]

    grpo = ["--grpo.enabled=true", "--grpo.epochs=1", "--grpo.group_size=2", "--reward.names=correctness"]
    assert cli.main(["run", "demo.yaml", "--dry-run", *paid, *grpo, "--evaluation.answer_queries=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "GRPO: 52 queries, reward correctness",
        "evaluation: 5 test queries, answered with 4 selectors' picks",
    ]
    # One epoch with two sequences a query, twice the development queries, five test queries for four selectors.
    stages = {"development": 2 * 8, "training": 52 * 2, "evaluation": 5 * 4}
    said = zip(stages.items(), lines[3:6], strict=True)
    assert all(line.startswith(f"  {name}: at most {calls} calls, ") for (name, calls), line in said)
    assert lines[6].startswith(f"language model: at most {sum(stages.values())} calls, ")
    assert lines[6].endswith("1 min (at 1 s an answer, 16 at a time)")

    assert cli.main(["run", "demo.yaml", "--dry-run", *SERVER]) == 0
    assert capsys.readouterr().out.splitlines() == ["pool 60, training 52, dev 8, test 8"]
    assert not (here / "runs").exists()
