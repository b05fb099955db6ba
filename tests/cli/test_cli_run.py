"""The command line end to end on a tiny lexical model: run, resume, evaluate, data."""

import json
from pathlib import Path

import pytest
import warm
from places import DATA
from rcr_trainer import cli
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import write_split
from rcr_trainer.data.files import read_split
from rcr_trainer.data.geoquery import CORPUS_URL
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.tasks import divide, load_split
from rcr_trainer.settings import DataSettings
from reports import logged

pytestmark = pytest.mark.slow

CONFIG = """
data: {split: 110, train_size: 60, test_size: 12, dev_size: 10}
model: {family: lexical, dim: 16}
sft: {epochs: 2}
evaluation: {selectors: [random, bm25]}
threads: 1
"""


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    (here / "demo.yaml").write_text(CONFIG, encoding="utf-8")
    return here


def test_a_run_leaves_exactly_these_files_and_is_not_repeated(capsys, here):
    assert cli.main(["run", "--sft.k", "3", "demo.yaml"]) == 0
    out, err = capsys.readouterr()
    folder = here / "runs" / "demo"
    assert "grpo" not in err
    assert "rcr" in out
    assert "bm25" in out
    assert "run folder: runs/demo" in out
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint", "config.yaml", "data", "evaluation.json", "metrics.jsonl", "picks.jsonl",
        "report.md", "run.json", "run.lock",
    ]  # fmt: skip
    report = json.loads((folder / "evaluation.json").read_text())
    assert [report[name] for name in ("k", "n", "split", "part", "seed")] == [4, 12, "110", "test", 0]
    assert set(report["selectors"]) == {"rcr", "random", "bm25"}
    assert 0 <= report["selectors"]["rcr"]["coverage"] <= 100
    pool = [json.loads(line) for line in (folder / "checkpoint" / "pool.jsonl").read_text().splitlines()]
    assert len(pool) == 60
    assert pool[0].keys() == {"id", "source", "target"}
    assert Run.open(folder).config.sft.k == 3
    assert Run.open(folder).status == "finished"
    assert [row["step"] for row in logged(folder, "sft")] == [0, 1, 2]

    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").rglob("*")}
    assert cli.main(["run", "demo.yaml", "--sft.k=3"]) == 0
    assert capsys.readouterr().out == out
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoint").rglob("*")} == before

    assert cli.main(["run", "demo.yaml"]) == 2
    assert "sft.k (3, now 4)" in capsys.readouterr().err

    files = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    told = {
        "--sft.k=3": "runs/demo: done before: data, sft, evaluation; to do: nothing",
        "--sft.k=4": "the run would be refused: runs/demo holds a run with other settings: sft.k (3, now 4); give this "
        "one another name, or --overwrite",
        "--overwrite": "runs/demo: the run there would be cleared",
    }
    for flag, line in told.items():
        assert cli.main(["run", "demo.yaml", "--dry-run", flag]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == line
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == files


def test_sft_then_evaluate(capsys, here):
    assert cli.main(["sft", "demo.yaml", "--name", "only"]) == 0
    folder = here / "runs" / "only"
    assert not (folder / "evaluation.json").exists()
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/only/checkpoint", "--split", "dev", "--k=2", "--evaluation.selectors=bm25"]) == 0
    captured = capsys.readouterr()
    report = json.loads((folder / "evaluation.json").read_text())
    assert [report[name] for name in ("k", "n", "split", "part")] == [2, 10, "110", "dev"]
    assert set(report["selectors"]) == {"rcr", "bm25"}
    assert "bm25" in captured.out
    assert Run.open(folder).config.k == 4
    assert cli.main(["evaluate", "runs/only", "--k", "99"]) == 2
    assert json.loads((folder / "evaluation.json").read_text())["k"] == 2
    assert Run.open(folder).status == "finished"


def test_a_run_killed_while_it_trains_is_resumed_without_repeating_the_data(capsys, here):
    script = (
        "import os, signal, sys\nfrom rcr_trainer import cli\nfrom rcr_trainer.runs import folder as runs\n"
        "log = runs.Run.log\n"
        "def kill(self, stage, step, metrics):\n"
        "    log(self, stage, step, metrics)\n"
        "    self.state.mkdir()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "runs.Run.log = kill\n"
        "cli.main(['run', 'demo.yaml'])"
    )
    result = warm.run("-c", script, cwd=here)
    assert result.returncode == -9
    folder = here / "runs" / "demo"
    made = (folder / "data" / "train.jsonl").stat().st_mtime_ns
    assert cli.main(["run", "demo.yaml"]) == 2
    assert "--resume continues it" in capsys.readouterr().err
    assert cli.main(["run", "demo.yaml", "--dry-run"]) == 0
    assert "refused: runs/demo holds a run that was not finished: --resume" in capsys.readouterr().out
    (folder / "state" / "sft").mkdir()
    assert cli.main(["run", "demo.yaml", "--resume", "--dry-run"]) == 0
    said = "runs/demo: done before: data; to do: sft from its last saved round, evaluation"
    assert capsys.readouterr().out.splitlines()[-1] == said
    (folder / "state" / "sft").rmdir()
    assert cli.main(["run", "demo.yaml", "--resume"]) == 0
    assert "data: done before" in capsys.readouterr().err
    assert (folder / "data" / "train.jsonl").stat().st_mtime_ns == made
    assert [row["step"] for row in logged(folder, "sft")] == [0, 1, 2]
    assert Run.open(folder).status == "finished"


def test_a_run_of_files_that_have_changed_is_refused_and_bad_ones_clear_nothing(capsys, here):
    row = '{"q": "how many %s", "p": "count ( %s )", "db": {"at": [1, NaN, null]}, "note": ""}\n'
    text = "".join(row % (name, name) for name in "abcdefghijklmnopqrst")
    (here / "train.jsonl").write_text(text, encoding="utf-8")
    (here / "test.jsonl").write_text(row % ("u", "u"), encoding="utf-8")
    own = ["--data.task=files", "--data.train=train.jsonl", "--data.test=test.jsonl", "--data.source_key=q"]
    command = ["run", "demo.yaml", *own, "--data.target_key=p", "--data.dev_size=5"]
    assert cli.main(command) == 0
    folder = here / "runs" / "demo"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    assert cli.main(command) == 0
    assert "data: done before" in capsys.readouterr().err

    (here / "train.jsonl").write_text(text + row % ("v", "v"), encoding="utf-8")
    assert cli.main(command) == 2
    assert "runs/demo holds a run on what train.jsonl held before; give this one another" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    (here / "train.jsonl").write_text(text + "{", encoding="utf-8")
    assert cli.main([*command, "--overwrite"]) == 2
    assert "train.jsonl, line 21: invalid JSON" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    (here / "train.jsonl").unlink()
    assert cli.main(command) == 0
    assert len(read_split(folder / "data").train) == 20
    capsys.readouterr()
    assert cli.main([*command, "--dry-run"]) == 0
    assert "runs/demo: done before: data, sft, evaluation; to do: nothing" in capsys.readouterr().out


HANGS = """
import sys, time
from rcr_trainer import cli
from rcr_trainer.runs import folder as runs
def hang(*_):
    print("there", flush=True)
    time.sleep(60)
runs.Run.log = hang
cli.main(sys.argv[1:])
"""


def test_a_second_run_in_the_folder_of_a_running_one_is_refused(capsys, here):
    folder = here / "runs" / "demo"
    running = warm.Program("-c", HANGS, "run", "demo.yaml", cwd=here)
    try:
        assert running.says("there\n")
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for flags in (["--seed=1"], ["--seed=1", "--overwrite"], ["--resume"]):
            assert cli.main(["run", "demo.yaml", *flags]) == 2
        assert cli.main(["evaluate", "runs/demo"]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(errors) == 4
        assert cli.main(["run", "demo.yaml", "--resume", "--dry-run"]) == 0
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.startswith(f"the run would be refused: runs/demo is in use by process {running.pid} on ")
        for line in errors:
            assert line.startswith(f"rcr-train: error: runs/demo is in use by process {running.pid} on ")
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        running.end(0)
    assert cli.main(["run", "demo.yaml", "--resume"]) == 0


def test_progress_and_results_part_ways(here):
    result = warm.run("-m", "rcr_trainer.cli", "sft", "demo.yaml", cwd=here)
    assert result.returncode == 0
    assert result.stdout == "run folder: runs/demo\n"
    assert "epoch 2" in result.stderr
    assert "dev_coverage" in result.stderr


def test_development_queries_stay_in_the_pool_and_do_not_train(here):
    from rcr_trainer.runs.layers import load_config

    config = load_config(here / "demo.yaml")
    task = divide(config, load_split(config.data, 0))
    pool, queries, dev = ({example.id for example in part} for part in (task.pool, task.queries, task.dev))
    assert (len(pool), len(queries), len(dev)) == (60, 50, 10)
    assert queries | dev == pool
    assert not queries & dev
    assert divide(config, load_split(config.data, 0)).dev == task.dev


def test_a_run_takes_a_split_folder_and_notices_that_it_has_changed(capsys, here):
    write_split(here / "data/covr/8", covr_split("8", 0, 20, 5))
    command = ["run", "demo.yaml", "--data.directory=data/covr/8", "--data.dev_size=5", "--evaluation.selectors=random"]
    assert cli.main(command) == 0
    assert cli.main(command) == 0
    write_split(here / "data/covr/8", covr_split("8", 0, 20, 4))
    assert cli.main(command) == 2
    assert "runs/demo holds a run on what data/covr/8 held before" in capsys.readouterr().err


@pytest.mark.skipif(not (DATA / "geoquery").is_dir(), reason="the GeoQuery corpus is not there (RCR_DATA)")
def test_geoquery_takes_the_published_ids():
    corpus, ids = DATA / "geoquery/corpus.xml", DATA / "geoquery/splits/template_1.json"
    split = load_split(DataSettings(task="geoquery", split="template", corpus=corpus, ids=ids), 0)
    published = json.loads(ids.read_text())
    assert {int(e.id) for e in split.train} == set(map(int, published["train"]))
    assert len(split.dev) == 110
    assert {int(e.id) for e in split.dev + split.test} == set(map(int, published["test"]))


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "geoquery").is_dir(), reason="the GeoQuery corpus is not there (RCR_DATA)")
def test_a_run_notices_that_its_ids_have_changed(capsys, here):
    mine, ids = here / "mine.json", {"train": list(range(40)), "test": list(range(40, 50))}
    own = ["--data.task=geoquery", "--data.split=template", "--data.ids=mine.json", "--evaluation.selectors=random"]
    command = ["run", "demo.yaml", *own, f"--data.corpus={DATA / 'geoquery/corpus.xml'}"]
    for code, test in ((0, ids["test"]), (0, ids["test"]), (2, ids["test"][1:])):
        mine.write_text(json.dumps(ids | {"test": test}))
        assert cli.main(command) == code
    assert "runs/demo holds a run on what mine.json held before" in capsys.readouterr().err


def test_without_a_corpus_the_download_is_announced(capsys, here, monkeypatch):
    def offline(url, timeout):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    assert cli.main(["run", "demo.yaml", "--data.task=geoquery", "--data.split=length"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"downloading {CORPUS_URL}" in lines[0]
    assert lines[-1] == f"rcr-train: error: can't download {CORPUS_URL}: no network"
