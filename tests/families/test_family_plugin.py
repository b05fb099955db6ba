"""A family, and a state, from another distribution: one file, an entry point, and nothing of ours changed."""

import os
import sys
from pathlib import Path

import pytest
import warm
from toys import reseal

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families import families, family_names, get_family
from langchain_rcr.families.embeddings import LexicalFamily
from langchain_rcr.policy.triencoder import TriEncoder

TOY = '''
"""Words hashed to coordinates, each with a trained weight."""

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from pydantic import Field

from langchain_rcr.families import Family, ModelSettings
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.state import State


class HalvingState(State):
    name, summary = "halving", "every pick halves what came before"

    def compose(self, query, vector, context):
        return vector / 2 + self.lam * context


@dataclass
class Rows:
    counts: np.ndarray

    def __len__(self):
        return len(self.counts)

    def select(self, rows):
        return Rows(self.counts[rows])


class HashEncoder(Encoder):
    arguments = ("buckets", "scale")

    def __init__(self, buckets, scale):
        super().__init__()
        self.dim = self.buckets = buckets
        self.scale = scale
        self.weight = torch.nn.Parameter(torch.ones(buckets))

    def featurize(self, items):
        counts = np.zeros((len(items), self.dim), dtype=np.float32)
        for row, item in enumerate(items):
            for word in item.source.split():
                counts[row, crc32(word.encode()) % self.dim] += 1
        return Rows(counts)

    def forward(self, features):
        return self.scale * self.weight * torch.from_numpy(features.counts)


class ToySettings(ModelSettings):
    """Hashed words."""

    buckets: int = Field(32, ge=2, description="Coordinates that words are hashed to.")


class ToyFamily(Family):
    name, summary, Settings = "toy", "hashed words", ToySettings
    encoders = ("toy_family:HashEncoder",) * 3
    training = {"sft": {"epochs": 1, "lr": 0.01, "temperature": 5.0}, "grpo": {"lr": 0.001}}
    fits = True

    def fit(self, encoder, questions, *, seed):
        if not all(question.target for question in questions):
            raise ValueError("questions without programs")

    def build(self, items, settings, *, backbone=None, spec, seed):
        return tuple(HashEncoder(settings.buckets, scale) for scale in (1.0, -0.3, 1.0))
'''
RUN = """
data: {split: 110, train_size: 40, test_size: 6, dev_size: 8}
model: {family: toy, buckets: 16, state: halving}
evaluation: {selectors: [random]}
threads: 1
"""
TRAIN = """
from rcr_trainer import cli
assert cli.main(["run", "demo.yaml"]) == 0
for wrong in ("--model.bucket=3", "--model.ngrams=3"):
    try:
        ended = cli.main(["run", "demo.yaml", "--name=x", wrong])
    except SystemExit as error:
        ended = error.code
    assert ended == 2
"""
EVALUATE = """
from rcr_trainer import cli
assert cli.main(["evaluate", "runs/demo"]) == 2
"""
SERVE = """
from langchain_rcr import SequentialCompositionalRetriever
retriever = SequentialCompositionalRetriever.from_pretrained("runs/demo/checkpoint", k=3)
retriever.refit()
model = retriever.store.encoder
print(model.family.name, model.config.buckets, model.config.state, len(retriever.invoke("is there a dog ?")))
"""
LEND = """
from langchain_rcr.families import families
from langchain_rcr.policy.triencoder import TriEncoder
families()
TriEncoder.build("lexical", [], dim=4, state="halving").save_pretrained("lexical")
"""
BORROW = """
from langchain_rcr.policy.triencoder import TriEncoder
print(type(TriEncoder.from_pretrained("lexical").state()).__name__)
"""


def distribution(folder: Path, module: str, entry: str, name: str = "toy_family") -> Path:
    """An installed distribution as it lies in site-packages."""
    (folder / "toy_family.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[langchain_rcr.families]\n{entry}\n")
    return folder


