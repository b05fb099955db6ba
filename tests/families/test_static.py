"""A text as the sum of its tokens' input embeddings."""

import copy
import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import saved_model
from places import ROOT
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families.backbone import load_backbone, open_backbone, save_backbone
from langchain_rcr.families.onnx_backbone import OnnxBackbone
from langchain_rcr.families.static import StaticBackbone
from langchain_rcr.families.structure import StructureSettings
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

TEXTS = ["how many rivers ?", "which state is the largest", "?", ""]


@pytest.fixture(scope="module")
def static(bert):
    return StaticBackbone.of(bert)


def test_shapes(static):
    vectors, tokens = static.read(TEXTS)
    assert vectors.shape == (4, static.dim)
    assert vectors.dtype == np.float32
    assert [len(each) for each in tokens][2:] == [1, 0]
    assert all(each.shape[1] == static.dim and each.dtype == np.float32 for each in tokens)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 0], rtol=1e-5)
    assert static.embed([]).shape == (0, static.dim)


def test_a_text_by_hand():
    # p of the first token is 1/2 : (1/2 + 1/3 + 1/4) = 6/13, of the third 3/13; a token weighs 0.001 / (0.001 + p).
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "b"}
    tokenizer = json.dumps({"version": "1.0", "model": words, "pre_tokenizer": {"type": "Whitespace"}})
    table = np.array([[1, 0], [0, 1], [0, 2]], dtype=np.float16)
    vectors, tokens = StaticBackbone(table, tokenizer).read(["a c", "c"])
    expected = np.array([1 / (0.001 + 6 / 13), 2 / (0.001 + 3 / 13)])
    np.testing.assert_allclose(vectors, [expected / np.linalg.norm(expected), [0, 1]], rtol=1e-5)
    np.testing.assert_array_equal(tokens[0], [[1, 0], [0, 2]])


def test_a_word_that_a_strangers_tokenizer_fails_at_is_refused_in_a_line(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["?"] = vocabulary.pop("[UNK]")
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for backbone in (StaticBackbone.of(str(folder)), OnnxBackbone(str(folder))):
        backbone.embed(["?"])
        with pytest.raises(InputError, match=r"^the tokenizer fails: .*UNK"):
            backbone.embed(["\N{SNOWMAN}"])


def test_its_token_vectors_are_the_models_centred_and_turned(bert, static):
    weights = load_file(f"{bert}/model.safetensors")
    matrix = next(value for name, value in weights.items() if name.endswith("word_embeddings.weight"))
    centred = matrix - matrix.mean(axis=0)
    kept = static.read(["how many rivers ?"])[1][0]
    ids = Tokenizer.from_file(f"{bert}/tokenizer.json").encode("how many rivers ?", add_special_tokens=False).ids
    # No component is left out of so narrow a model: a rotation, which keeps inner products.
    assert static.dim == matrix.shape[1]
    np.testing.assert_allclose(kept @ kept.T, centred[ids] @ centred[ids].T, rtol=0.02, atol=1e-4)


def test_texts_are_cut(bert):
    short, whole = StaticBackbone.of(bert, max_length=8), StaticBackbone.of(bert)
    assert len(short.read(["river " * 100_000])[1][0]) == 8
    np.testing.assert_array_equal(short.embed(["river state"]), whole.embed(["river state"]))


def test_saved_loaded_pickled_and_copied_to_the_bit(static, tmp_path):
    save_backbone(static, tmp_path)
    for again in (load_backbone(tmp_path), pickle.loads(pickle.dumps(static)), copy.deepcopy(static)):
        np.testing.assert_array_equal(again.embed(TEXTS), static.embed(TEXTS))


def damaged(folder, what):
    inside, tensors = folder / "backbone", load_file(folder / "backbone" / "model.safetensors")
    tokenizer = json.loads((inside / "tokenizer.json").read_text())
    if what == "beyond":
        tensors["tokens"] = tensors["tokens"][:5]
    elif what == "finite":
        tensors["tokens"][0, 0] = np.nan
    elif what == "half precision":
        tensors["tokens"] = tensors["tokens"].astype(np.float64)
    elif what == "tokens":
        tensors = {"others": tensors["tokens"]}
    elif what == "regular expression":
        tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
        tokenizer["pre_tokenizer"]["invert"] = False
    else:
        (inside / "model.safetensors").write_bytes(b"garbage")
        return
    save_file(tensors, inside / "model.safetensors")
    (inside / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("what", ["beyond", "finite", "half precision", "tokens", "regular expression", "used"])
def test_a_strangers_checkpoint_is_refused_in_a_line(static, tmp_path, what):
    save_backbone(static, tmp_path)
    damaged(tmp_path, what)
    with pytest.raises(CheckpointError, match=what) as caught:
        load_backbone(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("base", ["static:package:nothing_here", "static:/no/such/folder"])
def test_a_model_that_is_not_there_is_one_line(base):
    with pytest.raises(InputError, match=r"can't be loaded|is not installed") as caught:
        open_backbone(StructureSettings(base=base))
    assert "\n" not in str(caught.value)


def test_a_model_without_known_input_embeddings_is_refused(bert, tmp_path):
    save_file({"weight": np.zeros((3, 2), dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InputError, match="none of its tensors is named"):
        StaticBackbone.of(str(tmp_path))


def test_a_policy_over_it_is_served_as_it_was_fitted(bert, tmp_path):
    model = TriEncoder.fitted(saved_model.ITEMS, spec=ProgramSpec(), base=f"static:{bert}")
    model.save_pretrained(tmp_path)
    questions = [item.source for item in saved_model.QUESTIONS]
    again = TriEncoder.from_pretrained(tmp_path)
    np.testing.assert_allclose(again.encode_queries(questions), model.encode_queries(questions), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_needs_neither_torch_nor_transformers(bert, tmp_path):
    script = (
        "import sys\n"
        "from langchain_rcr.families.static import StaticBackbone\n"
        f"assert StaticBackbone.of({bert!r}).embed(['which river'])[0].any()\n"
        "assert not {'torch', 'transformers', 'onnxruntime'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
