"""A checkpoint of the structure family that stays in the repository: later versions must take it for what it was.

    python tests/saved_model.py

writes it anew. That is right only after `FORMAT_VERSION` went up: a checkpoint of before would be read, and mispredict.
"""

import json
from pathlib import Path
from unittest import mock

from fake_backbone import FakeBackbone
from rcr_trainer.data.covr import covr_split

from langchain_rcr.families import backbone as backbones
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

FOLDER, EXPECTED = Path(__file__).parent / "saved" / "checkpoint", Path(__file__).parent / "saved" / "expected.json"
SPLIT = covr_split("110", 0, 40, 4)
ITEMS, QUESTIONS = ([example.item for example in part] for part in (SPLIT.train, SPLIT.test))
DRAFT = QUESTIONS[0].target


def read():
    """The checkpoint, over the words that it was fitted to."""
    with mock.patch.object(backbones, "load_backbone", return_value=FakeBackbone()):
        return TriEncoder.from_pretrained(FOLDER)


def predicted(model):
    """What the policy expects of four questions, of the first with a draft, and what it picks for the four."""
    vectors = model.encode_queries([item.source for item in QUESTIONS])
    drafted = model.encode_queries([QUESTIONS[0].source], [DRAFT])
    picks = greedy(vectors, model.encode_pool(ITEMS), model.state(), 4)
    return {"vectors": vectors.tolist(), "with a draft": drafted.tolist(), "picks": picks.positions.tolist()}


def write():
    """Fit and save it, and what it predicts."""
    spec = ProgramSpec()
    model = TriEncoder.build("structure", ITEMS, backbone=FakeBackbone(), spec=spec, dim=96)
    model.family.fit(model.query, ITEMS, seed=0)
    model.save_pretrained(FOLDER)
    rounded = json.loads(json.dumps(predicted(read())), parse_float=lambda text: round(float(text), 5))
    EXPECTED.write_text(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    write()
