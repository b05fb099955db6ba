"""The settings themselves: defaults, descriptions, the YAML written from them, the shipped files."""

from pathlib import Path

import pytest
from places import ROOT
from rcr_trainer.runs.layers import differences, fresh_yaml, load_config, settings, to_yaml
from rcr_trainer.settings import Settings, SFTSettings

SHIPPED = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


def test_every_setting_has_a_description_of_one_or_two_sentences():
    for setting in settings().values():
        assert setting.description, setting.path
        assert setting.description[0] != " "
        assert setting.description.endswith("."), setting.path


def test_the_fresh_file_reads_back_as_the_defaults(tmp_path):
    path = tmp_path / "rcr.yaml"
    path.write_text(fresh_yaml(), encoding="utf-8")
    assert load_config(path, environ={}) == Settings()


def test_the_fresh_file_explains_every_setting():
    text = " ".join(line.strip("# ") for line in fresh_yaml().splitlines())
    for setting in settings().values():
        assert setting.description in text, setting.path
    assert max(map(len, fresh_yaml().splitlines())) <= 110


def test_a_fresh_file_changes_family_in_one_word(tmp_path):
    path = tmp_path / "rcr.yaml"
    path.write_text(fresh_yaml().replace("family: structure", "family: transformer"), encoding="utf-8")
    config = load_config(path, environ={})
    assert (config.model.base, config.model.lam) == ("bert-base-uncased", 0.1)
    assert not hasattr(config.model, "ngrams")
    assert (config.sft.epochs, config.sft.lr) == (120, 1e-5)
    assert (config.grpo.lr, config.grpo.train_candidates) == (1e-6, True)


def test_a_resolved_file_holds_no_default_by_family(tmp_path):
    config = Settings(
        model={"family": "lexical"}, sft=SFTSettings(epochs=3, patience=None, lr=1e-5), output=Path("a b")
    )
    path = tmp_path / "x.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path, environ={}) == config
    assert "lr: 1.0e-05" in path.read_text()
    assert "dim: 384" in path.read_text()
    assert "#" not in path.read_text()


def test_defaults_of_the_class_are_those_of_the_default_family():
    assert SFTSettings() == Settings().sft


def test_differences_names_setting_and_both_values():
    one, other = Settings(), Settings(seed=3, name="other")
    assert differences(one, other, ignore=("name",)) == ["seed (0, now 3)"]
    assert differences(one, one) == []


def test_a_stages_k_that_is_not_given_is_the_models():
    """So a run of before is the same run: it had each of them in its config.yaml."""
    given = {part: {"k": 4} for part in ("sft", "grpo", "evaluation")}
    assert differences(Settings.model_validate(given), Settings()) == []
    assert differences(Settings.model_validate({"sft": {"k": 3}}), Settings()) == ["sft.k (3, now 4)"]
    more = Settings.model_validate({"model": {"k": 8}, "sft": {"k": 4}})
    assert differences(Settings(), more) == ["model.k (4, now 8)", "grpo.k (4, now 8)", "evaluation.k (4, now 8)"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_parses(path):
    assert load_config(path, environ={}).name == path.stem
