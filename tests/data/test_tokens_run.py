"""Runs on the user's own files when programs don't parse: none of them, some of them, or nearly no example at all."""

import json
from pathlib import Path

import numpy as np
import pytest
import warm
from answering import answering, asks
from rcr_trainer import cli
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import write_examples
from rcr_trainer.data.files import read_split
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import EvaluationReport
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.policies import load_model
from rcr_trainer.runs.tasks import check_task, divide
from rcr_trainer.settings import Settings
from reports import logged

from langchain_rcr.basics.items import Item
from langchain_rcr.families.structure.inventory import SPARE
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.retriever import SequentialCompositionalRetriever

pytestmark = pytest.mark.slow

SPLIT = covr_split("110", 0, 40, 10)
SETTINGS = """
data: {task: files, train: train.jsonl, test: test.jsonl}
model: {family: FAMILY, dim: 64, base: none}
sft: {epochs: 1}
evaluation: {selectors: [random, bm25, oracle]}
threads: 1
"""


def broken(example):
    """The program without its last brackets: it parses in no language that has brackets."""
    return example.target.rstrip(" )")


def whole(example):
    return example.target


def write(path, examples, target):
    path.write_text("".join(json.dumps({"source": e.source, "target": target(e)}) + "\n" for e in examples))


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    write(here / "train.jsonl", SPLIT.train, broken)
    write(here / "test.jsonl", SPLIT.test, whole)
    for family in ("structure", "lexical"):
        (here / f"{family}.yaml").write_text(SETTINGS.replace("FAMILY", family))
    return here


def language_of(run):
    return divide(run.config, read_split(run.path / "data")).spec.language


def lines(capsys, part):
    return [line for line in capsys.readouterr().err.splitlines() if part in line]


@pytest.mark.parametrize("family", ["structure", "lexical"])
def test_where_no_program_parses_token_ngrams_stand_for_structures(capsys, here, family):
    assert cli.main(["run", f"{family}.yaml"]) == 0
    first = " ".join(broken(SPLIT.train[0]).split())[:80]
    assert lines(capsys, "parse") == [
        f"none of the 40 programs parses as 'functional' (the first is '{first}'): token n-grams stand for structures"
    ]
    run = Run.open(here / "runs" / family)
    assert language_of(run) == "tokens"
    assert run.config.program.language == "functional"
    report = EvaluationReport.read(run.path)
    assert (report.n, report.skipped_queries) == (10, 0)
    assert report.selectors["random"].coverage < report.selectors["rcr"].coverage <= report.selectors["oracle"].coverage

    # The same settings continue it, and evaluating it again finds the same.
    assert cli.main(["run", f"{family}.yaml"]) == 0
    assert cli.main(["evaluate", f"runs/{family}"]) == 0
    again = EvaluationReport.read(run.path)
    assert {name: scores.coverage for name, scores in again.selectors.items()} == {
        name: scores.coverage for name, scores in report.selectors.items()
    }
    assert lines(capsys, "parse") == []


def test_tokens_by_name_give_the_same_without_a_warning(capsys, here):
    assert cli.main(["run", "structure.yaml"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "structure.yaml", "--name=named", "--program.language=tokens"]) == 0
    assert lines(capsys, "parse") == []
    models = [load_model(Settings(), here / "runs" / name / "checkpoint") for name in ("structure", "named")]
    assert models[0].fingerprint() == models[1].fingerprint()


def test_the_checkpoint_serves_by_tokens(here):
    assert cli.main(["run", "structure.yaml"]) == 0
    retriever = SequentialCompositionalRetriever.from_pretrained(here / "runs" / "structure", k=3)
    assert retriever.store.encoder.query.inventory.spec == ProgramSpec("tokens")
    question = SPLIT.test[0].source
    assert len({document.id for document in retriever.invoke(question)}) == 3
    new = retriever.store.encoder.candidate
    rows = new.vectors(new.featurize([Item(question, "exists ( find ( dog"), Item(question, "unheard of")]))
    assert rows[0].any()
    known = len(new.inventory)
    assert not rows[1][:known].any()
    assert rows[1][known : known + SPARE].any()  # words that came in after training


@pytest.mark.parametrize("stage", ["data", "sft"])
def test_a_run_killed_in_between_is_resumed_by_tokens(capsys, here, stage):
    script = (
        "import os, signal\nfrom rcr_trainer import cli\nfrom rcr_trainer.runs import folder as runs\n"
        "save = runs.Run._save\n"
        "def kill(self):\n"
        "    save(self)\n"
        f"    if {stage!r} in self._record['stages']: os.kill(os.getpid(), signal.SIGKILL)\n"
        "runs.Run._save = kill\n"
        "cli.main(['run', 'structure.yaml'])"
    )
    killed = warm.run("-c", script, cwd=here)
    assert killed.returncode == -9, killed.stderr
    assert cli.main(["run", "structure.yaml", "--resume"]) == 0
    assert lines(capsys, "done before")
    run = Run.open(here / "runs" / "structure")
    assert language_of(run) == "tokens"
    assert load_model(run.config, run.checkpoint).query.inventory.spec.language == "tokens"
    assert EvaluationReport.read(run.path).skipped_queries == 0


