"""Whatever answered a question can still be pickled, forked and sent to a spawned process: every family and chain."""

import json
import multiprocessing
import os
import pickle

import pytest
import warm
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import BasePromptTemplate
from places import TESTS

from langchain_rcr import SequentialCompositionalRetriever, few_shot_prompt, semantic_parsing_chain
from langchain_rcr.basics.items import Item
from langchain_rcr.families import get_family
from langchain_rcr.families.backbone import LangChainBackbone
from langchain_rcr.policy.triencoder import TriEncoder

pytestmark = pytest.mark.slow

ITEMS = [
    Item(f"what is the {word} of {state}", f"answer({word}({state}))")
    for word in ("capital", "area", "river")
    for state in ("texas", "ohio")
]
EXAMPLES = [{"source": item.source, "target": item.target} for item in ITEMS]
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
        model.family.fit(model.query, ITEMS, seed=0)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def used(request, bert):
    """A retriever after its first question."""
    retriever = SequentialCompositionalRetriever.from_encoder(policy(request.param, bert), EXAMPLES, k=2)
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


def test_a_pickle_is_no_larger_than_the_saved_folder(tmp_path):
    """The default model comes with an installed package: both name it."""
    rows = [{"source": f"{row['source']} {n}", "target": row["target"]} for n in range(5) for row in EXAMPLES]
    retriever = SequentialCompositionalRetriever.from_examples(rows, language="functional", k=2)
    retriever.add_example({"source": "where is texas", "target": "answer(place(texas))"})
    retriever.invoke(QUESTION)
    retriever.save(tmp_path / "saved")
    pickled = pickle.dumps(retriever)
    saved = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert len(pickled) < saved + 5_000  # the names of classes
    assert pickle.loads(pickled).invoke(QUESTION) == retriever.invoke(QUESTION)


def test_used_in_a_forked_process(used):
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    _check_in_another_process("fork", works(used))


def test_used_in_a_process_that_has_imported_nothing_of_ours(used, tmp_path):
    runnables = works(used)
    path = tmp_path / "runnables"
    path.write_bytes(pickle.dumps(runnables))
    done = warm.run(
        "-c", READS, path, environ={"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "retriever")))}, fresh=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [answers(runnable) for runnable in runnables]


READS = """
import json, pickle, sys
from pathlib import Path
assert not {"langchain_rcr", "transformers"} & sys.modules.keys()
runnables = pickle.loads(Path(sys.argv[1]).read_bytes())
from test_pickling import answers
print(json.dumps([answers(runnable) for runnable in runnables]))
"""


def test_used_in_a_spawned_process():
    retriever = SequentialCompositionalRetriever.from_encoder(policy("lexical", None), EXAMPLES, k=2)
    retriever.invoke(QUESTION)
    _check_in_another_process("spawn", works(retriever))


def _check_in_another_process(method, runnables):
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
