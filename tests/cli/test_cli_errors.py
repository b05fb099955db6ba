"""What a user meets first: help, versions, one-line errors, exit codes."""

import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
import warm
from rcr_trainer import cli
from rcr_trainer.cli.console import USUAL
from rcr_trainer.llm.cache import Answer, AnswerCache, Use
from rcr_trainer.runs.layers import load_config, settings
from rcr_trainer.settings import Settings

TINY = """
data: {task: files, train: train.jsonl, test: test.jsonl, dev_size: 2}
model: {family: lexical, dim: 8}
sft: {epochs: 1}
threads: 1
"""


pytestmark = pytest.mark.usefixtures("here")


def write_rows(path: Path, count: int, **changes: str) -> None:
    rows = [{"source": f"question {n} ?", "target": f"f{n % 3} ( g{n} )"} | changes for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def tiny(here: Path) -> Path:
    write_rows(here / "train.jsonl", 12)
    write_rows(here / "test.jsonl", 3)
    path = here / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error, after its prefix."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("rcr-train: error: ")
    assert "Traceback" not in err
    return last.removeprefix("rcr-train: error: ")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    return capsys.readouterr().out


def test_without_arguments_the_help_is_shown(capsys):
    out = shown(capsys)
    for command in ("init", "run", "sft", "evaluate", "data"):
        assert f"\n    {command} " in out
    assert out == shown(capsys, "--help")


@pytest.mark.parametrize("command", [["init"], ["run"], ["sft"], ["evaluate"], ["data", "check"], ["data", "text2sql"]])
def test_every_command_has_an_example_that_parses(capsys, command):
    out = shown(capsys, *command, "--help")
    example = out[out.index("example: ") :].removeprefix("example: ").split()
    assert example[: 1 + len(command)] == ["rcr-train", *command]
    given = cli.build_parser(example[1:]).parse_args(example[1:])
    assert given.prog == " ".join(["rcr-train", *command])


def test_help_of_run_derives_from_the_fields(capsys):
    usual = shown(capsys, "run", "--help")
    assert {*re.findall(r"^  --([\w.]+)", usual, re.MULTILINE)} & {*settings()} == USUAL
    assert len(usual.splitlines()) < 150
    assert "\nsft" not in usual
    out = " ".join(shown(capsys, "run", "--help-all").split())
    for setting in settings().values():
        assert f"--{setting.path} " in out
        assert " ".join(setting.description.split()[:4]) in out
    assert "(paper 120, section 4" in out
    assert "embeddings 20, transformer 120, lexical 30" in out


@pytest.mark.slow
def test_help_is_fast_and_loads_nothing_heavy():
    script = (
        "import sys; from rcr_trainer import cli\n"
        "for words in ([], ['init', 'x.yaml']):\n"
        "    cli.main(words)\n"
        "heavy = {'torch', 'numpy', 'scipy', 'transformers', 'langchain_core'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    began = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    assert time.perf_counter() - began < 5


def test_version(capsys):
    assert shown(capsys, "--version") == f"rcr-train {version('langchain-rcr')}\n"


def test_init_writes_a_file_that_is_the_defaults(capsys, here):
    out = shown(capsys, "init", "mine.yaml")
    assert "rcr-train run mine.yaml" in out
    assert load_config(here / "mine.yaml") == Settings(name="mine")
    (here / "mine.yaml").write_text("seed: 1")
    assert "--force" in refused(capsys, "init", "mine.yaml")
    assert (here / "mine.yaml").read_text() == "seed: 1"
    shown(capsys, "init", "mine.yaml", "--force")
    assert load_config(str(here / "mine.yaml")).seed == 0
    assert "is a folder" in refused(capsys, "init", ".")
    (here / "mine.csv").write_text("a,b")
    assert "`rcr-train init --train mine.csv`" in refused(capsys, "init", "mine.csv", "--force")
    assert (here / "mine.csv").read_text() == "a,b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run"], "`rcr-train init --train my.jsonl`"),
        (["run", "missing.yaml"], "missing.yaml: no such file (`rcr-train init missing.yaml`"),
        (["run", "a.csv"], "a.csv holds examples, not settings: `rcr-train init --train a.csv` writes these"),
        (["run", "tiny.yaml", "--evaluation.answer=true"], "did you mean 'evaluation.answers'?"),
        (["run", "tiny.yaml", "--sft.epocs=3"], "unknown setting 'sft.epocs': did you mean 'sft.epochs'?"),
        (["run", "tiny.yaml", "--sft.epochs=many"], "--sft.epochs: sft.epochs must be a valid integer, not 'many'"),
        (["run", "tiny.yaml", "--sft.epochs"], "--sft.epochs: expected one argument"),
        (["run", "tiny.yaml", "--resum"], "unknown setting 'resum'"),
        (["run", "tiny.yaml", "--resume", "--overwrite"], "--overwrite: not allowed with argument --resume"),
        (["run", "tiny.yaml", "more.yaml"], "unknown argument 'more.yaml'"),
        (["run", "tiny.yaml", "--data.train=gone.jsonl"], "no such file: gone.jsonl (looked for in "),
        (["run", "tiny.yaml", "--data.target_key=sql"], "train.jsonl, line 1: no field 'sql'"),
        (["run", "tiny.yaml", "--program.language=sqll"], "sqll"),
        (["run", "tiny.yaml", "--sft.k=12"], "too few for sft.k = 12: a training question can't pick its own"),
        (["run", "tiny.yaml", "--evaluation.k=13"], "the pool has 12 examples, too few for evaluation.k = 13"),
        (["run", "tiny.yaml", "--data.dev_size=12"], "data.dev_size = 12 leaves no training queries of 12"),
        (["run", "tiny.yaml", "--evaluation.split=dev", "--data.dev_size=0"], "no dev queries"),
        (
            ["run", "tiny.yaml", "--data.test=null"],
            "no test queries to evaluate on: set data.test, or evaluation.split: dev",
        ),
        (["run", "tiny.yaml", "--data.source_key=target"], "contradicts data.target_key = 'target': question"),
        (["run", "tiny.yaml", "--data.source_key="], "data.source_key must have at least 1 character, not ''"),
        (["run", "tiny.yaml", "--reward.names="], "--reward.names: reward.names must have at least 1 item, not []"),
        (["run", "tiny.yaml", "--sft=3"], "'sft' is a section, not a setting: set one of its own, such as sft.k"),
        (["run", "tiny.yaml", "--output="], ". is not empty and no run folder"),
        (["init", "--train=train.jsonl", "--language=foo", "a.yaml"], "language: unknown 'foo'"),
        (["init", "--train=train.jsonl", "--source-key=nope", "a.yaml"], "train.jsonl, line 1: no field 'nope'"),
        (["init", "--train=train.jsonl", "--test=gone.jsonl", "a.yaml"], "no such file: gone.jsonl"),
        (["init", "--train=train.jsonl", "--source-key=target", "--target-key=target", "a.yaml"], "can't both be"),
        (["init", "--language=sql", "a.yaml"], "--language and keys need --train"),
        (["run", "tiny.yaml", "--device=tpu"], "device must be auto, cpu, cuda, cuda:N or mps, not 'tpu'"),
        (
            ["run", "tiny.yaml", "--llm.base_url=foo"],
            "llm.base_url must be an address such as http://localhost:8000/v1",
        ),
        (["run", "tiny.yaml", "--llm.base_url=http://[foo"], "llm.base_url must be an address such as"),
        (["evaluate", "nowhere"], "nowhere is not a run: no such folder"),
        (["evaluate", "."], "neither a run folder nor its checkpoint"),
        (["evaluate", ".", "--sft.k", "3"], "rcr-train evaluate can't change 'sft.k'"),
        (["--sft.k=3", "run", "tiny.yaml"], "'--sft.k' belongs after the command"),
        (["--sft.k", "3", "run", "tiny.yaml"], "'--sft.k' belongs after the command"),
        (["data", "check"], "required: FILE"),
        (["data", "check", "gone.jsonl"], "no such file: gone.jsonl"),
        (["data", "check", "train.jsonl", "--language", "sqll"], "sqll"),
        (["data"], "required: COMMAND"),
        (["data", "text2sql", "train.jsonl", "--out", "folder"], "train.jsonl is not a JSON file"),
        (["data", "text2sql", "gone.json", "--out", "folder"], "can't read gone.json"),
        (["trian"], "invalid choice: 'trian'"),
        (["run", "tiny.yaml", "--evaluation.embeddings=langchain:a:b"], "LangChain embeddings go into model.base"),
        *(
            (["run", "tiny.yaml", "--model.family=lexical", f"--model.base={kind}:a:b"], "it has no frozen model")
            for kind in ("langchain", "static")
        ),
        *(
            (["run", "tiny.yaml", *dry, *names], "pip install gone")
            for dry in ([], ["--dry-run"])
            for names in (
                ["--model.family=embeddings", "--model.base=package:gone"],
                ["--evaluation.embeddings=package:gone"],
            )
        ),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line_and_leaves_no_file(capsys, tiny, arguments, part):
    before = sorted(path.name for path in tiny.parent.rglob("*"))
    assert part in refused(capsys, *arguments)
    assert sorted(path.name for path in tiny.parent.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
@pytest.mark.parametrize("name", ["folder", "text.txt", "foreign.sqlite", "cut.sqlite", "text.txt/a.sqlite"])
def test_a_file_of_answers_that_cannot_be_used_is_found_before_the_training(capsys, tiny, here, name, dry_run):
    (here / "folder").mkdir()
    (here / "text.txt").write_text("no SQLite\n" * 100)
    with closing(sqlite3.connect(here / "foreign.sqlite")) as database:
        database.execute("CREATE TABLE other (a)")
    with closing(AnswerCache(here / "whole.sqlite")) as cache:
        cache.put("m", {bytes([n]): Answer("x" * 5000) for n in range(20)}, "run", Use())
    (here / "cut.sqlite").write_bytes((here / "whole.sqlite").read_bytes()[:9000])
    asks = ["--llm.model=m", "--llm.base_url=http://127.0.0.1:9/v1", "--evaluation.answers=true"]
    assert name in refused(capsys, "run", "tiny.yaml", *asks, f"--llm.cache={name}", *dry_run)
    assert not (here / "runs").exists()
    if dry_run:
        shown(capsys, "run", "tiny.yaml", *asks, "--llm.cache=whole.sqlite", *dry_run)
        shown(capsys, "run", "tiny.yaml", *asks, "--llm.cache=new/a.sqlite", *dry_run)
        assert not (here / "new").exists()


def test_a_row_without_program_is_named(capsys, tiny, here):
    rows = (here / "train.jsonl").read_text().splitlines()
    rows[4] = json.dumps({"source": "what ?"})
    (here / "train.jsonl").write_text("\n".join(rows))
    found = refused(capsys, "run", "tiny.yaml")
    assert "train.jsonl, line 5" in found
    assert "'target'" in found
    assert not (here / "runs").exists()


def test_a_variable_of_the_environment_counts(capsys, tiny, monkeypatch):
    monkeypatch.setenv("RCR_SFT__K", "12")
    assert "too few for sft.k = 12" in refused(capsys, "run", "tiny.yaml")
    monkeypatch.setenv("RCR_SFT__KK", "1")
    assert "RCR_SFT__KK: did you mean RCR_SFT__K?" in refused(capsys, "run", "tiny.yaml")


@pytest.mark.slow  # what was imported is imported again
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("yaml", ["init"]),
        ("langchain_openai", ["run", "tiny.yaml", "--dry-run", "--evaluation.answers=true", "--llm.model=m"]),
    ],
)
def test_a_missing_extra_names_the_pip_command(capsys, tiny, monkeypatch, module, command):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rcr_trainer.runs.layers", "rcr_trainer.cli.own_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else real(name, *rest))
    assert "pip install 'langchain-rcr[train]'" in refused(capsys, *command)


