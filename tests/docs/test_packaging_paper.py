"""docs/paper.md says what the code does: its two columns of values against the schema and the paper's YAML file."""

import re

import pytest
import yaml
from places import ROOT
from rcr_trainer import baselines
from rcr_trainer.runs.layers import differences, load_config, settings
from rcr_trainer.settings import Settings

PAPER = load_config(ROOT / "examples" / "configs" / "paper_geoquery.yaml", environ={})
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)}


def value(config: Settings, path: str) -> object:
    section, name = path.split(".")
    return getattr(getattr(config, section), name, "—")  # Another family's setting.


@pytest.mark.parametrize("setting", ROWS)
def test_a_row_has_the_papers_value_and_our_default(setting):
    paper, default = map(yaml.safe_load, ROWS[setting])
    assert (paper, default) == (value(PAPER, setting), value(Settings(), setting))


def test_every_setting_that_the_paper_names_or_changes_has_a_row():
    named = {setting.path for setting in settings().values() if "paper" in (setting.description)}
    changed = {
        entry.split(" ")[0] for entry in differences(PAPER, Settings(), ignore=("name", "data.task", "data.split"))
    }
    assert named | changed <= ROWS.keys()


def test_each_system_of_the_paper_is_a_selector_or_a_row_of_a_run():
    section = PAGE.partition("## The paper's systems")[2].partition("\n## ")[0]
    here = re.findall(r"^\| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)
    named = {name for cell in here for name in re.findall(r"`(\w+)`", cell)}
    assert named - set(baselines.BASELINES) == {"rcr", "rcr_without_rl"}
    assert {"cover_ls_gold", "random", "bm25", "bert", "contriever", "epr", "se2", "se2_tri"} <= named
    assert load_config(ROOT / "examples/configs/lexical.yaml", {"sft.enabled": "false", "grpo.enabled": "true"})
