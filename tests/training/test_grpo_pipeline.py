"""The GRPO stage of a run: what it leaves, what a kill leaves, and what is told beforehand."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import warm
from answering import answering, asks
from rcr_trainer import cli, pipeline
from rcr_trainer.data.files import read_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import AnswerCache, Use
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.layers import load_config
from rcr_trainer.runs.policies import build_model
from rcr_trainer.runs.tasks import divide, load_split
from rcr_trainer.settings import Settings
from reports import logged

from langchain_rcr.policy.triencoder import TriEncoder

pytestmark = pytest.mark.slow

CONFIG = """
data: {split: 110, train_size: 40, test_size: 8, dev_size: 8}
model: {family: lexical, dim: 16}
sft: {epochs: 2}
grpo: {enabled: true, epochs: 2, group_size: 8, lr: 0.001}
reward: {names: [context_coverage]}
evaluation: {selectors: [random]}
threads: 1
"""


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    (here / "demo.yaml").write_text(CONFIG, encoding="utf-8")
    return here


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "demo.yaml").write_text(CONFIG, encoding="utf-8")
    assert cli.main(["run", str(folder / "demo.yaml"), f"--output={folder / 'run'}"]) == 0
    return folder / "run"


def weights(folder):
    return TriEncoder.from_pretrained(folder).fingerprint()


def rows(folder):
    return [{k: v for k, v in row.items() if k != "time"} for row in logged(folder, "grpo")]


def test_grpo_is_refused_on_a_device_that_cannot_draw(capsys, monkeypatch, here):
    monkeypatch.setattr(pipeline, "device_of", lambda config: config.device)  # Apple's GPUs have no float64
    assert cli.main(["run", "demo.yaml", "--device=mps"]) == 2
    assert "device = 'mps' has no numbers of 64 bits, with which GRPO draws" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_run_with_grpo_compares_the_policy_before_and_after(capsys, here):
    assert cli.main(["run", "demo.yaml", "--grpo.best_by=coverage"]) == 0
    out = capsys.readouterr().out
    folder = here / "runs" / "demo"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint", "checkpoint-sft", "config.yaml", "data", "evaluation.json", "metrics.jsonl",
        "picks.jsonl", "report.md", "run.json", "run.lock",
    ]  # fmt: skip
    report = json.loads((folder / "evaluation.json").read_text())
    assert list(report["selectors"]) == ["rcr", "rcr_without_rl", "random"]
    assert "rcr_without_rl" in out
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4]
    assert {"reward", "loss", "kl", "lr", "dev_coverage", "dev_reward"} <= rows(folder)[-1].keys()
    assert (folder / "checkpoint-sft" / "pool.jsonl").read_bytes() == (
        folder / "checkpoint" / "pool.jsonl"
    ).read_bytes()
    assert Run.open(folder).done("grpo")
    assert cli.main(["run", "demo.yaml", "--grpo.best_by=coverage"]) == 0
    assert capsys.readouterr().out == out
    assert cli.main(["evaluate", "runs/demo", "--split", "dev"]) == 0
    assert set(json.loads((folder / "evaluation.json").read_text())["selectors"]) == {"rcr", "rcr_without_rl", "random"}


def test_with_dev_queries_gone_the_reinforced_policy_is_another_one(here):
    assert cli.main(["run", "demo.yaml", "--data.dev_size=0"]) == 0
    assert weights(here / "runs/demo/checkpoint") != weights(here / "runs/demo/checkpoint-sft")


def test_sft_alone_can_be_continued(capsys, here):
    assert cli.main(["sft", "demo.yaml"]) == 0
    folder = here / "runs" / "demo"
    assert not (folder / "checkpoint-sft").exists()
    assert cli.main(["evaluate", "runs/demo"]) == 2
    assert "finish it with" in capsys.readouterr().err
    before = weights(folder / "checkpoint")
    assert cli.main(["run", "demo.yaml"]) == 0
    assert weights(folder / "checkpoint-sft") == before


def test_without_sft_the_policy_is_reinforced_as_it_was_built(capsys, here):
    assert cli.main(["run", "demo.yaml", "--sft.enabled=false", "--data.dev_size=0"]) == 0
    folder = here / "runs" / "demo"
    config = load_config(here / "demo.yaml", {"sft.enabled": "false", "data.dev_size": "0"})
    split = read_split(folder / "data")
    task = divide(config, split)
    torch.manual_seed(config.seed)
    model = build_model(config, config.model, [each.item for each in task.pool], task.spec, {})
    model.save_pretrained(here / "untrained")
    assert weights(here / "untrained") == weights(folder / "checkpoint-sft") != weights(folder / "checkpoint")
    assert not logged(folder, "sft")


def test_without_sft_something_else_must_train(capsys, here):
    for flags, message in (
        (["--grpo.enabled=false"], "sft.enabled = False contradicts grpo.enabled = False: an untrained policy"),
        (["--sft.checkpoint=runs/x"], "sft.enabled = False contradicts sft.checkpoint = 'runs/x': keep one"),
    ):
        assert cli.main(["run", "demo.yaml", "--sft.enabled=false", *flags]) == 2
        assert message in capsys.readouterr().err


KILL = """
import os, signal
from rcr_trainer import cli, pipeline
from rcr_trainer.runs import folder as runs
from rcr_trainer.training import runner
runner.SAVE_EVERY_S = 0
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
{where}
cli.main(['run', 'demo.yaml', '--resume', '--name', 'killed'])
"""


@pytest.mark.parametrize(
    "where",
    [
        "log = runs.Run.log\nruns.Run.log = lambda self, *a: kill() if a[:2] == ('grpo', 1) else log(self, *a)",
        "log = runs.Run.log\nruns.Run.log = lambda self, *a: kill() if a[:2] == ('grpo', 3) else log(self, *a)",
        "load = pipeline.load_model\npipeline.load_model = kill",
        "save = pipeline.save_checkpoint\npipeline.save_checkpoint = "
        "lambda folder, *a: (save(folder, *a), kill() if (folder.parent / 'checkpoint-sft').exists() else None)",
        "from pathlib import Path\nremove = runs._remove\nruns._remove = "
        "lambda entry: kill() if entry.name == 'state' and entry.exists() else remove(entry)",
    ],
    ids=["at the first step", "in the second epoch", "as it begins", "as it ends", "before the state is removed"],
)
def test_a_run_killed_in_grpo_ends_like_an_undisturbed_one(here, whole, where):
    killed = here / "runs" / "killed"
    result = warm.run("-c", KILL.format(where=where), cwd=here)
    assert result.returncode == -9, result.stderr
    assert cli.main(["run", "demo.yaml", "--resume", "--name", "killed"]) == 0
    for checkpoint in ("checkpoint", "checkpoint-sft"):
        assert weights(killed / checkpoint) == weights(whole / checkpoint)
    assert rows(killed) == rows(whole)
    assert not (killed / "state").exists()


def test_a_held_out_slice_leaves_the_pool(here):
    config = load_config(here / "demo.yaml", {"grpo.queries": "10"})
    split = load_split(config.data, 0)
    task = divide(config, split)
    names = {part: {e.id for e in getattr(task, part)} for part in ("pool", "queries", "dev", "reinforced")}
    assert {part: len(ids) for part, ids in names.items()} == {"pool": 30, "queries": 22, "dev": 8, "reinforced": 10}
    assert not names["reinforced"] & names["pool"]
    assert names["queries"] | names["dev"] == names["pool"]
    assert divide(config, split) == task
    # Without the stage nothing leaves, and without a number all queries train.
    without = divide(load_config(here / "demo.yaml", {"grpo.queries": "10", "grpo.enabled": "false"}), split)
    assert (len(without.pool), without.reinforced) == (40, without.queries)
    every = divide(load_config(here / "demo.yaml"), split)
    assert (len(every.pool), every.reinforced) == (40, every.queries)
    with pytest.raises(ConfigError, match=r"grpo.queries = 32 leaves no training queries of 32: lower it"):
        divide(load_config(here / "demo.yaml", {"grpo.queries": "32"}), split)


def test_a_run_with_a_held_out_slice(here):
    assert cli.main(["run", "demo.yaml", "--grpo.queries=10", "--grpo.k=3"]) == 0
    pool = (here / "runs/demo/checkpoint/pool.jsonl").read_text().splitlines()
    assert len(pool) == 30


def test_rewards_of_answers_are_mixed(here):
    flags = ["--reward.names=structure_coverage,correctness", "--reward.weights=1,0.5"]
    flags += ["--grpo.epochs=1", "--grpo.group_size=2"]
    with answering() as server:
        assert cli.main(["run", "demo.yaml", *flags, *asks(server)]) == 0
    last = rows(here / "runs/demo")[-1]
    assert 0 < last["reward"] < 1.5
    assert last["llm_nominal_calls"] == 32 * 2 + 2 * 8
    assert 0 < last["llm_distinct_calls"] < last["llm_nominal_calls"]


def test_a_custom_reward(capsys, here):
    (here / "mine_own.py").write_text(
        "def few(predictions, references, *, queries, contexts):\n"
        "    if any(len(c) == 4 for c in contexts):\n"
        "        raise LookupError('no such thing')\n"
        "    return [float(len(c) > 0) for c in contexts]\n"
        "few.needs_llm = False\n",
        encoding="utf-8",
    )
    flags = ["--reward.names=mine_own:few"]
    assert cli.main(["run", "demo.yaml", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("rcr-train: error: reward 'few' raised LookupError on example ")
    assert Run.open(here / "runs/demo").status == "failed"
    # Mended, the run goes on.
    source = (here / "mine_own.py").read_text().replace("if any(", "if False and any(")
    (here / "mine_own.py").write_text(source, encoding="utf-8")
    del sys.modules["mine_own"]
    assert cli.main(["run", "demo.yaml", *flags, "--resume"]) == 0
    assert not [name for name in rows(here / "runs/demo")[-1] if name.startswith("llm_")]


def test_a_reward_that_needs_a_language_model_says_so_before_there_is_a_folder(capsys, here):
    (here / "mine_right.py").write_text(
        "def right(predictions, references, *, queries, contexts):\n"
        "    return [float(p == r) for p, r in zip(predictions, references)]\n",
        encoding="utf-8",
    )
    for name in ("mine_right:right", "structure_coverage"):
        assert cli.main(["run", "demo.yaml", f"--reward.names={name}"]) == 2
        assert f"llm.model = null contradicts reward.names = ['{name}']: name a model" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_likelihood_without_probabilities_says_so_before_there_is_a_folder(capsys, here):
    assert cli.main(["run", "demo.yaml", "--reward.names=likelihood", "--llm.kind=chat", "--llm.model=m"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(
            "rcr-train: error: reward.names: [likelihood] needs llm.kind: local or completion, which score, not "
        )
    )
    mixed = ["--reward.names=[likelihood,correctness]", "--llm.kind=local", "--llm.model=m"]
    assert cli.main(["run", "demo.yaml", *mixed]) == 2
    assert "error: reward 'likelihood' can't be mixed with others: name it alone" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_bad_reward_is_found_before_there_is_a_folder(capsys, here):
    for flags, message in (
        (["--reward.names=structure_coverge"], "did you mean 'structure_coverage'?"),
        (
            ["--reward.names=execution", "--reward.database=no.sqlite", "--llm.model=m"],
            "no.sqlite can't be read",
        ),
    ):
        assert cli.main(["run", "demo.yaml", *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_dry_run_says_what_it_would_cost(capsys, here):
    assert cli.main(["run", "demo.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pool 40, training 32, dev 8, test 8",
        "GRPO: 32 queries, reward context_coverage",
        "no language model is asked",
    ]
    flags = [
        "--reward.names=correctness", "--llm.model=m", "--llm.base_url=http://127.0.0.1:9/v1", "--llm.max_tokens=10",
        "--llm.price_prompt=1", "--llm.price_completion=2",
    ]  # fmt: skip
    assert cli.main(["run", "demo.yaml", "--dry-run", *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("language model: at most 536 calls, ")
    assert "and 5,360 completion tokens, $" in last
    budgets = ["--llm.budget_calls=500", "--llm.budget_tokens=9000000", "--llm.budget_money=0.001"]
    assert cli.main(["run", "demo.yaml", "--dry-run", *flags, *budgets]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "llm.budget_calls = 500: the run may stop there, and can be resumed",
        "llm.budget_tokens = 9,000,000: enough",
        "llm.budget_money = 0.001: the run may stop there, and can be resumed",
    ]
    assert cli.main(["run", "demo.yaml", "--dry-run", "--grpo.enabled=false"]) == 0
    assert capsys.readouterr().out.splitlines() == ["pool 40, training 32, dev 8, test 8"]
    assert not (here / "runs").exists()
    # What was spent under the run's name counts, whatever it was spent on.
    with closing(AnswerCache(here / "runs" / "answers.sqlite")) as cache:
        cache.put("m", {}, str(here / "runs" / "demo"), Use(60, 5, 5))
    assert cli.main(["run", "demo.yaml", "--dry-run", *flags, "--llm.budget_calls=590"]) == 0
    told = "llm.budget_calls = 590 (spent so far: 60): the run may stop there, and can be resumed"
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_too_few_candidates_for_the_comparison_are_found_before_any_answer_is_paid_for(capsys, here):
    assert cli.main(["run", "demo.yaml", "--dry-run", "--evaluation.split=dev", "--evaluation.k=38"]) == 2
    assert "k is 38, but there are only" in capsys.readouterr().err


def test_a_larger_budget_continues_a_run():
    from rcr_trainer.runs.folder import INCIDENTAL
    from rcr_trainer.runs.layers import differences

    changed = Settings.model_validate({"llm": {"budget_calls": 10, "concurrency": 2, "cache": "x", "timeout": 3}})
    assert differences(Settings(), changed, ignore=INCIDENTAL) == []
    assert differences(Settings(), Settings.model_validate({"llm": {"model": "x"}}), ignore=INCIDENTAL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grpo": {"group_size": 1}}, "grpo.group_size = 1 contradicts grpo.advantage = 'grpo': it compares a query"),
        ({"reward": {"names": ["correctness"], "weights": [1, 2]}}, "reward.weights = .* contradicts reward.names"),
        ({"reward": {"names": ["correctness"], "weights": [0]}}, "greater than 0"),
        ({"reward": {"names": ["correctness", "correctness"]}}, "each once"),
    ],
)
def test_contradictions(values, message):
    with pytest.raises(ValueError, match=message):
        Settings.model_validate(values)
