"""A run over the user's own LangChain embeddings, from the settings to serving."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from rcr_trainer import pipeline
from rcr_trainer.data.files import read_split
from rcr_trainer.errors import ConfigError
from rcr_trainer.evaluation.stage import evaluation_stage
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.tasks import divide
from rcr_trainer.settings import Settings

from langchain_rcr import CheckpointError, SequentialCompositionalRetriever

pytestmark = pytest.mark.slow

MODULE = """
from langchain_core.embeddings import DeterministicFakeEmbedding

SEEN = []

class Counted(DeterministicFakeEmbedding):
    def embed_documents(self, texts):
        SEEN.extend(texts)
        return super().embed_documents(texts)

def make():
    return Counted(size=16)

def nothing():
    return 7
"""


def _config(base: str, **model: str) -> Settings:
    return Settings.model_validate(
        {
            "name": "own",
            "threads": 1,
            "data": {"train_size": 40, "test_size": 8, "dev_size": 8},
            "model": {"base": base, **model},
            "sft": {"epochs": 1},
            "evaluation": {"selectors": ["random", "dense"]},
        }
    )


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    (here / "my_embeddings_of_this_test.py").write_text(MODULE)
    return here


def test_a_run_over_langchain_embeddings_and_its_serving(here: Path) -> None:
    run = pipeline.run(_config("langchain:my_embeddings_of_this_test:make"))
    report = json.loads((run.path / "evaluation.json").read_text())
    assert report["n"] == 8
    assert {"rcr", "random", "dense"} == set(report["selectors"])
    with pytest.raises(CheckpointError, match="pass it as embeddings="):
        SequentialCompositionalRetriever.from_pretrained(run.path)
    served = SequentialCompositionalRetriever.from_pretrained(
        run.path, k=3, embeddings=DeterministicFakeEmbedding(size=16)
    )
    assert len(served.select_examples({"source": "there is a dog"})) == 3


@pytest.mark.parametrize("again", [False, True])
def test_what_is_paid_for_embeds_the_pool_once(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_embeddings_of_this_test", raising=False)
    run = pipeline.run(_config("langchain:my_embeddings_of_this_test:make", family="embeddings"))
    seen = sys.modules["my_embeddings_of_this_test"].SEEN
    if again:
        seen.clear()
        run = Run.open(run.path)
        run.foreign = frozenset()
        evaluation_stage(run)
    counts = Counter(seen)
    pool = divide(run.config, read_split(run.data)).pool
    assert [counts[example.source] for example in pool] == [1] * len(pool)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("langchain:my_embeddings_of_this_test:lacking", "can't be loaded"),
        ("langchain:no_such_module_at_all:make", "can't be loaded"),
        ("langchain:my_embeddings_of_this_test:nothing", "returned int"),
    ],
)
def test_what_is_no_embeddings_is_one_line(base: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pipeline.run(_config(base))
    assert "\n" not in str(caught.value)
