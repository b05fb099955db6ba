"""The lexical and embeddings families: values by hand, batches, gradients, files, LangChain Embeddings."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from tiny_bert import tiny_bert

from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, InputError
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import (
    LangChainBackbone,
    RememberingBackbone,
    TransformerBackbone,
    load_backbone,
    save_backbone,
)
from langchain_rcr.families.encoder import LinearEncoder
from langchain_rcr.families.ngrams import NgramVocabulary
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.families.structure.shown import NumpyProgramEncoder
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

torch.set_num_threads(1)

ITEMS = [
    Item("capital of texas", "answer(capital(texas))"),
    Item("capital of ohio", "answer(capital(ohio))"),
    Item("how many rivers are in texas ?", "count(river(texas))"),
    Item("area ?", "area(all)"),
    Item("nothing in common", ""),
]


class Counting(Embeddings):
    """Remembers what it was asked; questions and documents get different vectors."""

    def __init__(self, size=8):
        self.fake = DeterministicFakeEmbedding(size=size)
        self.queries, self.documents = [], []

    def embed_query(self, text):
        self.queries.append(text)
        return self.fake.embed_query(f"query: {text}")

    def embed_documents(self, texts):
        self.documents += texts
        return self.fake.embed_documents(texts)


@pytest.fixture(params=["lexical", "embeddings", "embeddings without n-grams", "embeddings projected"])
def encoder(request):
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    if request.param == "lexical":
        return LinearEncoder(None, vocabulary, ngram_init=1.0, dim=12, scale=3.0, seed=4)
    backbone = LangChainBackbone(DeterministicFakeEmbedding(size=8))
    if request.param == "embeddings":
        return LinearEncoder(backbone, vocabulary, init=-0.3, ngram_init=0.7, scale=2.0, seed=4)
    if request.param == "embeddings projected":
        return LinearEncoder(backbone, vocabulary, dim=5, ngram_init=0.7, queries=True, seed=4)
    return LinearEncoder(backbone)


def test_shapes_and_determinism(encoder):
    vectors = encoder.encode(ITEMS)
    assert vectors.shape == (5, encoder.dim)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors, encoder.encode(ITEMS))
    assert encoder.encode([]).shape == (0, encoder.dim)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 100])
def test_batches_change_nothing(encoder, batch_size, monkeypatch):
    whole = encoder.encode(ITEMS)
    monkeypatch.setattr(type(encoder), "batch_size", batch_size)
    np.testing.assert_allclose(encoder.encode(ITEMS), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([encoder.encode([item]) for item in ITEMS]), whole, rtol=1e-5, atol=1e-6)


def test_selected_features_give_the_vectors_of_those_rows(encoder):
    rows = np.array([3, 0, 0, 2])
    features = encoder.featurize(ITEMS)
    assert len(features) == 5
    np.testing.assert_allclose(
        encoder.vectors(features.select(rows)), encoder.vectors(features)[rows], rtol=1e-5, atol=1e-6
    )


def test_inference_leaves_the_mode_and_makes_no_graph(encoder):
    encoder.train()
    encoder.encode(ITEMS)
    assert encoder.training
    assert encoder(encoder.featurize(ITEMS)).requires_grad


def test_gradients_reach_every_parameter(encoder):
    encoder(encoder.featurize(ITEMS)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_saved_and_loaded_to_the_bit(encoder, tmp_path):
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    encoder.save(tmp_path)
    again = type(encoder).load(tmp_path, encoder.backbone)
    assert again.settings() == encoder.settings()
    assert again.reads() == encoder.reads()
    np.testing.assert_array_equal(again.encode(ITEMS), encoder.encode(ITEMS))


@pytest.mark.parametrize("scale", ["loud", {}, [1, 2]])
def test_a_strangers_scale_is_a_number(encoder, tmp_path, scale):
    inventory = Inventory.fit(ProgramSpec(), [item.target for item in ITEMS], 100)
    for number, one in enumerate((encoder, NumpyProgramEncoder(inventory, length_penalty=1.0))):
        folder = tmp_path / str(number)
        folder.mkdir()
        one.save(folder)
        file, name = folder / "encoder.json", "length_penalty" if number else "scale"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: scale}))
        with pytest.raises(CheckpointError, match=r"encoder\.json was not written by this version"):
            type(one).load(folder, one.backbone)


def test_a_query_of_100_000_characters(encoder):
    vectors = encoder.encode([Item("what is the capital " * 5000), Item("x" * 100_000)])
    assert np.isfinite(vectors).all()


def test_a_lexical_vector_by_hand():
    vocabulary = NgramVocabulary({"a": 3.0, "b": 4.0, "⇒a": 1.0}, 1)
    encoder = LinearEncoder(None, vocabulary, ngram_init=1.0, dim=2, scale=10.0)
    with torch.no_grad():
        encoder.ngrams.bag.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    # Weights 3/5 and 4/5; then "a" alone beside its program; then nothing known.
    expected = [[6, 8], [10 * (3 + 1) / 10**0.5, 10 / 10**0.5], [0, 0]]
    np.testing.assert_allclose(encoder.encode([Item("a b"), Item("a", "a"), Item("z")]), expected, rtol=1e-6)


def test_the_three_lexical_encoders_start_out_as_tf_idf_cosine_and_its_opposite():
    model = TriEncoder.build("lexical", ITEMS, dim=4096, scale=20.0, context_init=-0.3)
    queries = model.encode_queries([item.source for item in ITEMS])
    pool = model.encode_pool([Item(item.source) for item in ITEMS])
    np.testing.assert_allclose(np.diag(queries @ pool.candidate.T), 20, rtol=0.1)
    np.testing.assert_allclose(pool.context, -6 * pool.candidate, rtol=1e-5, atol=1e-6)


def test_an_untrained_embeddings_policy_is_the_backbone_and_its_opposite():
    backbone = LangChainBackbone(DeterministicFakeEmbedding(size=8))
    model = TriEncoder.build("embeddings", ITEMS, backbone=backbone, ngram_init=0.0, scale=20.0, context_init=-0.3)
    sources = [item.source for item in ITEMS]
    np.testing.assert_allclose(model.encode_queries(sources), 20 * backbone.embed(sources, queries=True), rtol=1e-5)
    pool = model.encode_pool(ITEMS)
    np.testing.assert_allclose(pool.candidate, backbone.embed(sources), rtol=1e-5)
    np.testing.assert_allclose(pool.context, -6 * backbone.embed(sources), rtol=1e-5, atol=1e-6)


def test_an_embeddings_vector_by_hand():
    backbone = LangChainBackbone(DeterministicFakeEmbedding(size=2))
    vocabulary = NgramVocabulary({"a": 3.0, "⇒b": 4.0}, 1)
    encoder = LinearEncoder(backbone, vocabulary, scale=10.0)
    with torch.no_grad():
        encoder.head.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        encoder.ngrams.bag.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    frozen = backbone.embed(["a"])[0]
    np.testing.assert_allclose(encoder.encode([Item("a", "b")])[0], [10 * frozen[1] + 6, 10 * frozen[0] + 8], rtol=1e-5)


# ---------------------------------------------------------------- backbones


def test_embeddings_become_unit_vectors_and_each_text_is_embedded_once():
    embeddings = Counting()
    backbone = LangChainBackbone(embeddings)
    embeddings.queries.clear()
    embeddings.documents.clear()
    documents = backbone.embed(["a", "b", "a"])
    queries = backbone.embed(["a", "a"], queries=True)
    assert (embeddings.documents, embeddings.queries) == (["a", "b"], ["a"])
    np.testing.assert_allclose(np.linalg.norm(documents, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(documents[0], documents[2])
    raw = np.array(embeddings.fake.embed_query("b"))
    np.testing.assert_allclose(documents[1], raw / np.linalg.norm(raw), rtol=1e-5)
    assert not np.allclose(queries[0], documents[0])
    assert backbone.embed([]).shape == (0, 8)


def test_an_example_without_a_program_is_still_no_question():
    embeddings = Counting()
    model = TriEncoder.build("embeddings", ITEMS, backbone=LangChainBackbone(embeddings), ngrams=0)
    embeddings.queries.clear()
    alone = model.encode_pool([ITEMS[4]])
    assert embeddings.queries == []
    np.testing.assert_allclose(alone.candidate, model.encode_pool(ITEMS).candidate[4:], rtol=1e-6)
    model.encode_queries(["which?"])
    assert embeddings.queries == ["which?"]


@pytest.mark.parametrize("rows", [[[1.0]], [[float("nan")] * 8], [[0.0] * 7]])
def test_embeddings_that_return_something_else_are_an_input_error(rows):
    embeddings = Counting()
    backbone = LangChainBackbone(embeddings)
    embeddings.embed_documents = lambda texts: rows
    with pytest.raises(InputError, match="embeddings returned"):
        backbone.embed(["a"])


def test_a_remembering_backbone_asks_once(bert):
    embeddings = Counting()
    inner = LangChainBackbone(embeddings)
    memory = RememberingBackbone(inner)
    embeddings.queries.clear()
    np.testing.assert_array_equal(memory.embed(["a", "b", "a"]), inner.embed(["a", "b", "a"]))
    embeddings.documents.clear()
    memory.embed(["b", "c"])
    memory.embed(["c", "a"], queries=True)
    assert (embeddings.documents, embeddings.queries) == (["c"], ["c", "a"])
    assert memory.embed([]).shape == (0, 8)

    transformer = TransformerBackbone(bert)
    asked = []
    embed = transformer.embed
    transformer.embed = lambda texts, queries=False: asked.append(list(texts)) or embed(texts, queries=queries)
    memory = RememberingBackbone(transformer)
    memory.embed(["river", "state"])
    memory.embed(["state", "area"], queries=True)  # a transformer embeds questions as it does examples
    assert asked == [["river", "state"], ["area"]]


def test_the_pool_is_featurised_once_for_both_encoders(bert):
    for options in ({"backbone": LangChainBackbone(Counting())}, {"base": bert}):
        model = TriEncoder.build("embeddings", ITEMS, **options)
        asked = []
        embed = model.candidate.backbone.embed
        model.candidate.backbone.embed = lambda texts, queries=False, embed=embed, asked=asked: (
            asked.append(len(texts)) or embed(texts, queries=queries)
        )
        pool = model.encode_pool(ITEMS)
        assert asked == [5]
        np.testing.assert_array_equal(pool.context, model.context.encode(ITEMS))
        np.testing.assert_array_equal(pool.candidate, model.candidate.encode(ITEMS))


def test_encoders_that_read_differently_get_their_own_features():
    vocabulary = NgramVocabulary.fit(ITEMS, 2)
    other = NgramVocabulary.fit(ITEMS, 1)
    query, context, candidate = (
        LinearEncoder(None, known, ngram_init=1.0, dim=6) for known in (vocabulary, other, vocabulary)
    )
    model = TriEncoder(query, context, candidate, get_family("lexical").settings())
    pool = model.encode_pool(ITEMS)
    np.testing.assert_array_equal(pool.context, model.context.encode(ITEMS))
    assert not np.allclose(pool.context, pool.candidate)


def test_a_frozen_transformer_gives_unit_vectors_and_gets_no_gradient(bert):
    model = TriEncoder.build("embeddings", ITEMS, base=bert)
    backbone = model.candidate.backbone
    np.testing.assert_allclose(np.linalg.norm(backbone.embed(["river", "area of texas"]), axis=1), 1, rtol=1e-5)
    model.query(model.query.featurize(ITEMS)).sum().backward()
    assert not any("backbone" in name for name, _ in model.named_parameters())
    before = backbone.read(["river"])[0]
    model.train()
    np.testing.assert_array_equal(backbone.read(["river"])[0], before)  # no dropout in frozen vectors


def test_a_backbone_from_a_local_folder_travels_with_the_checkpoint(tmp_path):
    folder = Path(tiny_bert(tmp_path / "model"))
    backbone = TransformerBackbone(str(folder), pooling="cls", max_length=12)
    expected = backbone.embed(["area of texas"])
    (tmp_path / "checkpoint").mkdir()
    save_backbone(RememberingBackbone(backbone), tmp_path / "checkpoint")
    shutil.rmtree(folder)
    shutil.move(tmp_path / "checkpoint", tmp_path / "elsewhere")
    again = load_backbone(tmp_path / "elsewhere", torch=True)
    np.testing.assert_array_equal(again.embed(["area of texas"]), expected)
    # And once more, from the copy, which need not be there any more.
    (tmp_path / "third").mkdir()
    shutil.rmtree(tmp_path / "elsewhere")
    save_backbone(again, tmp_path / "third")
    np.testing.assert_array_equal(load_backbone(tmp_path / "third", torch=True).embed(["area of texas"]), expected)


def test_a_checkpoint_over_langchain_embeddings_wants_them_again(tmp_path):
    fake = DeterministicFakeEmbedding(size=8)
    model = TriEncoder.build("embeddings", ITEMS, backbone=LangChainBackbone(fake))
    model.save_pretrained(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"LangChain's DeterministicFakeEmbedding: pass it as embeddings="):
        TriEncoder.from_pretrained(tmp_path / "c")
    again = TriEncoder.from_pretrained(tmp_path / "c", embeddings=DeterministicFakeEmbedding(size=8))
    np.testing.assert_allclose(again.encode_pool(ITEMS).context, model.encode_pool(ITEMS).context, rtol=1e-5)
    for other in (DeterministicFakeEmbedding(size=9), Counting(8)):
        with pytest.raises(CheckpointError, match="another embedding model"):
            TriEncoder.from_pretrained(tmp_path / "c", embeddings=other)


def test_embeddings_that_fail_are_no_damaged_checkpoint(tmp_path):
    TriEncoder.build("embeddings", ITEMS, backbone=LangChainBackbone(Counting())).save_pretrained(tmp_path)
    down = Counting()
    down.embed_query = Mock(side_effect=ConnectionError("the service is down"))
    with pytest.raises(ConnectionError, match=r"^the service is down"):
        TriEncoder.from_pretrained(tmp_path, embeddings=down)
    with pytest.raises(InputError, match=r"^embeddings must be LangChain Embeddings, not str"):
        TriEncoder.from_pretrained(tmp_path, embeddings="text-embedding-3-small")
    with pytest.raises(InputError, match=r"^embeddings must be LangChain Embeddings, not the class Counting"):
        TriEncoder.from_pretrained(tmp_path, embeddings=Counting)


def test_an_embeddings_object_may_stand_in_for_the_model_it_wraps(tmp_path, bert):
    model = TriEncoder.build("embeddings", ITEMS, base=bert)
    model.save_pretrained(tmp_path / "c")

    class Wrapped(Embeddings):
        def embed_documents(self, texts):
            return (3 * model.query.backbone.embed(texts)).tolist()

        def embed_query(self, text):
            return self.embed_documents([text])[0]

    again = TriEncoder.from_pretrained(tmp_path / "c", embeddings=Wrapped())
    np.testing.assert_allclose(again.encode_queries(["area"]), model.encode_queries(["area"]), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="another embedding model"):
        TriEncoder.from_pretrained(tmp_path / "c", embeddings=DeterministicFakeEmbedding(size=16))


@pytest.mark.parametrize(
    "change",
    [
        {"probe": "x"},
        {"probe": [0.1]},
        {"probe": None},
        {"dim": 9},
        {"kind": "pickle"},
        {"kind": ["transformer"]},
        {"kind": "transformer"},
        {"kind": "transformer", "base": "checkpoint:backbone", "pooling": "mean", "max_length": None},
        {"kind": "transformer", "base": "checkpoint:backbone", "pooling": "mean", "max_length": 10},
    ],
)
def test_a_damaged_backbone_file_is_a_checkpoint_error(tmp_path, change):
    fake = DeterministicFakeEmbedding(size=8)
    save_backbone(LangChainBackbone(fake), tmp_path)
    file = tmp_path / "backbone.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError) as error:
        load_backbone(tmp_path, None if "kind" in change else fake)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
