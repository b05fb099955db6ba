"""The tables of benchmarks/reinforcement.py: means, paired gains, what is called simulated, which runs are shared."""

import importlib
from pathlib import Path

import pytest
from rcr_trainer.config import Config

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
        assert Config.model_validate(reinforcement.merged(settings, column)).grpo.enabled
    before = reinforcement.before_grpo(settings)
    assert (before["data"], before["sft"]) == (where["data"], where["sft"])
    assert not {"grpo", "reward", "llm", "evaluation"} & before.keys()
    held_out = reinforcement.merged(settings, reinforcement.setting("grpo.queries=110"))
    assert Config.model_validate(reinforcement.before_grpo(held_out)).grpo.queries == 110