def test_a_bug_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr("rcr_trainer.cli.own_files.guess_keys", lambda *_: 1 / 0)
    assert cli.main(["data", "check", "rows.jsonl"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_a_terminal_that_is_not_utf_8_shows_what_it_can(monkeypatch, here):
    (here / "bad.jsonl").write_text('{"问题": "大"}\n{"question": "a", "program": "b"}\n', encoding="utf-8")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["rcr-train", "data", "check", "bad.jsonl"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main() == 1
    out.seek(0)
    assert r"fields: \u95ee\u9898" in out.read()


def test_a_name_that_cannot_be_encoded_is_refused_in_one_line(capsys, monkeypatch):
    def opening(argv):
        "训练.jsonl".encode("ascii")  # as open does in a C locale without UTF-8 mode

    monkeypatch.setattr("rcr_trainer.cli.command.build_parser", opening)
    assert cli.main(["run", "tiny.yaml"]) == 2
    line = r"rcr-train: error: '\u8bad\u7ec3' can't be encoded as ascii: rename what is called so, or set PYTHONUTF8=1"
    assert capsys.readouterr().err.splitlines() == [line]


def shown_version(*command: str, **streams: int) -> tuple[int, str]:
    """The exit code and stderr of --version, with buffered output."""
    command = (*command, sys.executable, "-m", "rcr_trainer.cli", "--version")
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    result = subprocess.run(command, check=False, stderr=subprocess.PIPE, env=environment, text=True, **streams)
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("redirected", "code", "error"),
    [(">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 2, "rcr-train: error: No space left on device\n")],
)
def test_output_to_a_closed_stream_or_a_full_disk(redirected, code, error):
    assert shown_version("sh", "-c", f'exec "$0" "$@" {redirected}') == (code, error)


def test_output_that_nobody_reads_ends_the_command_quietly():
    read, gone = os.pipe()
    os.close(read)
    assert shown_version(stdout=gone) == (141, "")
    os.close(gone)


def test_control_c_exits_130_with_one_line(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rcr_trainer.cli.own_files.guess_keys", interrupt)
    assert cli.main(["data", "check", "rows.jsonl"]) == 130
    assert capsys.readouterr().err == "rcr-train: interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_control_c(tiny, here, name):
    script = (
        "import os, signal, sys\nfrom rcr_trainer import cli, pipeline\n"
        f"pipeline.sft_stage = lambda *_: os.kill(os.getpid(), signal.{name}) or signal.pause()\n"
        "sys.argv[1:] = ['run', 'tiny.yaml']\n"
        "sys.exit(cli.main())"
    )
    result = warm.run("-c", script, cwd=here)
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == "rcr-train: interrupted (--resume continues the run)"
    assert json.loads((here / "runs" / "tiny" / "run.json").read_text())["status"] == "interrupted"


def test_ctrl_c_while_the_command_is_imported_is_no_traceback():
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'rcr_trainer.cli.command':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "import rcr_trainer.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
