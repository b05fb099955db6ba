"""The tables of benchmarks/reinforcement.py and quality.py: means, gains, what is simulated, which runs are shared."""

import importlib
import json
from pathlib import Path

import pytest
from rcr_trainer.data import read_split
from rcr_trainer.evaluation import AnswersAsked
from rcr_trainer.settings import Settings
from reports import report as report_on
from reports import scores as scores_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def reinforcement(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("reinforcement")


def figures(value, **more):
    return {"coverage": value, "exact_match": value + 10, "jaccard": value + 20, **more}


CELLS = {
    "template_1": {
        "0": {"GRPO": figures(61, as_before=0), "w/o RL": figures(60), "bm25": figures(50), "oracle": figures(90)},
        "1": {"GRPO": figures(64, as_before=0), "w/o RL": figures(66), "bm25": figures(50), "oracle": figures(90)},
    },
    "template_2": {
        "0": {"GRPO": figures(55, as_before=0), "w/o RL": figures(50), "bm25": figures(40), "oracle": figures(80)},
        "1": {"GRPO": figures(54, as_before=1), "w/o RL": figures(54), "bm25": figures(40), "oracle": figures(80)},
    },
}


def test_means_and_spreads(reinforcement):
    coverage, exact, jaccard, _ = reinforcement.markdown("gains", CELLS, "test").split("\n\n")
    assert coverage.splitlines() == [
        "| Coverage, % | w/o RL | GRPO | bm25 | oracle |",
        "|---|---|---|---|---|",
        "| template_1 | 63.0 ± 4.2 | 62.5 ± 2.1 | 50.0 ± 0.0 | 90.0 ± 0.0 |",
        "| template_2 | 52.0 ± 2.8 | 54.5 ± 0.7 | 40.0 ± 0.0 | 80.0 ± 0.0 |",
        # Seeds' means over splits: 55 and 60; 58 and 59.
        "| mean | 57.5 ± 3.5 | 58.5 ± 0.7 | 45.0 ± 0.0 | 85.0 ± 0.0 |",
    ]
    assert exact.startswith("| Simulated exact match, % |")
    assert jaccard.startswith("| Simulated structure Jaccard, % |")
    assert "Coverage, dev queries, %" in reinforcement.markdown("gains", CELLS, "dev")


def test_the_mean_is_of_the_seeds_that_all_splits_have(reinforcement):
    first = {"0": CELLS["template_2"]["0"]}
    coverage = reinforcement.markdown("gains", {**CELLS, "template_2": first}, "test").split("\n\n")[0]
    assert coverage.splitlines()[-2:] == [
        "| template_2 | 50.0 | 55.0 | 40.0 | 80.0 |",
        "| mean | 55.0 | 58.0 | 45.0 | 85.0 |",
    ]
    apart = {**CELLS, "template_2": {"2": first["0"]}}
    assert reinforcement.markdown("gains", apart, "test").split("\n\n")[0].endswith("| mean | – | – | – | – |")


def test_paired_gains(reinforcement):
    *_, gains = reinforcement.markdown("gains", CELLS, "test").split("\n\n")
    cells = [cell.strip() for cell in gains.splitlines()[2].split("|")]
    # +1, −2, +5 and 0: mean 1, variance (0 + 9 + 16 + 1) / 3.
    assert cells[1:3] == ["GRPO against w/o RL", "+1.0 ± 2.9 (2 up, 1 down)"]
    assert cells[-2] == "1"
    assert "| GRPO against best plain | +13.5 ± 1.7 (4 up, 0 down) |" in gains
    title = gains.splitlines()[0]
    assert title.count("Simulated") == 2
    assert "points" in title


def test_no_language_model_of_covr_is_called_simulated(reinforcement):
    assert "imulated" not in reinforcement.markdown("covr", CELLS, "test")


def test_a_judge_has_a_table_and_a_column_of_gains_of_its_own(reinforcement):
    judge = f"{reinforcement.JUDGED}wider"
    judged = {"GRPO": 95, "w/o RL": 90, "bm25": 92, "oracle": 99}
    cells = {"8": {"0": {name: {**CELLS["template_1"]["0"][name], judge: v} for name, v in judged.items()}}}
    *_, table, gains = reinforcement.markdown("covr", cells, "test").split("\n\n")
    assert table.splitlines()[::2] == [
        "| Exact match by wider, % | w/o RL | GRPO | bm25 | oracle |",
        "| 8 | 90.0 | 95.0 | 92.0 | 99.0 |",
    ]
    header, rule, first = gains.splitlines()[:3]
    assert header.count("|") == rule.count("|") == first.count("|")
    assert first.split("|")[5].strip() == "+5.0 (1 up, 0 down)"


def test_rewards_are_named_by_reward(reinforcement):
    cells = {"template_1": {"0": {**CELLS["template_1"]["0"], "correctness": figures(62, as_before=0)}}}
    text = reinforcement.markdown("rewards", cells, "test")
    assert "| coverage reward against w/o RL | +1.0 (1 up, 0 down) |" in text
    assert "| correctness reward against w/o RL | +2.0 (1 up, 0 down) |" in text


@pytest.mark.parametrize("task", ["geoquery", "covr"])
def test_the_settings_are_settings_and_sft_does_not_depend_on_those_of_grpo(reinforcement, task):
    where = {"data": {"task": task, "split": {"geoquery": "template", "covr": "110"}[task]}, "sft": {"epochs": 2}}
    settings = reinforcement.merged(where, reinforcement.SETTINGS[task])
    for column in reinforcement.VARIANTS.values():
        assert Settings.model_validate(reinforcement.merged(settings, column)).grpo.enabled
    before = reinforcement.before_grpo(settings)
    assert (before["data"], before["sft"]) == (where["data"], settings["sft"])
    assert not {"grpo", "reward", "llm", "evaluation"} & before.keys()
    held_out = reinforcement.merged(settings, reinforcement.setting("grpo.queries=110"))
    assert Settings.model_validate(reinforcement.before_grpo(held_out)).grpo.queries == 110


# ---------------------------------------------------------------- quality


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality")


def scores(coverage, full, exact):
    return scores_of(coverage, full_coverage=full, specific_coverage=full + 1, exact_match=exact)


def report(**changes):
    selectors = {
        "rcr": scores(80.0, 40.0, 50.0),
        "mmr": scores(70.0, 20.004, 45.0),
        "set_bsr": scores(75.0, 15.0, 52.0),
        "oracle": scores(85.0, 60.0, 90.0),
    }
    return report_on({**selectors, **changes}, answers=AnswersAsked("StructureBoundLLM", True, 200, 150))


def test_figures_of_quality(quality):
    found = quality.figures(report())
    assert list(found)[:5] == ["best_plain", "best_plain_name", "ours", "oracle", "gap_closed"]
    assert list(found.values())[:5] == [75.0, "set_bsr", 80.0, 85.0, 0.5]
    assert found["selectors"]["mmr"] == {
        "coverage": 70.0, "full_coverage": 20.0, "specific_coverage": 21.0, "label_complete": 78.9, "exact_match": 45.0,
        "duplicate_rate": 3.0, "hub_share": 23.4, "prompt_length": 321.4,
    }  # fmt: skip
    assert quality.figures(report(oracle=scores(75.0, 60.0, 90.0)))["gap_closed"] is None


def test_tables_of_quality(quality):
    rows = {
        "a": {
            "0": {**quality.figures(report()), "sft_seconds": 10.0},
            "1": {**quality.figures(report(rcr=scores(82.0, 40.0, 55.0))), "sft_seconds": 20.0},
        },
        "b": {"0": {**quality.figures(report(set_bsr=scores(60.0, 50.0, 45.5))), "sft_seconds": 40.0}},
        "c": {"0": {**quality.figures(report(oracle=scores(75.0, 60.0, 90.0))), "sft_seconds": 5.0}},
    }
    *tables, gains = quality.markdown(rows).split("\n\n")
    titles = [table.partition(" | rcr")[0] for table in tables]
    assert titles == [f"| {title}" for name, title in quality.METRICS.items() if name != "implied_shown"]
    assert (titles[0], titles[-1]) == ("| Coverage, %", "| Characters of the picks")
    assert tables[0].splitlines()[2] == "| a | 81.0 ± 1.4 | 70.0 ± 0.0 | 75.0 ± 0.0 | 85.0 ± 0.0 |"
    assert tables[4].splitlines()[2] == "| a | 52.5 ± 3.5 | 45.0 ± 0.0 | 52.0 ± 0.0 | 90.0 ± 0.0 |"
    lines = gains.splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[-1].count("|") == 10
    # 6 / 10 of the gap; exact match −2 and +3.
    assert lines[2] == (
        "| a | 75.0 ± 0.0 (set_bsr) | 81.0 ± 1.4 | +6.0 ± 1.4 | 0.60 | +20.0 ± 0.0 | +20.0 ± 0.0 | +0.5 ± 3.5 "
        "| 15 ± 7 |"
    )
    assert lines[3] == "| b | 70.0 (mmr) | 80.0 | +10.0 | 0.67 | -10.0 | -10.0 | +4.5 | 40 |"
    assert lines[4] == "| c | 75.0 (set_bsr) | 80.0 | +5.0 | – | +20.0 | +20.0 | -2.0 | 5 |"
    assert lines[5] == (
        "| mean of the splits | 73.3 (least 70.0) | 80.3 (least 80.0) | +7.0 (least +5.0) | 0.63 (least 0.60) "
        "| +10.0 (least -10.0) | +10.0 (least -10.0) | +1.0 (least -2.0) | 20 (most 40) |"
    )


@pytest.mark.parametrize(("task", "split", "gold"), [("covr", "110", "pool"), ("geoquery", "template_1", "all")])
def test_settings_of_quality_are_settings(quality, task, split, gold, tmp_path):
    (tmp_path / "geoquery" / "splits").mkdir(parents=True)
    for name in ("corpus.xml", "splits/template_1.json"):
        (tmp_path / "geoquery" / name).touch()
    for family in ("structure", "embeddings"):
        config = Settings.model_validate(quality.run_settings(task, split, 0, tmp_path, family))
        assert (config.model.family, config.evaluation.gold, config.llm.kind) == (family, gold, "simulator")
        assert config.evaluation.asks(config.llm)


@pytest.mark.parametrize("name", ["scholar", "yelp"])
def test_the_seed_is_the_fold_of_a_text2sql_file_that_has_folds(quality, here, name):
    labels = {"scholar": ("train", "dev", "test"), "yelp": ("0", "1", "2")}[name]
    sentence = {"text": "a ?", "variables": {}, "question-split": "0"}
    rows = [{"query-split": label, "sql": [f"SELECT {n}"], "sentences": [sentence]} for n, label in enumerate(labels)]
    (here / "text2sql").mkdir()
    (here / "text2sql" / f"{name}.json").write_text(json.dumps(rows))
    for seed in (0, 2):
        config = Settings.model_validate(quality.run_settings("text2sql", name, seed, here, "structure"))
        (test,) = read_split(config.data.directory).test
        assert test.id == ("2-0" if name == "scholar" else f"{seed}-0")
        assert (config.program.language, config.data.task) == ("sql", "files")


@pytest.fixture
def ablation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ablation")


@pytest.mark.parametrize("split", ["template_1", "110"])
def test_every_variant_of_the_ablation_has_settings_of_its_own(ablation, monkeypatch, tmp_path, split):
    from types import SimpleNamespace

    asked = {}

    def run(folder, seed, threads, settings):
        config = Settings.model_validate({"seed": seed, **settings})
        asked[folder.name] = config.model_dump_json(exclude={"name", "output"})
        return SimpleNamespace(path=tmp_path / folder.name)

    monkeypatch.setattr(ablation, "run_or_read", run)
    ids = tmp_path / "geoquery" / "splits" / "template_1.json"
    ids.parent.mkdir(parents=True)
    ids.write_text("{}")
    for variant in ablation.VARIANTS:
        ablation.run_one(variant, split, 0, tmp_path, 1)
    again = {}
    for name, settings in asked.items():
        again.setdefault(settings, []).append(name)
    assert [names for names in again.values() if len(names) > 1] == []
    assert len(asked) == len(ablation.VARIANTS)
    task = "covr" if split == "110" else "geoquery"
    assert f"{task}-{split}-0-structure" in asked
    assert str(tmp_path / f"{task}-{split}-0-text") in asked[f"{task}-{split}-0-text-grpo"]


def test_the_ablation_compares_means(ablation):
    row = {"coverage": 60.0, "full_coverage": 20.0, "exact_match": 30.0, "set_bsr": 50.0, "oracle": 75.0}
    row |= {"hub_share": 10.0, "prompt_length": 400.0}
    seeds = {"0": {**row, "gap_closed": 0.4}, "1": {**row, "coverage": 65.0, "implied_shown": 80.0, "gap_closed": 0.6}}
    lines = ablation.markdown({"template_1": {"structure": seeds}}).splitlines()
    assert lines[0] == "**template_1** (Set-BSR covers 50.0 ± 0.0 %, the oracle 75.0 ± 0.0 %)"
    cells = "62.5 ± 3.5 | 20.0 ± 0.0 | 30.0 ± 0.0 | 80.0 | 10.0 ± 0.0 | 400.0 ± 0.0 | 0.50 ± 0.14"
    assert lines[4].endswith(f"(the default) | {cells} |")
