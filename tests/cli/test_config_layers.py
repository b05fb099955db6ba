"""Reading settings: which layer wins, and what an error says."""

import os
from pathlib import Path

import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.runs.layers import load_config


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "demo.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(path=None, flags=None, environ=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags or {}, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_flags_beat_the_environment_which_beats_the_file(yaml_file):
    path = yaml_file("sft: {epochs: 1, k: 1, batch_size: 1}")
    environ = {"RCR_SFT__EPOCHS": "2", "RCR_SFT__K": "2", "PATH": "/bin"}
    config = load_config(path, {"sft.epochs": "3"}, environ)
    assert (config.sft.epochs, config.sft.k, config.sft.batch_size) == (3, 2, 1)


def test_the_process_environment_is_read_by_default(yaml_file, monkeypatch):
    monkeypatch.setenv("RCR_SEED", "7")
    assert load_config(yaml_file("seed: 1")).seed == 7


def test_data_of_the_tests_is_no_setting():
    assert load_config(environ={"RCR_DATA": "/somewhere"}) == load_config(environ={})


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("sft.lr", "1e-4", 1e-4),
        ("program.anonymize", "false", False),
        ("sft.patience", "null", None),
        ("evaluation.selectors", "bm25, mmr", ["bm25", "mmr"]),
        ("llm.stop", r"""["\nSource:", ';', a]""", ["\nSource:", ";", "a"]),
        ("llm.stop", "[;", [";"]),
        ("llm.stop", "[]", []),
        ("llm.stop", "null", None),
        ("data.directory", "a/b", Path("a/b")),
        ("model.lam", "-0.5", -0.5),
        ("data.id_key", "007", "007"),
    ],
)
def test_text_of_flags_and_variables_takes_the_type_of_the_field(path, text, expected):
    section, name = path.split(".")
    variable = f"RCR_{section}__{name}".upper()
    for config in (load_config(None, {path: text}, {}), load_config(None, {}, {variable: text})):
        assert getattr(getattr(config, section), name) == expected


def test_a_number_in_yaml_may_name_a_split(yaml_file):
    assert load_config(yaml_file("data: {split: 43}"), environ={}).data.split == "43"


def test_yaml_reads_a_learning_rate_without_a_dot(yaml_file):
    assert load_config(yaml_file("sft: {lr: 1e-5}"), environ={}).sft.lr == 1e-5


