"""Whatever answered a question can still be pickled, forked and sent to a spawned process: every family and chain."""

import multiprocessing
import pickle

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import BasePromptTemplate

from langchain_rcr import SequentialCompositionalRetriever, few_shot_prompt, semantic_parsing_chain
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import LangChainBackbone
from langchain_rcr.folds import Folds
from langchain_rcr.items import Item
from langchain_rcr.policy import TriEncoder
from langchain_rcr.programs import ProgramSpec

pytestmark = pytest.mark.slow

ITEMS = [
    Item(f"what is the {word} of {state}", f"answer({word}({state}))")
    for word in ("capital", "area", "river")
    for state in ("texas", "ohio")
]
QUESTION = "what is the area of texas"
KINDS = ("lexical", "embeddings", "embeddings over a model", "structure", "structure over a model", "transformer")


def policy(kind, bert):
    family, _, over = kind.partition(" ")
    base = bert if over or family == "transformer" else None
    backbone = None
    if kind == "embeddings":
        backbone = LangChainBackbone(DeterministicFakeEmbedding(size=8))
    model = TriEncoder.build(family, ITEMS, base=base, backbone=backbone)
    if model.family.fits:
        model.family.fit(model.query, ITEMS, Folds.of(ITEMS, ProgramSpec(), own_program=True), seed=0)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def used(request, bert):
    """A retriever after its first question."""
    examples = [{"source": item.source, "target": item.target} for item in ITEMS]
    retriever = SequentialCompositionalRetriever.from_encoder(policy(request.param, bert), examples, k=2)
    retriever.invoke(QUESTION)
    return retriever


def answers(runnable):
    """What it says to a question, comparable across processes."""
    if isinstance(runnable, BasePromptTemplate):
        return runnable.format(**dict.fromkeys(runnable.input_variables, QUESTION))
    answer = runnable.invoke(QUESTION)
    return [document.page_content for document in answer] if isinstance(answer, list) else str(answer)


def works(used):
    llm = FakeListLLM(responses=["answer(area(texas))"])
    return [used, semantic_parsing_chain(llm, used, "functional"), few_shot_prompt(used)]


def test_pickled_after_use(used):
    for runnable in works(used):
        expected = answers(runnable)
        assert answers(pickle.loads(pickle.dumps(runnable))) == expected
    encoder = pickle.loads(pickle.dumps(used)).store.encoder
    assert encoder.family is get_family(encoder.config.family)
    assert encoder.fingerprint() == used.store.encoder.fingerprint()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_used_in_another_process(used, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    runnables = works(used)
    expected = [answers(runnable) for runnable in runnables]
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=reply, args=(theirs, runnables))
    process.start()
    try:
        assert ours.poll(120), "no answer"
        assert ours.recv() == expected
    finally:
        process.join(20)
        process.kill()


def reply(pipe, runnables):
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send([answers(runnable) for runnable in runnables])
    except BaseException as error:
        pipe.send(repr(error))
