"""What used to end in a traceback, or in a terminal out of control, is one clear line."""

import contextlib
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from rcr_trainer import cli
from rcr_trainer.cli.console import logged
from rcr_trainer.errors import ConfigError
from rcr_trainer.evaluation.table import report_text
from rcr_trainer.runs.layers import load_config
from reports import report, scores
from toys import lexical

from langchain_rcr import CheckpointError, InputError, SequentialCompositionalRetriever
from langchain_rcr.families.backbone import LangChainBackbone

ROWS = [{"source": f"how many {word} are there", "target": f"count({word})"} for word in ("cats", "dogs", "hens")]
EVIL = "\x1b]0;owned\x07\x1b[2Jred\u202etxt\r$\\frac$[bold]"
FLAG_BOMB = "{a: &a0 [x, x], " + ", ".join(f"b{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)) + "}"
LONG = "x" * 5000


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Every write behind so many bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command line ends with."""
    assert cli.main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("rcr-train: error: ")
    assert len(last) < 1000
    return last


def test_a_full_disk(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = lexical(ROWS, dim=64)
    with files_of_at_most(4096):
        with pytest.raises(InputError, match=r"model can't be written: .*File too large"):
            encoder.save_pretrained(here / "model")
        assert "new.yaml can't be written: File too large" in said(capsys, "init", "new.yaml")
        (here / "demo.yaml").write_text("data: {train_size: 60, test_size: 8}")
        line = said(capsys, "run", "demo.yaml", "--model.family=lexical")
        assert "can't be written: File too large" in line
    with files_of_at_most(0):
        assert "can't be written: File too large" in said(capsys, "run", "demo.yaml", "--model.family=lexical")
    assert not list(here.glob("*model*"))
    assert not (here / "new.yaml").exists()


def test_a_full_disk_in_a_file_that_grows(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("rcr_trainer.pipeline.run", full)
    (here / "demo.yaml").write_text("data: {train_size: 60}")
    assert said(capsys, "run", "demo.yaml") == "rcr-train: error: metrics.jsonl: No space left on device"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "demo.yaml", f"--name={LONG}"], "name must be at most 200 letters"),
        (["run", "demo.yaml", f"--output={LONG}"], "File name too long"),
        (["run", "demo.yaml", "--data.task=files", f"--data.train={LONG}"], "File name too long"),
        (["run", LONG], "File name too long"),
        (["evaluate", LONG], "File name too long"),
        (["init", LONG], "File name too long"),
        (["run", "demo.yaml", f"--seed={'1' * 10_000}"], "seed must be "),
        (["run", "demo.yaml", f"--seed={10**30}"], "seed must be a number of at most 18 digits"),
        (["run", "demo.yaml", "--sft.lr=1e999"], "sft.lr must be "),
        (["run", "demo.yaml", f"--data.split={'1' * 10_000}"], "COVR"),
        (["run", "demo.yaml", "--llm.extra_body={a: &x [*x]}"], "llm.extra_body must be "),
        (["run", "demo.yaml", f"--llm.extra_body={FLAG_BOMB}"], "llm.extra_body must be "),
    ],
)
def test_what_is_too_long(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    (here / "demo.yaml").write_text("data: {train_size: 60, test_size: 8}")
    assert words in said(capsys, *arguments)


def bomb(depth: int) -> str:
    lines = ["  a0: &a0 [x, x]", *(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, depth))]
    return "llm:\n extra_body:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"seed: {'1' * 10_000}", "line 1: not YAML: not a number of at most 3,500 digits"),
        (f"seed: -{'9' * 30}", "seed must be "),
        (f"seed: 0x{'f' * 3000}", "seed must be "),
        (f"sft: {{lr: {'1' * 3000}}}", "sft.lr must be "),
        ("seed: 2001-99-99", "month must be in 1..12"),
        pytest.param(f"? {'[' * 3000}", "not YAML|nested too deeply", marks=pytest.mark.slow),
        (bomb(60), "more than 100,000 values"),
        ("llm: {extra_body: &a {x: *a}}", "more than 100,000 values"),
        ("llm: {extra_body: &a {x: [*a, *a]}}", "more than 100,000 values"),
        ("a: &a {seed: 1}\n<<: [*a, *a]", "unknown setting 'a'"),
        ("llm: {extra_body: !!python/object/apply:os.getcwd []}", "could not determine a constructor"),
        ("seed: !!binary '\u0430'", "not YAML"),
    ],
)
def test_settings_that_are_too_much_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as error:
        load_config(tmp_path / "x.yaml", environ={})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_aliases_are_fine_in_moderation(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(bomb(5))
    assert load_config(tmp_path / "x.yaml", environ={}).llm.extra_body["a1"] == [["x", "x"]] * 2


def test_a_path_that_is_no_path_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        SequentialCompositionalRetriever.from_pretrained(LONG)


class Odd(Embeddings):
    """Returns what it was given for any text; for the first one, with which embeddings are tried, `first`."""

    def __init__(self, row: Any, first: Any = None) -> None:
        self.rows = [row if first is None else first] * 2 + [row] * 10

    def embed_query(self, text: str) -> Any:
        return self.rows.pop(0)

    def embed_documents(self, texts: list[str]) -> Any:
        return [self.rows.pop(0) for _ in texts]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0.0, 0.0], "a vector of zeros"),
        ([1j, 2.0], "vectors of real numbers"),
        (np.array([1j, 2.0]), "vectors of real numbers"),
        (["a", "b"], "vectors of real numbers"),
        ([None, 1.0], "vectors of real numbers"),
        (None, "vectors of real numbers"),
        ([[1.0]], "vectors of real numbers"),
        ([], "shape"),
        ([float("nan"), 1.0], "not finite"),
        ([float("inf"), 1.0], "not finite"),
        ([1e300, 1.0], "not finite numbers, or too large"),
    ],
)
def test_odd_embeddings_are_an_input_error_of_one_line(row: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        LangChainBackbone(Odd(row))
    assert "\n" not in str(error.value)
    if words != "a vector of zeros":  # a text without known words may have none
        backbone = LangChainBackbone(Odd(row, first=[1.0, 2.0]))
        with pytest.raises(InputError):
            backbone.embed(["a"])


def test_embeddings_by_name_are_refused() -> None:
    with pytest.raises(InputError, match="embeddings must be LangChain Embeddings, not str"):
        LangChainBackbone("openai")  # type: ignore[arg-type]


# ---------------------------------------------------------------- terminals


def controls(text: str) -> set[str]:
    return {character for character in text if character in "\x1b\x07\r\u202e"}


@pytest.mark.slow
def test_explanations_and_tables_show_no_control_characters() -> None:
    rows = [{"source": f"{row['source']} {EVIL}", "target": f"{row['target']} {EVIL}"} for row in ROWS]
    retriever = SequentialCompositionalRetriever.from_encoder(lexical(rows, dim=8), rows, k=2)
    explained = retriever.explain(f"how many {EVIL}")
    assert controls(str(explained)) == set()
    assert explained.query.endswith(EVIL)
    made = report({"rcr": scores(), f"bm25 {EVIL}": scores()}, split=EVIL, left_out={EVIL: EVIL})
    written = report_text(EVIL, made, [])
    assert controls(written) == set()
    assert "[bold]" in written


def test_errors_show_none(tmp_path: Path) -> None:
    (tmp_path / "tri_encoder.json").write_text(json.dumps({"format_version": EVIL}))
    with pytest.raises(CheckpointError, match="owned") as error:
        SequentialCompositionalRetriever.from_pretrained(tmp_path)
    assert controls(str(error.value)) == set()


def test_what_is_logged_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    with logged():
        logging.getLogger("rcr_trainer.x").info("the first is %s", EVIL)
        logging.getLogger("langchain_rcr.x").warning("the first is %s", EVIL)
    err = capsys.readouterr().err
    assert err.count("the first is") == 2
    assert controls(err) == set()
