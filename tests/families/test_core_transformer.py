"""The transformer family on a tiny BERT: pooling by hand, padding, truncation, gradients, files, bad names."""

import json
import shutil
import subprocess
import sys
import time
from inspect import cleandoc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_bert import tiny_bert
from toys import installed

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families.pooled import PooledTransformer, TransformerEncoder, model_folder
from langchain_rcr.policy.triencoder import TriEncoder

torch.set_num_threads(1)

ITEMS = [
    Item("what is the capital of texas", "answer(capital(stateid(texas)))"),
    Item("area ?"),
    Item("how long is the river", "count(river(all))"),
    Item("unknownword"),
    Item(""),
]


@pytest.fixture(params=["mean", "cls"])
def encoder(request, bert):
    return TransformerEncoder(bert, pooling=request.param, max_length=32).eval()


def test_shapes_and_determinism(encoder):
    vectors = encoder.encode(ITEMS)
    assert vectors.shape == (5, 16)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    encoder.train()  # inference knows no dropout
    np.testing.assert_array_equal(vectors, encoder.encode(ITEMS))
    assert encoder.training
    assert encoder.encode([]).shape == (0, 16)


def test_pooling_by_hand(encoder):
    text = encoder.text
    ids = text.tokenizer("area of texas")["input_ids"]
    with torch.inference_mode():
        hidden = text.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    expected = hidden[0] if text.pooling == "cls" else hidden.mean(0)
    np.testing.assert_allclose(encoder.encode([Item("area of texas")])[0], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_padding_and_batches_change_nothing(encoder, monkeypatch):
    alone = np.concatenate([encoder.encode([item]) for item in ITEMS])
    for batch_size in (1, 2, 3, 5):
        monkeypatch.setattr(TransformerEncoder, "batch_size", batch_size)
        np.testing.assert_allclose(encoder.encode(ITEMS), alone, rtol=1e-4, atol=1e-5)
    order = np.array([4, 2, 0, 3, 1])
    shuffled = encoder.encode([ITEMS[n] for n in order])
    np.testing.assert_allclose(shuffled, alone[order], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_texts_of_like_length_are_encoded_together(encoder):
    lengths = [len(ids) for ids in encoder.featurize(ITEMS).ids]
    ordered = [lengths[row] for row in encoder.order(encoder.featurize(ITEMS))]
    assert ordered == sorted(lengths, reverse=True)


def test_a_text_is_cut_at_max_length(bert):
    encoder = TransformerEncoder(bert, max_length=8)
    long = encoder.featurize([Item("river " * 50)]).ids[0]
    assert len(long) == 8
    np.testing.assert_array_equal(encoder.encode([Item("river " * 50)]), encoder.encode([Item("river " * 6)]))
    assert TransformerEncoder(bert, max_length=10_000).text.max_length == 40  # the model's own positions


def test_the_tokenizers_limit_counts_where_it_is_the_smaller(bert, tmp_path):
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 38}))
    encoder = TransformerEncoder(str(folder), max_length=512)
    assert encoder.text.max_length == 38
    assert np.isfinite(encoder.encode([Item("river " * 100)])).all()


@pytest.mark.parametrize("text", ["x" * 100_000, "river " * 17_000, "( " * 50_000])
def test_a_query_of_100_000_characters(encoder, text):
    began = time.perf_counter()
    assert np.isfinite(encoder.encode([Item(text)])).all()
    assert time.perf_counter() - began < 1


def test_a_model_stored_in_half_precision_is_trained_in_single(bert, tmp_path):
    half = TransformerEncoder(bert)
    half.text.model.half()
    half.text.save(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float16}
    assert {parameter.dtype for parameter in TransformerEncoder(str(tmp_path)).parameters()} == {torch.float32}


def test_normalized_vectors(bert):
    encoder = TransformerEncoder(bert, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(encoder.encode(ITEMS), axis=1), 1, rtol=1e-5)


def test_question_and_program_are_both_read(encoder):
    one, other = Item("area", "answer(texas)"), Item("area", "answer(ohio)")
    assert not np.allclose(*encoder.encode([one, other]))