@pytest.fixture
def python(tmp_path):
    """Runs Python in an empty folder, with the distribution installed unless it is told not to."""
    site = tmp_path / "site"
    site.mkdir()
    distribution(site, TOY, "toy = toy_family:ToyFamily")
    (tmp_path / "demo.yaml").write_text(RUN)

    def run(*words, installed=True):
        path = [str(site)] if installed else []
        environ = {"PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)])}
        return warm.run(*words, cwd=tmp_path, environ=environ, fresh=True)

    return run


@pytest.mark.slow
def test_trained_saved_served_and_refused_where_it_is_not_installed(python):
    ran = python("-c", TRAIN)
    assert ran.returncode == 0, ran.stderr
    assert "did you mean 'model.buckets'" in ran.stderr
    assert "model.ngrams = '3' contradicts model.family = 'toy'" in ran.stderr
    served = python("-c", SERVE)
    assert served.stdout.split() == ["toy", "16", "halving", "3"], served.stderr
    refused = python("-c", SERVE, installed=False).stderr.splitlines()[-1]
    assert "unknown encoder family 'toy'" in refused
    assert "install" in refused
    assert "entry-point group 'langchain_rcr.families'" in refused
    again = python("-c", EVALUATE, installed=False)
    assert again.returncode == 0, again.stderr
    assert "unknown encoder family 'toy'" in again.stderr


@pytest.mark.slow
def test_a_state_that_comes_with_a_family_serves_ours_too(python):
    assert python("-c", LEND).returncode == 0
    served = python("-c", BORROW)
    assert served.stdout.split() == ["HalvingState"], served.stderr
    assert "unknown state 'halving'" in python("-c", BORROW, installed=False).stderr


@pytest.mark.parametrize(
    ("module", "entry", "message"),
    [
        ("import no_such_module", "toy = toy_family:ToyFamily", "can't be loaded: No module named 'no_such_module'"),
        ("ToyFamily = dict", "toy = toy_family:ToyFamily", "is not a Family of this name"),
        (TOY, "other = toy_family:ToyFamily", "is not a Family of this name"),
        (TOY.replace("name, summary, Settings =", "_ ="), "toy = toy_family:ToyFamily", "is not a Family of this name"),
        (TOY.replace("ToySettings(ModelSettings)", "ToySettings"), "toy = toy_family:ToyFamily", "its Settings are no"),
        (TOY.replace('"halving", ', '"additive", '), "toy = toy_family:ToyFamily", "'additive' is AdditiveState"),
    ],
)
def test_a_broken_family_is_named_and_spares_the_others(tmp_path, monkeypatch, caplog, module, entry, message):
    monkeypatch.syspath_prepend(distribution(tmp_path, module, entry))
    monkeypatch.delitem(sys.modules, "toy_family", raising=False)
    name = entry.split()[0]
    with pytest.raises(InputError, match=message) as error:
        get_family(name)
    assert "\n" not in str(error.value)
    assert name in family_names()
    assert [family.name for family in families()] == ["structure", "embeddings", "transformer", "lexical"]
    families()
    assert caplog.text.count(message) == 1


def test_a_family_needs_neither_summary_nor_settings_of_its_own(tmp_path, monkeypatch):
    bare = TOY.replace("name, summary, Settings = ", "name, _, _ = ").replace('"toy", ', '"bare", ')
    monkeypatch.syspath_prepend(distribution(tmp_path, bare, "bare = toy_family:ToyFamily"))
    monkeypatch.delitem(sys.modules, "toy_family", raising=False)
    assert families()[-1].name == "bare"
    assert get_family("bare").settings(lam=0.5).lam == 0.5
    assert get_family("structure").settings(state="additive").state == "additive"


def test_our_names_stay_ours(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(distribution(tmp_path, TOY, "lexical = toy_family:ToyFamily"))
    assert isinstance(get_family("lexical"), LexicalFamily)
    assert family_names().count("lexical") == 1
    assert "toy_family:ToyFamily is ignored, as langchain_rcr.families.embeddings:LexicalFamily has" in caplog.text


def test_of_two_distributions_the_first_on_the_path_has_the_name(tmp_path, monkeypatch, caplog):
    for name in ("second", "first"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(distribution(tmp_path / name, TOY, f"toy = {name}:ToyFamily", name))
    assert family_names()[-1] == "toy"
    assert "encoder family 'toy': second:ToyFamily is ignored, as first:ToyFamily has that name" in caplog.text


def test_a_checkpoint_names_no_import_path(tmp_path):
    model = TriEncoder.build("lexical", [], dim=4)
    model.save_pretrained(tmp_path / "c")
    file = tmp_path / "c" / "tri_encoder.json"
    text = file.read_text()
    assert "langchain_rcr.families" not in text
    file.write_text(text.replace('"lexical"', '"langchain_rcr.families.embeddings:LexicalFamily"'))
    reseal(tmp_path / "c")
    with pytest.raises(CheckpointError, match="unknown encoder family"):
        TriEncoder.from_pretrained(tmp_path / "c")