def test_a_splits_record_of_another_run_does_not_bind(capsys, here):
    assert cli.main(["run", "structure.yaml"]) == 0
    folder = here / "runs" / "structure" / "data"
    assert read_split(folder).meta["program_language"] == "tokens"
    write_examples(folder / "train.jsonl", SPLIT.train)
    (here / "second.yaml").write_text(
        SETTINGS.replace("FAMILY", "structure").replace("train: train.jsonl, test: test.jsonl", f"directory: {folder}")
    )
    assert cli.main(["run", "second.yaml"]) == 0
    assert language_of(Run.open(here / "runs" / "second")) == "functional"


def test_reinforcement_goes_on_by_tokens(here):
    more = ["--grpo.enabled=true", "--grpo.epochs=1", "--grpo.group_size=2", "--sft.k=2"]
    programs = {e.source: broken(e) for e in SPLIT.train} | {e.source: e.target for e in SPLIT.test}
    with answering(programs, ProgramSpec("tokens", max_size=2)) as server:
        more += asks(server)
        assert cli.main(["run", "structure.yaml", *more, "--grpo.k=2", "--evaluation.answer_queries=3"]) == 0
    run = Run.open(here / "runs" / "structure")
    figures = logged(run.path, "grpo")[-1]
    assert figures["unscored"] == 0
    assert 0 < figures["reward"] <= 1
    assert EvaluationReport.read(run.path).answers.n == 3


def test_a_corpus_in_the_wrong_language_is_an_error():
    config = Settings.model_validate({"program": {"language": "json"}})
    with pytest.raises(DataError, match=r"no program of the pool parses with program\.language = 'json'"):
        check_task(config, divide(config, SPLIT))


# ---------------------------------------------------------------- noisy programs


@pytest.mark.parametrize(("every", "hint"), [(3, ""), (40, " (2 of 40 programs parse as functional, 1 as python)")])
def test_noisy_programs_stay_in_the_pool_and_count_by_their_tokens(capsys, here, every, hint):
    count = {3: 13, 40: 38}[every]
    noisy = {id(e) for n, e in enumerate(SPLIT.train) if (n % 3 == 1 if every == 3 else n not in (0, 20))}
    write(here / "train.jsonl", SPLIT.train, lambda e: broken(e) if id(e) in noisy else whole(e))
    assert cli.main(["run", "structure.yaml", "--data.dev_size=0"]) == 0
    (said,) = lines(capsys, "parse")
    assert f"programs that don't parse as functional, which count by their tokens alone: {count} of 40{hint}" in said
    run = Run.open(here / "runs" / "structure")
    assert language_of(run) == "functional"
    assert EvaluationReport.read(run.path).pool_size == 40
    model = load_model(run.config, run.checkpoint)
    assert len(model.query.dual) == 40


@pytest.mark.parametrize("family", ["structure", "lexical"])
def test_development_queries_that_do_not_parse_are_as_none(here, family):
    write(here / "train.jsonl", SPLIT.train, whole)
    write(here / "dev.jsonl", SPLIT.test[:4], broken)
    assert cli.main(["run", f"{family}.yaml", "--data.dev=dev.jsonl", "--evaluation.selectors=bm25"]) == 0
    run = Run.open(here / "runs" / family)
    assert all("dev_coverage" not in row for row in logged(run.path, "sft"))
    assert EvaluationReport.read(run.path).n == 10


def test_queries_that_are_compared_on_must_parse(capsys, here):
    write(here / "train.jsonl", SPLIT.train, whole)
    write(here / "test.jsonl", SPLIT.test, broken)
    assert cli.main(["run", "structure.yaml"]) == 2
    assert "none of the 10 test queries has a program that parses as 'functional'" in capsys.readouterr().err
    assert not (here / "runs").exists()
    write(here / "test.jsonl", SPLIT.test, lambda e: whole(e) if e is SPLIT.test[3] else broken(e))
    assert cli.main(["run", "structure.yaml"]) == 0
    report = EvaluationReport.read(here / "runs" / "structure")
    assert (report.n, report.skipped_queries) == (1, 9)


# ---------------------------------------------------------------- few examples


@pytest.mark.parametrize("target", [whole, broken])
@pytest.mark.parametrize("family", ["structure", "lexical"])
@pytest.mark.parametrize("count", [5, 8, 20])
def test_few_examples_train(here, family, count, target):
    write(here / "train.jsonl", SPLIT.train[:count], target)
    write(here / "test.jsonl", SPLIT.test[:1], whole)
    assert cli.main(["run", f"{family}.yaml"]) == 0
    run = Run.open(here / "runs" / family)
    assert EvaluationReport.read(run.path).selectors["rcr"].coverage > 0
    vectors = load_model(run.config, run.checkpoint).encode_queries(["is there a dog ?", ""])
    assert np.isfinite(vectors).all()
