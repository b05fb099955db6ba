"""A whole run in two processes: undisturbed, with an error in one of them, killed, and resumed.

torchrun itself starts the run of docs/processes.md, which tests/docs/test_docs_pages.py follows.
"""

import json

import pytest
import torch
from answering import answering
from rcr_trainer import cli
from rcr_trainer.runs.folder import Run
from reports import logged
from several_processes import end, start

from langchain_rcr.policy.triencoder import TriEncoder

pytestmark = pytest.mark.slow

CONFIG = """
data: {split: 110, train_size: 45, test_size: 8, dev_size: 8}
model: {family: lexical, dim: 16}
sft: {epochs: 2}
grpo: {enabled: true, epochs: 2, batch_size: 5, group_size: 4, lr: 0.001}
reward: {names: ["own_reward:covered"]}
llm: {model: m, base_url: ADDRESS}
evaluation: {selectors: [random], answers: true}
threads: 1
"""
# Breaks in the second process, or kills every one, at its n-th call while sequences are rewarded.
REWARD = """
import os, signal
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.rewards.ours import make_reward

plain = make_reward("structure_coverage", ProgramSpec())
calls = 0

def covered(predictions, references, *, queries, contexts):
    global calls
    calls += len(contexts) > 8 and len(contexts[0]) == 4
    if calls == int(os.environ.get("BREAK_AT", -1)) and os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    if calls == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(predictions, references, queries=queries, contexts=contexts)
"""
RUN = ["-m", "rcr_trainer.cli", "run", "demo.yaml", "--name", "disturbed", "--resume"]
STATE_AT_EVERY_STEP = "from rcr_trainer.training import runner; runner.SAVE_EVERY_S = 0; "


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with answering() as server:
        (tmp_path / "demo.yaml").write_text(CONFIG.replace("ADDRESS", server.base_url), encoding="utf-8")
        yield tmp_path


# One test, since two processes take seconds to start, and pytest-xdist would start them on every worker.
def test_a_run_in_two_processes(here):
    _run_whole(here)
    _check_against_one_alone(here)
    _check_a_disturbed_one(here)


def _run_whole(here):
    command = ["-m", "rcr_trainer.cli", "run", "demo.yaml", "--name=whole"]
    (code, out, err), (other, *silent) = end(start(command, cwd=here))
    assert (code, other) == (0, 0), err
    assert out.count("run folder: runs/whole\n") == 1
    assert out.count("split 110: 8 test queries") == 1
    assert err.count("epoch 2, loss") == 1
    assert silent == ["", ""]


def weights(folder):
    return TriEncoder.from_pretrained(folder, runtime="torch").state_dict()


def rows(folder):
    return [{k: v for k, v in row.items() if k != "time"} for row in logged(folder)]


def _check_against_one_alone(here):
    twice = ["--sft.gradient_accumulation=2", "--grpo.batch_size=10", "--name=alone"]
    assert cli.main(["run", "demo.yaml", *twice]) == 0
    whole, alone = here / "runs" / "whole", here / "runs" / "alone"
    names = [sorted(p.relative_to(folder) for p in folder.rglob("*")) for folder in (whole, alone)]
    assert names[0] == names[1]
    for name in ("checkpoint/pool.jsonl", "data/train.jsonl", "data/split.json"):
        assert (whole / name).read_bytes() == (alone / name).read_bytes()
    for checkpoint in ("checkpoint", "checkpoint-sft"):
        one, other = weights(whole / checkpoint), weights(alone / checkpoint)
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=0, atol=2e-6)
    assert len(rows(whole)) == len(rows(alone)) == 3 + 1 + 2 * 4
    for row, other in zip(rows(whole), rows(alone), strict=True):
        assert row.pop("stage") == other.pop("stage")
        # Prompts are told apart in each process for itself.
        calls, others = ({k: r.pop(k) for k in list(r) if k.startswith("llm_")} for r in (row, other))
        assert calls.get("llm_nominal_calls") == others.get("llm_nominal_calls")
        assert calls.get("llm_distinct_calls", 0) >= others.get("llm_distinct_calls", 0)
        assert calls.keys() == others.keys()
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    reports = [json.loads((folder / "evaluation.json").read_text()) for folder in (whole, alone)]
    assert reports[0]["selectors"].keys() == reports[1]["selectors"].keys()
    stages = json.loads((whole / "run.json").read_text())["stages"]
    assert [stage.get("processes") for stage in stages.values()] == [None, 2, 2, None]


def _check_a_disturbed_one(here):
    """It breaks in one process, is resumed, killed, and resumed again."""
    whole = here / "runs" / "whole"
    broken = end(start(RUN, cwd=here, environ={"BREAK_AT": "2"}))
    assert [code for code, _, _ in broken] == [2, 2]
    assert [out for _, out, _ in broken] == ["", ""]
    (_, _, first), (_, _, second) = broken
    assert first.splitlines()[-1].startswith("rcr-train: error: another process is gone (")
    assert second.splitlines()[-1].startswith("process 1: reward 'covered' raised LookupError on exam")
    folder = here / "runs" / "disturbed"
    assert Run.open(folder).status == "failed"
    assert json.loads((folder / "state/grpo/state.json").read_text())["steps"] == 1

    script = f"{STATE_AT_EVERY_STEP}import sys; from rcr_trainer import cli; sys.exit(cli.main({RUN[2:]}))"
    assert [code for code, _, _ in end(start(["-c", script], cwd=here, environ={"KILL_AT": "2"}))] == [-9, -9]
    assert Run.open(folder).status == "running"

    resumed = end(start(RUN, cwd=here))
    assert [code for code, _, _ in resumed] == [0, 0]
    assert resumed[1][1:] == ("", "")
    assert "run folder: runs/disturbed" in resumed[0][1]
    for checkpoint in ("checkpoint", "checkpoint-sft"):
        one, other = weights(whole / checkpoint), weights(folder / checkpoint)
        assert all(torch.equal(one[key], other[key]) for key in one)
    trained = [[{k: v for k, v in row.items() if "llm" not in k} for row in rows(f)] for f in (whole, folder)]
    assert trained[0] == trained[1]


def test_bad_settings_are_told_once(here):
    said = end(start(["-m", "rcr_trainer.cli", "run", "demo.yaml", "--data.split=7", "--name=bad"], cwd=here))
    assert [code for code, _, _ in said] == [2, 2]
    assert [err.count("rcr-train: error: ") for _, _, err in said] == [1, 0]
    assert not (here / "runs" / "bad").exists()


def test_of_several_processes_one_alone_speaks(here, capsys, monkeypatch):
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["run", "demo.yaml", "--dry-run"]) == 0
        assert bool(capsys.readouterr().out) == (rank == "0")
        assert cli.main(["run", "nowhere.yaml"]) == 2
        assert bool(capsys.readouterr().err) == (rank == "0")
