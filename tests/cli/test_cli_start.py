"""`sft.checkpoint`: a run that takes its policy from elsewhere instead of training one."""

import json
import shutil
from pathlib import Path

import pytest
from rcr_trainer import cli
from reports import logged

from langchain_rcr.policy.triencoder import TriEncoder

pytestmark = pytest.mark.slow

CONFIG = """
data: {split: 110, train_size: 40, test_size: 8, dev_size: 0}
model: {family: lexical, dim: 16}
sft: {epochs: 2}
grpo: {epochs: 2, group_size: 8, lr: 0.001}
reward: {names: [context_coverage]}
evaluation: {selectors: [random]}
threads: 1
"""
START = ["run", "demo.yaml", "--name=second", "--sft.checkpoint"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the settings and a run with GRPO."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "demo.yaml").write_text(CONFIG, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["run", "demo.yaml", "--name=first", "--grpo.enabled=true"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(here: Path, first: Path) -> Path:
    shutil.copytree(first, here, dirs_exist_ok=True)
    return here / "runs"


def weights(folder):
    return TriEncoder.from_pretrained(folder).fingerprint()


@pytest.mark.parametrize(
    ("start", "taken"),
    [
        ("runs/first", "checkpoint-sft"),
        ("runs/first/checkpoint-sft", "checkpoint-sft"),
        ("runs/first/checkpoint", "checkpoint"),
    ],
)
def test_the_policy_is_taken_and_nothing_is_trained(capsys, here, start, taken):
    assert cli.main([*START, start]) == 0
    second = here / "second"
    assert weights(second / "checkpoint") == weights(here / "first" / taken)
    assert logged(second, "sft") == []
    assert (second / "checkpoint/pool.jsonl").read_bytes() == (here / "first/checkpoint/pool.jsonl").read_bytes()
    report = json.loads((second / "evaluation.json").read_text())
    before = json.loads((here / "first/evaluation.json").read_text())
    name = {"checkpoint": "rcr", "checkpoint-sft": "rcr_without_rl"}[taken]
    assert report["selectors"]["rcr"]["coverage"] == before["selectors"][name]["coverage"]


def test_grpo_from_a_policy_ends_where_the_run_that_trained_it_ended(here):
    assert weights(here / "first/checkpoint") != weights(here / "first/checkpoint-sft")
    assert cli.main([*START, "runs/first", "--grpo.enabled=true"]) == 0
    for checkpoint in ("checkpoint", "checkpoint-sft"):
        assert weights(here / "second" / checkpoint) == weights(here / "first" / checkpoint)


def test_a_run_without_grpo_serves_too_and_is_not_needed_afterwards(here):
    assert cli.main(["run", "demo.yaml", "--name=alone"]) == 0
    assert cli.main([*START, "runs/alone"]) == 0
    assert weights(here / "second/checkpoint") == weights(here / "alone/checkpoint")
    (here / "alone").rename(here / "gone")
    assert cli.main([*START, "runs/alone"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sft.checkpoint=nowhere"], "nowhere is not a checkpoint: no such folder"),
        (["--model.family=lexical", "--model.tau=0.5"], "sft.checkpoint = runs/first has tau 0.2: set model.tau: 0.2"),
        (["--model.lam=0.5"], "sft.checkpoint = runs/first has lam 1.0: set model.lam: 1.0"),
        (["--seed=1"], "sft.checkpoint = runs/first has another pool: "),
        (
            ["--grpo.enabled=true", "--grpo.queries=10"],
            "another pool: 0 of this run's 30 examples are not in it, 10 of its own are not in this run's; use the "
            "same data, seed and grpo.queries",
        ),
    ],
)
def test_a_policy_that_does_not_fit_is_found_before_there_is_a_folder(capsys, here, flags, message):
    capsys.readouterr()
    assert cli.main([*START, "runs/first", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (here / "second").exists()


@pytest.mark.parametrize("start", ["runs/first", "runs/second/../first/checkpoint"])
def test_a_run_does_not_take_and_clear_its_own_policy(capsys, here, start):
    before = weights(here / "first/checkpoint")
    flags = ["--name=first", "--overwrite", "--grpo.enabled=true"]
    assert cli.main(["run", "demo.yaml", *flags, f"--sft.checkpoint={start}"]) == 2
    assert "is in this run's own folder: give this run another name" in capsys.readouterr().err
    assert weights(here / "first/checkpoint") == before


def test_a_policy_of_another_family(capsys, here, tmp_path):
    (tmp_path / "demo.yaml").write_text(CONFIG.replace("{family: lexical, dim: 16}", "{}"), encoding="utf-8")
    assert cli.main([*START, "runs/first"]) == 2
    assert "sft.checkpoint = runs/first has family lexical: set model.family: lexical" in capsys.readouterr().err


def test_a_run_that_has_no_policy_yet(capsys, here):
    record = json.loads((here / "first/run.json").read_text())
    record["stages"] = {"data": record["stages"]["data"]}
    (here / "first/run.json").write_text(json.dumps(record))
    assert cli.main([*START, "runs/first"]) == 2
    assert "sft.checkpoint = runs/first is a run that has no policy yet: finish it first" in capsys.readouterr().err
