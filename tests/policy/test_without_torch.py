"""Serving where torch is not installed: NumPy's vectors and picks are torch's, from the same formulas."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import saved_model
from fake_backbone import FakeBackbone
from langchain_core.embeddings import DeterministicFakeEmbedding
from places import ROOT

from langchain_rcr.basics import extras
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import CheckpointError, MissingExtraError
from langchain_rcr.families import backbone as backbones
from langchain_rcr.families import base
from langchain_rcr.families.backbone import LangChainBackbone
from langchain_rcr.policy.selection import greedy
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec

ITEMS, QUESTIONS = saved_model.ITEMS, [item.source for item in saved_model.QUESTIONS]
EMBEDDINGS = DeterministicFakeEmbedding(size=8)
RUNTIMES = ("torch", "onnx")


@pytest.fixture(params=["structure", "structure, after additions", "lexical", "embeddings", "embeddings of n-grams"])
def both(request, tmp_path):
    """A checkpoint, read by torch and by NumPy."""
    family, _, kind = request.param.partition(",")[0].partition(" ")
    if family == "structure":
        with mock.patch.object(backbones, "load_backbone", return_value=FakeBackbone()):
            model = TriEncoder.from_pretrained(saved_model.FOLDER)
            if "additions" in request.param:
                model.grow(
                    [Item("which zebra is spotted", "find(zebra)"), Item("is it a unicorn ?", "exists(unicorn)")]
                )
            model.save_pretrained(tmp_path)
            return [TriEncoder.from_pretrained(tmp_path, runtime=runtime) for runtime in RUNTIMES]
    backbone = LangChainBackbone(EMBEDDINGS) if family == "embeddings" else None
    options = {"ngrams": 2, "dim": 24} if kind or family == "lexical" else {"ngrams": 0}
    TriEncoder.build(family, ITEMS, backbone=backbone, **options).save_pretrained(tmp_path)
    embeddings = EMBEDDINGS if backbone else None
    return [TriEncoder.from_pretrained(tmp_path, embeddings=embeddings, runtime=runtime) for runtime in RUNTIMES]


def test_vectors_and_picks_are_torch_s(both):
    torch, numpy = both
    assert [model.query.trainable for model in both] == [True, False]
    assert torch.fingerprint() == numpy.fingerprint()
    pools = [model.encode_pool(ITEMS) for model in both]
    for part in ("candidate", "context"):
        np.testing.assert_allclose(*(np.asarray(getattr(pool, part)) for pool in pools), rtol=1e-5, atol=1e-6)
    queries = [model.encode_queries(QUESTIONS) for model in both]
    np.testing.assert_allclose(*queries, rtol=1e-4, atol=1e-5)
    picks = [greedy(each, pool, torch.state(), 4) for each, pool in zip(queries, pools, strict=True)]
    np.testing.assert_array_equal(*(each.positions for each in picks))
    relevance = [model.judge_queries(QUESTIONS, judge=True)[1] for model in both]
    np.testing.assert_array_equal(*relevance)
    if torch.family.takes_drafts:
        drafts = [saved_model.DRAFT, *[None] * (len(QUESTIONS) - 1)]
        np.testing.assert_allclose(*(model.encode_queries(QUESTIONS, drafts) for model in both), rtol=1e-4, atol=1e-4)


def test_what_one_saves_the_other_reads(both, tmp_path):
    folders = [tmp_path / runtime for runtime in RUNTIMES]
    for model, folder in zip(both, folders, strict=True):
        model.save_pretrained(folder)
    ours, theirs = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in folders
    )
    assert ours == theirs


def test_a_fit_by_numpy_is_torch_s():
    def fitted(numpy):
        model = TriEncoder.build("structure", ITEMS, backbone=FakeBackbone(), spec=ProgramSpec(), dim=96, numpy=numpy)
        model.family.fit(model.query, ITEMS, seed=0)
        model.vary({"label": 4.0, "cost": 0.2, "words": 0.3, "length_penalty": 0.5, "fade": 3.0})
        return model

    torch, numpy = map(fitted, (False, True))
    assert [torch.query.trainable, numpy.query.trainable] == [True, False]
    for name, array in torch.query.tensors().items():
        np.testing.assert_allclose(numpy.query.tensors()[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    assert torch.query.logged() == pytest.approx(numpy.query.logged())
    assert torch.config == numpy.config
    again = numpy.refitted(ITEMS[:30])
    assert again.query.logged()["ε"] == pytest.approx(0.2)
    for model in (torch, numpy):
        before, vectors = model.fingerprint(), np.asarray(model.encode_pool(ITEMS).candidate)
        with model.varied({"words": 2.0, "length_penalty": 1.0}):
            assert model.query.logged()["ω"] == pytest.approx(2.0)
            assert not np.array_equal(np.asarray(model.encode_pool(ITEMS).candidate), vectors)
        assert model.fingerprint() == before
        np.testing.assert_array_equal(np.asarray(model.encode_pool(ITEMS).candidate), vectors)


def test_without_torch_a_family_that_needs_it_says_so(monkeypatch, tmp_path, bert):
    model = TriEncoder.build("transformer", ITEMS, base=bert)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(base, "require", mock.Mock(side_effect=MissingExtraError("torch", "train")))
    with pytest.raises(CheckpointError, match=r"torch is not installed: pip install 'langchain-rcr\[train\]'"):
        TriEncoder.from_pretrained(tmp_path)


def test_without_transformers_too(monkeypatch, tmp_path, bert):
    model = TriEncoder.build("transformer", ITEMS, base=bert)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(extras, "installed", lambda package: package != "transformers")
    missing = r"transformers is not installed: pip install 'langchain-rcr\[train\]'"
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: {missing}"):
        TriEncoder.from_pretrained(tmp_path)
    with pytest.raises(MissingExtraError, match=missing):
        TriEncoder.build("transformer", ITEMS, base=bert)


WITHOUT = """
import sys
sys.modules.update(torch=None, transformers=None, scipy=None)
import langchain_rcr
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder
examples = [
    {"source": f"{words} {thing} in {state}", "target": f"{program}({thing}({state}))"}
    for words, program in (("how many", "count"), ("which", "answer"))
    for thing in ("river", "city", "lake") for state in ("texas", "ohio", "utah", "iowa")
]
options = dict(embeddings=DeterministicFakeEmbedding(size=8), k=2)
ours = dict(language="functional", input_keys=["source"])
fitted = SequentialCompositionalRetriever.from_examples(examples, **ours, **options)
fitted.add_example({"source": "how many hills in ohio", "target": "count(hill(ohio))"})
few = SequentialCompositionalRetriever.from_examples(examples[:5], **ours, **options)
lexical = SequentialCompositionalRetriever.from_encoder(
    TriEncoder.build("lexical", [Item(row["source"], row["target"]) for row in examples], dim=16), examples, k=2)
for name, made in (("fitted", fitted), ("few", few), ("lexical", lexical)):
    made.save(name)
    given = options if name != "lexical" else {"k": 2}
    again = SequentialCompositionalRetriever.from_pretrained(name, **given)
    for question in ("how many hills in ohio", "which city in utah"):
        picks = [row["source"] for row in again.select_examples({"source": question})]
        assert picks == [row["source"] for row in made.select_examples({"source": question})]
        assert len(picks) == 2
    assert len(again.batch(["which river in iowa", "how many lakes in utah"])[0]) == 2
fitted.refit()
assert fitted.relevance("which city in utah") > 0
default = SequentialCompositionalRetriever.from_examples(examples, k=2, **ours)
for runtime in ("torch", "onnx", "onnx-int8"):
    default.save(runtime, runtime=runtime)
    again = SequentialCompositionalRetriever.from_pretrained(runtime)
    picks = [row["source"] for row in again.select_examples({"source": "which city in utah"})]
    assert picks[-1] == "which city in utah", picks  # the first pick last
assert not any(map(sys.modules.get, ("torch", "transformers", "scipy")))
"""


@pytest.mark.slow
def test_a_process_without_torch_fits_saves_loads_and_selects(tmp_path):
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
