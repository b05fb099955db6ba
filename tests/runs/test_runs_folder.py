"""A run folder: what it refuses, what it continues, and what a kill leaves of it."""

import errno
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from unittest import mock

import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.runs.folder import LOCK, Run, hold
from rcr_trainer.runs.layers import load_config
from rcr_trainer.settings import DataSettings, Settings
from reports import logged

from langchain_rcr.errors import CheckpointError

CONFIG = Settings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


def trained(folder: Path, config: Settings = CONFIG) -> Run:
    run = Run.create(folder, config)
    with run.stage("sft"):
        run.checkpoint.mkdir()
        (run.checkpoint / "pool.jsonl").write_text("old")
    return run


def finished(folder: Path, config: Settings = CONFIG) -> Run:
    run = trained(folder, config)
    run.finish()
    return run


def test_a_new_run_records_where_it_comes_from(folder):
    run = Run.create(folder, CONFIG)
    assert load_config(folder / "config.yaml", environ={}) == CONFIG
    record = json.loads((folder / "run.json").read_text())
    assert record["seed"] == 0
    assert record["status"] == run.status == "running"
    assert record["stages"] == {}
    assert record["versions"]["python"].startswith("3.")
    assert {"torch", "transformers", "langchain-rcr"} <= record["versions"].keys()
    assert record["command"] == sys.argv
    assert "started" in record