def test_gradients_reach_every_weight_that_takes_part(encoder):
    encoder(encoder.featurize(ITEMS)).square().sum().backward()
    without = {name for name, p in encoder.named_parameters() if p.grad is None}
    assert without == {"text.model.pooler.dense.weight", "text.model.pooler.dense.bias"}  # BERT's own; unused


def test_a_tokenizer_without_special_tokens_gives_an_empty_text_a_vector(encoder):
    tokens = encoder.text.tokenize(["area"])
    tokens.ids.append([])
    assert torch.isfinite(encoder.text(tokens)).all()
    assert torch.isfinite(encoder.text(type(tokens)([[]]))).all()


def test_saved_and_loaded_to_the_bit(encoder, tmp_path, bert):
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(1.5)
    encoder.save(tmp_path)
    again = TransformerEncoder.load(tmp_path)
    assert again.settings() == encoder.settings()
    assert again.reads() == encoder.reads()
    assert again.text.base == bert
    np.testing.assert_array_equal(again.encode(ITEMS), encoder.encode(ITEMS))


def test_a_saved_folder_opens_with_automodel(encoder, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    encoder.save(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(["area of texas"], return_tensors="pt")
    ours = encoder.text.model(**batch).last_hidden_state
    torch.testing.assert_close(model(**batch).last_hidden_state, ours, rtol=0, atol=0)


@pytest.mark.slow
def test_two_threads_may_be_the_first_to_use_transformers(bert):
    # Their lazy imports got in each other's way: "cannot import name 'AutoModel'".
    code = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier
        from langchain_rcr.families.pooled import PooledTransformer

        barrier = Barrier(4)

        def load(_):
            barrier.wait()
            return PooledTransformer(sys.argv[1]).dim

        assert "transformers.models" not in sys.modules
        print(sum(ThreadPoolExecutor(4).map(load, range(4))))
    """
    done = subprocess.run([sys.executable, "-c", cleandoc(code), bert], check=True, capture_output=True, text=True)
    assert done.stdout == "64\n"


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("package:no_such_package_x", "'no_such_package_x' is not installed: pip install no-such-package-x"),
        ("package:", "Python package '' is not installed"),
        ("package:no_such.sub", "Python package 'no_such.sub' is not installed"),
        ("package:..", r"Python package '\.\.' is not installed"),
        ("package:json", "Python package 'json' is not installed"),
        ("package:pytest", "package 'pytest' carries no model folder"),
        ("package:math", "Python package 'math' is not installed"),
        ("someone/no-such-model", "model 'someone/no-such-model' can't be loaded"),
        ("no-such-model", "model 'no-such-model' can't be loaded"),
        ("/no/such/folder", "model '/no/such/folder' can't be loaded"),
        ("", "model '' can't be loaded"),
    ],
)
def test_a_model_that_is_not_there_is_one_line_soon(base, message):
    began = time.perf_counter()
    with pytest.raises(InputError, match=message) as error:
        PooledTransformer(base)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - began < 2


def test_a_model_in_an_installed_package(tmp_path, monkeypatch):
    tiny_bert(tmp_path / "some_model_package" / "data" / "model")
    (tmp_path / "some_model_package" / "__init__.py").touch()
    (tmp_path / "some_model_package" / "config.json").write_text("{}")  # no model: there is no tokenizer beside it
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "some_model_package")
    assert model_folder("package:some_model_package") == str(tmp_path / "some_model_package" / "data" / "model")
    assert PooledTransformer("package:some_model_package").dim == 16


def test_a_folder_on_the_path_is_no_installed_package(bert, tmp_path, monkeypatch):
    shutil.copytree(bert, tmp_path / "private" / "model")
    (tmp_path / "private" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="Python package 'private' is not installed"):
        model_folder("package:private")
    # A distribution of this name doesn't help where the folder isn't its own, or leads out of it.
    shutil.copytree(bert, tmp_path / "other" / "model")
    installed(tmp_path, "private", "other/model/config.json", "private/../other/model/tokenizer_config.json")
    with pytest.raises(InputError, match="package 'private' carries no model folder"):
        model_folder("package:private")


def test_a_dotted_package_name_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="is not installed"):
        model_folder("package:outer_package.inner")


@pytest.mark.parametrize("damage", ["truncated", "text", "foreign config", "no weights", "code"])
def test_a_damaged_model_folder_is_one_line(bert, tmp_path, damage):
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "text":
        weights.write_text("not weights")
    elif damage == "no weights":
        weights.unlink()
    elif damage == "code":  # never run, nor asked about at a prompt
        (folder / "code.py").write_text("raise SystemExit('code was run')")
        named = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
        config.write_text(json.dumps(named))
    else:
        config.write_text(json.dumps({"model_type": "none such"}))
    with pytest.raises(InputError, match=r"model '.*model' can't be loaded") as error:
        PooledTransformer(str(folder))
    assert "\n" not in str(error.value)


def test_what_a_checkpoint_cannot_hold_is_refused_before_training(bert, tmp_path):
    from transformers import GPT2Config, GPT2Model

    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "a+b"}, "content": "c"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for family in ("transformer", "embeddings"):
        with pytest.raises(InputError, match=r"model' can't be kept in a checkpoint: .* the regular expression 'a\+b'"):
            TriEncoder.build(family, ITEMS, base=str(folder))
    gpt = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=29, n_positions=40)
    GPT2Model(gpt).save_pretrained(folder)
    with pytest.raises(InputError, match="model_type 'gpt2' isn't a text encoder"):
        TriEncoder.build("transformer", ITEMS, base=str(folder))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_tokenizer_of_another_kind_is_saved_and_read_as_it_was(bert, tmp_path, kind):
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE, Unigram
    from tokenizers.normalizers import NFC, NFKC, Nmt, Replace, Sequence
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace, WhitespaceSplit
    from tokenizers.pre_tokenizers import Sequence as Pieces
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {token: n for n, token in enumerate(["<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyzĠ▁"])}
    if kind == "byte-level":
        backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = NFC(), ByteLevel(add_prefix_space=True)
    else:
        backend = Tokenizer(Unigram([(token, -1.0) for token in vocabulary], unk_id=1))
        backend.normalizer = Sequence([Nmt(), NFKC(), Replace(Regex(" {2,}"), " ")])
        backend.pre_tokenizer = Pieces([WhitespaceSplit(), Metaspace()])
    backend.enable_padding(length=30)
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 40, "truncation_side": "left"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    BertModel(BertConfig.from_pretrained(folder, vocab_size=len(vocabulary))).save_pretrained(folder)
    encoder = TransformerEncoder(str(folder), max_length=8).eval()
    (tmp_path / "saved").mkdir()
    encoder.save(tmp_path / "saved")
    again = TransformerEncoder.load(tmp_path / "saved").eval()
    assert again.featurize(ITEMS) == encoder.featurize(ITEMS)
    np.testing.assert_array_equal(again.encode(ITEMS), encoder.encode(ITEMS))


def test_a_folder_of_another_tokenizer_is_refused(encoder, tmp_path):
    encoder.save(tmp_path / "one")
    tiny_bert(tmp_path / "other", words="other words stand in this one")
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "one" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not the one that one/encoder.json was written with"):
        TransformerEncoder.load(tmp_path / "one")


def test_texts_and_their_tokens_in_one_pass(encoder, monkeypatch):
    text, sources = encoder.text, [item.source for item in ITEMS]
    vectors, tokens = text.read(sources, batch_size=2)
    np.testing.assert_allclose(vectors, encoder.encode([Item(source) for source in sources]), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        ids = torch.tensor([text.tokenizer(sources[2])["input_ids"]])
        layers = text.model(input_ids=ids, output_hidden_states=True).hidden_states
    layer = layers[3 * (len(layers) - 1) // 4][0]
    np.testing.assert_allclose(tokens[2], layer[1:-1].numpy(), rtol=1e-4, atol=1e-5)
    assert tokens[4].shape == (0, 16)
    passes = []
    monkeypatch.setattr(
        text.model, "forward", lambda *_, _own=text.model.forward, **more: passes.append(1) or _own(**more)
    )
    text.read(sources, batch_size=5)
    assert len(passes) == 1