def test_the_name_is_that_of_the_file_unless_given(yaml_file):
    path = yaml_file("seed: 1")
    assert load_config(path, environ={}).folder == Path("runs/demo")
    assert load_config(path, {"name": "other"}, {}).folder == Path("runs/other")
    assert load_config(path, {"output": "here"}, {}).folder == Path("here")
    assert load_config(path, {"name": "नदी-2"}, {}).folder == Path("runs/नदी-2")  # with vowels that are marks


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\nsft:\n  epocs: 3", ["line 3", "'sft.epocs'", "did you mean 'sft.epochs'"]),
        ("epochs: 3", ["line 1", "'epochs'", "did you mean 'sft.epochs'"]),
        ("modle: {family: lexical}", ["'modle'", "did you mean 'model'"]),
        ("sft:\n  epochs: many", ["line 2", "sft.epochs", "integer", "'many'"]),
        ("sft:\n  epochs: 2.5", ["line 2", "sft.epochs", "integer", "2.5"]),
        ("sft:\n  epochs: true", ["line 2", "sft.epochs", "number", "True"]),
        ("sft:\n  epochs: -1", ["line 2", "sft.epochs", "greater than or equal to 0", "-1"]),
        ("sft:\n  lr: .nan", ["line 2", "sft.lr", "finite", "nan"]),
        ("evaluation: {selectors: bm25}", ["line 1", "evaluation.selectors must be a list, as in [bm25], not 'bm25'"]),
        ("device: gpu", ["line 1", "device must be auto, cpu, cuda, cuda:N or mps, not 'gpu'"]),
        ("program: {anonymize: name}", ["anonymize must be a valid boolean or 'names', not 'name' (did you mean 'na"]),
        ("sft:\n  loss: infonse", ["sft.loss", "'listwise' or 'infonce'", "did you mean 'infonce'"]),
        ("data:\n  train: [a, b]", ["line 2", "data.train must be a path, not ['a', 'b']"]),
        ("sft: 3", ["line 1", "'sft' is a section", "3"]),
        ("seed: 1\nseed: 2", ["line 2", "'seed' is set twice"]),
        ("sft:\n  k: 1\n  k: 2", ["line 3", "'sft.k' is set twice"]),
        ("llm:\n  budget_calls: 9\nllm.budget_calls: 3", ["line 3", "'llm.budget_calls' is set twice"]),
        ("- 1\n- 2", ["line 1", "key: value"]),
        ("a: [1", ["not YAML"]),
        ("seed: 1\n---\nseed: 2", ["not YAML"]),
        ("seed: &a [*a]", ["not YAML"]),
        ("seed: !!python/object/apply:os.getcwd []", ["not YAML"]),
        ("[" * 1_000, ["nested too deeply"]),
        pytest.param("[" * 30_000, ["nested too deeply"], marks=pytest.mark.slow),  # where libyaml overflows the stack
        ("name: ../up", ["name", "letters", "'../up'"]),
        (f"seed: 0x{'f' * 10_000}", ["line 1", "a number of at most 3,500 digits"]),
        (f"name: -0x{'f' * 10_000}", ["line 1", "a number of at most 3,500 digits"]),
        (f"seed: {'9' * 5_000}", ["line 1", "a number of at most 3,500 digits"]),
        (f"seed: 59{':59' * 4_000}", ["line 1", "a number of at most 3,500 digits"]),
        (f"sft:\n  lr: 59{':59' * 4_000}.5", ["not YAML", "too large"]),
        (f"llm:\n  extra_body: {{a: 0x{'f' * 10_000}}}", ["line 2", "a number of at most 3,500 digits"]),
    ],
)
def test_a_bad_file_is_named_with_line_field_and_value(yaml_file, text, parts):
    path = yaml_file(text)
    found = message(path)
    assert str(path) in found
    for part in parts:
        assert part in found
    assert len(found) < 400


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("model: {family: lexical, base: x}", "model.base = 'x'", "model.family = 'lexical'"),
        ("model: {family: transformer, ngrams: 2}", "model.ngrams = 2", "model.family = 'transformer'"),
        ("model: {family: structure, ngram_init: 2}", "model.ngram_init = 2", "model.family = 'structure'"),
        ("model: {family: embeddings, base: none}", "model.base = 'none'", "model.family = 'embeddings'"),
        ("model: {family: lexical, state: saturating}", "model.state = 'saturating'", "model.family = 'lexical'"),
        ("{model: {family: lexical}, sft: {epochs: 0}}", "sft.epochs = 0", "model.family = 'lexical'"),
        ("model: {family: transformer, dim: 64}", "model.dim = 64", "model.family = 'transformer'"),
        ("model: {family: transformer, scale: 2}", "model.scale = 2", "model.family = 'transformer'"),
        ("data: {train: x.jsonl}", "data.train = 'x.jsonl'", "data.task = 'covr'"),
        ("data: {corpus: x.xml}", "data.corpus = 'x.xml'", "data.task = 'covr'"),
        ("data: {task: geoquery}", "data.split = '110'", "data.task = 'geoquery'"),
        ("data: {split: template}", "data.split = 'template'", "data.task = 'covr'"),
        ("data: {task: files}", "data.task = 'files'", "data.train"),
        ("data: {task: files, train: a, directory: d}", "data.train = 'a'", "data.directory = 'd'"),
        ("sft: {bm25_top: 3}", "sft.bm25_worst = 5", "sft.bm25_top = 3"),
    ],
)
def test_a_contradiction_names_both_fields(yaml_file, text, one, other):
    found = message(yaml_file(text))
    assert one in found
    assert other in found


def test_unknown_names_in_environment_and_flags_are_errors():
    assert "RCR_SFT__EPOCS: did you mean RCR_SFT__EPOCHS" in message(environ={"RCR_SFT__EPOCS": "1"})
    assert "RCR_WOBBLE" in message(environ={"RCR_WOBBLE": "1"})
    assert "'sft.epocs': did you mean 'sft.epochs'" in message(flags={"sft.epocs": "1"})


def test_a_bad_value_names_the_flag_or_variable():
    assert message(flags={"seed": "x"}).startswith("--seed: seed must be a valid integer, not 'x'")
    assert message(environ={"RCR_SEED": "x"}).startswith("RCR_SEED: seed must be a valid integer, not 'x'")
    assert "did you mean 'bm25'" in message(flags={"evaluation.selectors": "bm26"})
    assert "not '100000'" in message(flags={"threads": "100000"})  # with so many, OpenMP ends the process


@pytest.mark.parametrize(
    "text",
    [
        f"{{a: {'9' * 5_000}}}",
        f"{{a: 0x{'f' * 10_000}}}",
        "{a: 2020-99-99}",
        pytest.param("[" * 10_000, marks=pytest.mark.slow),
    ],
)
def test_a_mapping_that_yaml_cannot_hold_is_none(text):
    assert message(flags={"llm.extra_body": text}).startswith("--llm.extra_body: llm.extra_body must be a valid dict")


@pytest.mark.slow
def test_a_list_nested_too_deeply_is_text():
    assert message(flags={"evaluation.selectors": "[" * 10_000}).startswith("--evaluation.selectors: ")


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert "no such file" in message(missing)
    assert f"rcr-train init {missing}" in message(missing)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert "not a text file" in message(binary)
    assert "can't be read" in message(tmp_path)


def test_a_huge_value_is_quoted_in_short(yaml_file):
    assert len(message(yaml_file(f"seed: {'x' * 100_000}"))) < 400


@pytest.mark.skipif(os.name == "nt", reason="the environment has no lower case there")
def test_only_the_upper_case_prefix_is_ours():
    assert load_config(environ={"rcr_seed": "5"}).seed == 0