def test_the_git_revision_is_that_of_the_working_directory(folder, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (work / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    Run.create(folder, CONFIG)
    revision = git("rev-parse", "HEAD")
    assert json.loads((folder / "run.json").read_text())["git"] == revision
    (work / "a").write_text("2")
    Run.create(folder, CONFIG, overwrite=True)
    assert json.loads((folder / "run.json").read_text())["git"] == f"{revision}+changes"


def test_stages_are_done_only_when_they_end_well(folder):
    run = Run.create(folder, CONFIG)
    with run.stage("data"):
        assert not run.done("data")
    assert Run.open(folder).done("data")
    with pytest.raises(ZeroDivisionError), run.stage("sft"):
        1 / 0  # noqa: B018
    assert not Run.open(folder).done("sft")
    assert Run.open(folder).status == "failed"
    with pytest.raises(KeyboardInterrupt), run.stage("sft"):
        raise KeyboardInterrupt
    assert Run.open(folder).status == "interrupted"
    run.finish()
    assert Run.open(folder).status == "finished"


def test_a_finished_run_stays_finished_when_a_further_stage_fails(folder):
    run = finished(folder)
    with pytest.raises(ZeroDivisionError), run.stage("evaluation"):
        1 / 0  # noqa: B018
    assert Run.open(folder).status == "finished"


def test_a_finished_run_of_the_same_settings_is_returned(folder):
    finished(folder)
    again = Run.create(folder, CONFIG.model_copy(update={"threads": 2}))
    assert again.done("sft")
    assert again.config.threads == 2


@pytest.mark.parametrize("flags", [{}, {"resume": True}])
def test_a_run_of_other_settings_is_refused_with_the_difference(folder, flags):
    finished(folder)
    with pytest.raises(ConfigError, match=r"other settings: seed \(0, now 1\).*--overwrite"):
        Run.create(folder, CONFIG.model_copy(update={"seed": 1}), **flags)
    assert Run.open(folder).config.seed == 0


def test_an_unfinished_run_wants_resume(folder):
    trained(folder)
    with pytest.raises(ConfigError, match="--resume continues it"):
        Run.create(folder, CONFIG)
    assert Run.create(folder, CONFIG, resume=True).done("sft")


def test_a_run_that_has_not_trained_yet_is_started_over(folder):
    with Run.create(folder, CONFIG).stage("data"):
        pass
    assert Run.create(folder, CONFIG, resume=True).done("data")
    assert not Run.create(folder, CONFIG.model_copy(update={"seed": 1})).done("data")


def test_overwrite_clears_results_and_nothing_else(folder):
    finished(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / ".gitignore").write_text("mine")
    run = Run.create(folder, CONFIG.model_copy(update={"seed": 1}), overwrite=True)
    assert not run.done("sft")
    assert sorted(entry.name for entry in folder.iterdir()) == [".gitignore", "config.yaml", "notes.txt", "run.json"]
    assert Run.open(folder).config.seed == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_never_touched(folder, overwrite):
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="no run folder"):
        Run.create(folder, CONFIG, overwrite=overwrite)
    assert [entry.name for entry in folder.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"), hold(tmp_path / "x"):
        pass


def test_a_held_folder_is_refused_by_name_of_its_process_and_free_afterwards(folder):
    with hold(folder):
        with (
            pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .* \(since 20.*another name"),
            hold(folder),
        ):
            pass
        assert (folder / LOCK).is_file()
    with hold(folder):
        pass


@pytest.mark.parametrize("left", ['{"pid": 1, "host": "gone", "started": "x"}', "", "[1"])
def test_a_lock_file_that_a_dead_process_left_holds_nothing(folder, left):
    folder.mkdir(parents=True)
    (folder / LOCK).write_text(left)
    with hold(folder):
        Run.create(folder, CONFIG)


def test_a_file_system_without_locks_is_told_of(folder, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with hold(folder):
        assert "No locks available" in caplog.text


def test_one_of_many_gets_the_folder_whenever_it_is_free(folder):
    inside, most, got = [0], [], []

    def work():
        for _ in range(200):
            with suppress(ConfigError), hold(folder):
                inside[0] += 1
                most.append(inside[0])
                got.append(1)
                inside[0] -= 1

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(got) > 4


def test_an_overwrite_that_was_killed_is_not_resumed_from_the_earlier_state(folder):
    run = Run.create(folder, CONFIG)
    (run.state / "sft").mkdir(parents=True)
    other = CONFIG.model_copy(update={"seed": 1})
    killed = mock.patch("rcr_trainer.runs.folder._remove", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        Run.create(folder, other, overwrite=True)
    with pytest.raises(ConfigError, match="other settings: seed"):
        Run.create(folder, other, resume=True)
    assert not Run.create(folder, other, overwrite=True).state.exists()


def test_open_takes_the_run_or_its_checkpoint(folder):
    finished(folder)
    assert Run.open(folder).path == Run.open(folder / "checkpoint").path == folder


def test_open_says_what_is_wrong(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        Run.open(folder)
    with pytest.raises(CheckpointError, match="neither a run folder nor its checkpoint"):
        Run.open(tmp_path)
    finished(folder)
    record = json.loads((folder / "run.json").read_text())
    for text, complaint in (
        (json.dumps(record | {"format_version": 99}), "format 99.*upgrade langchain-rcr"),
        ("[1]", "does not hold a JSON object"),
        ('{"format_version": 1}', "it has no 'stages'"),
        ('{"format_version": 1, "stages": {', "can't be read as JSON"),
        (json.dumps(record | {"seed": float("nan")}), "can't be read as JSON: NaN"),
        (json.dumps(record | {"stages": []}), "damaged"),
    ):
        (folder / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match=complaint):
            Run.open(folder)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        Run.open(folder)


def test_opening_a_run_reads_only_budgets_of_the_environment(folder, monkeypatch):
    finished(folder)
    monkeypatch.setenv("RCR_SEED", "9")
    monkeypatch.setenv("RCR_LLM__BUDGET_CALLS", "7")
    config = Run.open(folder).config
    assert (config.seed, config.llm.budget_calls) == (0, 7)
    assert Run.open(folder, flags={"llm.budget_calls": "8"}).config.llm.budget_calls == 8


def test_metrics_are_logged_behind_a_torn_line_which_goes_with_those_of_a_stage(folder):
    run = Run.create(folder, CONFIG)
    run.log("sft", 1, {"loss": 2.0, "dev_coverage": float("nan")})
    run.log("sft", 2, {"loss": 1.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "step"')
    again = Run.open(folder)
    again.log("sft", 2, {"loss": 0.5})
    again.log("grpo", 1, {"reward": 0.1})
    first, _, torn, *_ = (folder / "metrics.jsonl").read_text().splitlines()
    assert torn == '{"stage": "sft", "step"'
    assert "dev_coverage" not in json.loads(first)
    again.drop_metrics("sft")
    assert [(row["stage"], row["reward"]) for row in logged(folder)] == [("grpo", 0.1)]


@pytest.mark.parametrize(
    "line",
    [
        *("[" * 100_000, "9" * 5_000, "[]", "3", "null", "{}", '{"step": 1}', '{"stage": "sft"}'),
        *('{"stage": "sft", "step": []}', '{"stage": "sft", "step": "1"}'),
        *('{"stage": "sft", "step": 1, "loss": "x"}', '{"stage": "sft", "step": 1, "loss": 1%s}' % ("0" * 400)),
    ],
)
def test_metrics_that_no_stage_logged_are_passed_over(folder, line):
    run = Run.create(folder, CONFIG)
    run.log("sft", 1, {"loss": 2.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    run.log("grpo", 1, {"reward": 0.5})
    run.drop_metrics("sft")
    assert [row["stage"] for row in logged(folder)] == ["grpo"]


CRASHES = """
import gc, os, signal, sys
from pathlib import Path
from langchain_rcr.basics.files import atomic_directory
from rcr_trainer.runs import folder as runs
from rcr_trainer.settings import Settings

config = Settings()
WRITTEN = runs.to_yaml(config)

def read(path, flags):
    assert path.read_text() == WRITTEN
    return config

os.fsync = lambda _: None
runs._git_revision, runs.library_versions = lambda: None, dict
runs.to_yaml, runs.run_config = lambda _: WRITTEN, read  # YAML takes most of the time, and isn't the point
TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}

def work(folder, config, **options):
    run = runs.Run.create(folder, config, **options)
    if not run.done("data"):
        with run.stage("data"):
            with atomic_directory(folder / "data") as path:
                (path / "train.jsonl").write_text("whole")
    if not run.done("sft"):
        with run.stage("sft"):
            run.log("sft", 1, {"loss": 0.5})
            with atomic_directory(run.checkpoint) as path:
                (path / "a").write_text("whole")
                (path / "b").write_text("whole")
    run.finish()
    return run

def check(run):
    if run.done("data"):
        assert (run.path / "data" / "train.jsonl").read_text() == "whole"
    if run.checkpoint.exists() or run.done("sft"):
        assert sorted(p.name for p in run.checkpoint.iterdir()) == ["a", "b"]
        assert (run.checkpoint / "b").read_text() == "whole"
    if run.done("sft"):
        assert (run.path / "metrics.jsonl").read_text().endswith('"loss": 0.5}\\n')

root = Path(sys.argv[1])
gc.freeze()  # or else each child copies all memory when it collects
for at in range(1, 200):
    folder = root / str(at)
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, arguments):
            global seen
            if event in TOUCHES and str(root) in str(arguments[0]):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        work(folder, config)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
        print(at)
        break
    if (folder / "config.yaml").exists():
        check(runs.Run.open(folder))
    run = work(folder, config, resume=True)
    check(run)
    assert run.done("data") and run.done("sft") and run.status == "finished"
    leftovers = [p.name for p in folder.rglob(".*")]
    assert not leftovers, leftovers
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_file_operation_a_run_is_whole_and_goes_on(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20


def test_settings_that_change_no_result_may_change(folder):
    finished(folder)
    assert Run.create(folder, CONFIG.model_copy(update={"name": "y", "output": folder})).done("sft")
    with pytest.raises(ConfigError, match=r"data\.split"):
        Run.create(folder, CONFIG.model_copy(update={"data": DataSettings(split="8")}))
