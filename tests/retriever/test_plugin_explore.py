"""Exploring: picks drawn with known probabilities, and what a retriever or chain records of them."""

import asyncio
import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda, RunnableParallel
from langchain_core.tools import create_retriever_tool
from langchain_core.tracers.langchain import LangChainTracer, wait_for_all_tracers
from langchain_core.vectorstores import InMemoryVectorStore
from langsmith import Client
from langsmith.utils import get_env_var
from langsmith_server import LangSmithServer
from toys import lexical

from langchain_rcr import (
    InputError,
    Item,
    OutcomeLog,
    OutcomeRecorder,
    SequentialCompositionalRetriever,
    TriEncoder,
    few_shot_prompt,
    record_feedback,
    semantic_parsing_chain,
)
from langchain_rcr.policy.selection import drawn_from

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "n": number}
    for number, (color, animal) in enumerate(product(["red", "round", "big"], ["cats", "dogs"]))
]
IDS = "abcdef"
SESSION = str(uuid.UUID(int=1))
"""LangSmith's name for a project."""
QUERY = "how many red cats and big dogs are there"


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return lexical(EXAMPLES, dim=64, tau=4.0)


def make(encoder: TriEncoder, **fields: Any) -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list(IDS), **fields)


def held(recorder: OutcomeRecorder) -> list[str]:
    """What a recorder keeps of runs."""
    return [name for name, value in vars(recorder).items() if isinstance(value, dict | set) and value]


def sequences(encoder: TriEncoder, tau: float) -> dict[tuple[str, str], float]:
    """Of every two picks their probability, by a plain loop."""
    vectors = encoder.encode_pool([Item(row["source"], row["target"]) for row in EXAMPLES])
    candidate, context = np.asarray(vectors.candidate, float), np.asarray(vectors.context, float)
    start = encoder.encode_queries([QUERY])[0].astype(float)

    def policy(state: np.ndarray, left: list[int]) -> dict[int, float]:
        weights = np.exp(candidate[left] @ state / tau)
        return dict(zip(left, weights / weights.sum(), strict=True))

    found = {}
    for first, chance in policy(start, [*range(6)]).items():
        left = [at for at in range(6) if at != first]
        for second, other in policy(start + encoder.config.lam * context[first], left).items():
            found[IDS[first], IDS[second]] = chance * other
    return found


def test_picks_are_drawn_as_often_as_their_probability_says(encoder: TriEncoder) -> None:
    retriever = make(encoder, k=2, explore=0.8)
    expected = sequences(encoder, 0.8 * encoder.config.tau)
    drawn = retriever.batch([QUERY] * 4000)
    counts = Counter((one.id, other.id) for one, other in drawn)
    for pair, probability in expected.items():
        assert counts[pair] / 4000 == pytest.approx(probability, abs=4 * (probability / 4000) ** 0.5 + 1e-3)
    for one, other in drawn[:50]:
        chance = one.metadata["probability"] * other.metadata["probability"]
        assert chance == pytest.approx(expected[one.id, other.id], rel=1e-3)


def test_without_exploring_the_best_are_picked_and_with_little_of_it_too(encoder: TriEncoder) -> None:
    best = [each.id for each in make(encoder).invoke(QUERY)]
    barely = make(encoder, explore=1e-4).invoke(QUERY)
    assert [each.id for each in barely] == best
    assert [each.metadata["probability"] for each in barely] == pytest.approx([1.0] * 4)
    explained = make(encoder, explore=1.0).explain(QUERY)
    assert [step.pick.id for step in explained.steps] == [
        each.id for each in make(encoder, order="picked").invoke(QUERY)
    ]


def test_constraints_filters_and_ends_hold_while_exploring(encoder: TriEncoder) -> None:
    few = make(encoder, explore=1.0, k=6, filter={"n": {"$lt": 3}}, max_tokens=20, tokenizer=lambda text: text.split())
    for _ in range(20):
        found = few.invoke(QUERY)
        assert {each.metadata["n"] for each in found} < {0, 1, 2}
        assert found[-1].metadata["probability"] == pytest.approx(1.0) or len(found) == 2
    assert len(make(encoder, explore=1.0, k=6).invoke(QUERY)) == 6


def test_what_is_drawn_from_is_a_softmax_of_what_can_be_drawn() -> None:
    logits = np.array([[2.0, 1.0, -np.inf], [0.0, 0.0, 0.0], [-np.inf] * 3], dtype=np.float32)
    found = np.exp(drawn_from(logits, 0.5))
    np.testing.assert_allclose(found[0], [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2)), 0], rtol=1e-6)
    np.testing.assert_allclose(found[1], 1 / 3, rtol=1e-6)


def test_exploring_needs_a_number_and_no_beams(encoder: TriEncoder) -> None:
    with pytest.raises(InputError, match="explore must be greater than or equal to 0, not -1"):
        make(encoder, explore=-1)
    with pytest.raises(InputError, match=r"explore = 0.5 draws picks, which beams don't: beam_width must be 1"):
        make(encoder, explore=0.5, beam_width=2)
    with pytest.raises(InputError, match="beam_width must be 1"):
        make(encoder, explore=0.5).invoke(QUERY, beam_width=2)


def test_record_writes_the_picks_of_a_question(encoder: TriEncoder, tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    retriever = make(encoder, explore=0.5, log=log)
    picks = retriever.invoke(QUERY)
    retriever.record(QUERY, picks, 1)
    (read,) = log.read()
    by_step = sorted(picks, key=lambda each: each.metadata["step"])
    assert read.picks == tuple(each.id for each in by_step)
    assert read.probabilities == tuple(each.metadata["probability"] for each in by_step)
    assert (read.outcome, read.explore, read.policy) == (1.0, 0.5, encoder.fingerprint())
    retriever.save(tmp_path / "saved")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    assert (again.explore, again.log) == (0.5, None)  # a stranger's folder doesn't say where to write
    with pytest.raises(InputError, match="record takes the documents of invoke or batch, not dict"):
        retriever.record(QUERY, retriever.select_examples({"source": QUERY}), 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not a pick of this retriever"):
        retriever.record(QUERY, [Document("text")], 1)
    with pytest.raises(InputError, match="record writes to the retriever's log, and it has none"):
        make(encoder).record(QUERY, picks, 1)
    with pytest.raises(InputError, match="a recorder needs a retriever of ours with a log"):
        OutcomeRecorder(make(encoder))


def test_a_field_called_probability_is_not_logged_as_one(encoder: TriEncoder, tmp_path: Path) -> None:
    log, rows = OutcomeLog(tmp_path / "log.jsonl"), [{**row, "probability": "high"} for row in EXAMPLES]
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows, k=2, probabilities=False, log=log)
    retriever.record(QUERY, retriever.invoke(QUERY), 1.0)
    (read,) = log.read()
    assert read.probabilities == (None, None)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_recorder_writes_each_question_of_a_chain_once(
    encoder: TriEncoder, tmp_path: Path, is_async: bool
) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    retriever = make(encoder, explore=0.5, log=log)
    model = FakeListLLM(responses=["count(cats)", "?", "count(cats)"])
    chain = semantic_parsing_chain(model, retriever, lambda text: text if "(" in text else None, retries=0)
    config = {"callbacks": [OutcomeRecorder(retriever, lambda answer: answer.ok)]}
    if is_async:
        await chain.abatch(["how many cats", "how many dogs"], config)
        await chain.ainvoke("how many red cats", config)
    else:
        chain.batch(["how many cats", "how many dogs"], config)
        chain.invoke("how many red cats", config)
    read = list(log.read())
    assert Counter(each.text for each in read) == Counter(["how many cats", "how many dogs", "how many red cats"])
    assert sorted(each.outcome for each in read if each.outcome is not None) == [0.0, 1.0, 1.0]
    assert len({each.run for each in read}) == 3


def test_a_recorder_writes_how_much_the_call_explored(encoder: TriEncoder, tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    retriever = make(encoder, log=log, probabilities=False)
    configured = retriever.configurable_fields(explore=ConfigurableField("explore"))
    chain = configured | len
    config: Any = {"callbacks": [OutcomeRecorder(configured)]}
    for explore in (0.5, 0.0):
        chain.invoke(QUERY, {**config, "configurable": {"explore": explore}})
    few_shot_prompt(retriever.model_copy(update={"explore": 2.0})).invoke({"source": QUERY}, config)
    assert [(each.explore, all(each.probabilities)) for each in log.read()] == [(0.5, True), (0.0, False), (2.0, True)]


@pytest.mark.parametrize("outcome", [lambda _: 1 / 0, lambda _: math.nan, lambda _: "good"])
def test_a_recorder_keeps_the_picks_where_the_outcome_fails(
    encoder: TriEncoder, tmp_path: Path, outcome: Callable[[object], float], caplog: pytest.LogCaptureFixture
) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    retriever = make(encoder, explore=0.5, log=log)
    chain = RunnableLambda(retriever.invoke)
    chain.invoke("how many cats", {"callbacks": [OutcomeRecorder(retriever, outcome)]})
    assert [(each.outcome, len(each.picks)) for each in log.read()] == [(None, 4)]
    assert "OutcomeRecorder.on_chain_end" in caplog.text


async def test_a_recorder_keeps_nothing_of_a_question_that_is_cancelled(
    encoder: TriEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = make(encoder, explore=0.5, log=OutcomeLog(tmp_path / "outcomes.jsonl"))
    recorder = OutcomeRecorder(retriever)
    begun = asyncio.Event()

    async def wait(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(type(retriever), "_aget_relevant_documents", wait)
    chain = RunnableLambda(lambda query: query) | retriever
    task = asyncio.create_task(chain.ainvoke("how many cats", {"callbacks": [recorder]}))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(recorder) == []


async def test_a_recorder_says_nothing_of_what_goes_on_after_a_failure(
    encoder: TriEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, ended = OutcomeRecorder(make(encoder, log=OutcomeLog(tmp_path / "log.jsonl"))), asyncio.Event()

    async def fail(_: object) -> None:
        raise ValueError

    async def outlast(_: object) -> None:
        await asyncio.sleep(0.1)
        asyncio.get_running_loop().call_later(0.1, ended.set)

    with pytest.raises(ValueError):  # noqa: PT011
        await RunnableParallel(a=fail, b=outlast).ainvoke(QUERY, {"callbacks": [recorder]})
    await ended.wait()
    assert (caplog.text, held(recorder)) == ("", [])


async def test_a_recorder_keeps_and_says_nothing_of_a_branch_that_is_cancelled_as_another_fails(
    encoder: TriEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As an agent's graph does with the nodes of a step; a thread can't be cancelled, and goes on."""
    retriever = make(encoder, explore=0.5, log=OutcomeLog(tmp_path / "outcomes.jsonl"))
    recorder, failed, ended = OutcomeRecorder(retriever), threading.Event(), threading.Event()

    async def wait(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    def outlast(query: str, config: RunnableConfig) -> None:
        (RunnableLambda(lambda _: failed.wait(60)) | str).invoke(query, config)
        ended.set()

    async def branches(query: str, config: RunnableConfig) -> None:
        every = [asyncio.ensure_future(each.ainvoke(query, config)) for each in (retriever, RunnableLambda(outlast))]
        await asyncio.sleep(0.1)
        for each in every:
            each.cancel()
        raise ValueError

    monkeypatch.setattr(type(retriever), "_aget_relevant_documents", wait)
    with pytest.raises(ValueError):  # noqa: PT011
        await RunnableLambda(branches).ainvoke(QUERY, {"callbacks": [recorder]})
    failed.set()
    await asyncio.to_thread(ended.wait, 60)
    assert (caplog.text, held(recorder)) == ("", [])


def test_a_recorder_writes_what_was_picked_before_a_refit(encoder: TriEncoder, tmp_path: Path) -> None:
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    retriever = make(encoder, log=log)

    def refitted(_: object) -> None:
        retriever.store.now = make(lexical(EXAMPLES, dim=32)).store.now

    chain = retriever | RunnableLambda(refitted)
    chain.invoke(QUERY, {"callbacks": [OutcomeRecorder(retriever, lambda _: 1.0)]})
    assert [each.outcome for each in log.read()] == [1.0]


async def test_a_recorder_knows_its_retriever_among_others_and_in_a_tool(encoder: TriEncoder, tmp_path: Path) -> None:
    """As a chain with documents beside the examples, tools picked for the same question, or an agent has them."""
    log = OutcomeLog(tmp_path / "outcomes.jsonl", text=True)
    retriever = make(encoder, explore=0.5, log=log)
    tools = SequentialCompositionalRetriever.from_encoder(lexical(EXAMPLES, dim=8), EXAMPLES, k=1)
    documents = InMemoryVectorStore.from_texts(["cats"], DeterministicFakeEmbedding(size=4)).as_retriever()
    beside = RunnableParallel(examples=retriever, tools=tools, documents=documents)
    within = create_retriever_tool(retriever, "examples", "Finds examples.")
    for number, chain in enumerate((beside, RunnableLambda(lambda query: {"query": query}) | within)):
        question = f"how many cats {number}"
        config = {"callbacks": [OutcomeRecorder(retriever, lambda output: float(len(output) > 0))]}
        await chain.ainvoke(question, config) if number else chain.invoke(question, config)
    within.invoke({"query": "how many cats 2"}, config)
    read = list(log.read())
    assert [(each.text, each.outcome, len(each.picks)) for each in read] == [
        (f"how many cats {number}", 1.0, 4) for number in range(3)
    ]


def test_a_prompt_in_front_of_a_model_is_a_chain_too_and_feedback_comes_by_run(
    encoder: TriEncoder, tmp_path: Path
) -> None:
    """With LangSmith's own tracer and client, over HTTP."""
    log = OutcomeLog(tmp_path / "outcomes.jsonl")
    retriever = make(encoder, explore=0.5, log=log)
    chain = few_shot_prompt(retriever) | FakeListLLM(responses=["count(cats)"])
    with LangSmithServer() as server:
        client = Client(api_url=server.url, api_key="x", auto_batch_tracing=False)
        callbacks = [OutcomeRecorder(retriever), LangChainTracer(client=client, project_name="ours")]
        for _ in range(3):
            chain.invoke({"source": QUERY}, {"callbacks": callbacks})
        retriever.invoke(QUERY, {"callbacks": callbacks})  # a retriever alone is a run, too
        wait_for_all_tracers()
        runs = [str(each.run) for each in log.read()]
        assert {name for name, run in server.runs.items() if not run.get("parent_run_id")} == {*runs}
        first, second, third, _ = runs
        client.create_feedback(first, "correctness", session_id=SESSION, score=0)
        client.create_feedback(first, "correctness", session_id=SESSION, score=True)  # thought better of
        client.create_feedback(second, "correctness", session_id=SESSION, comment="no score")
        client.create_feedback(third, "helpfulness", session_id=SESSION, score=1)
        assert record_feedback(log, "correctness", client) == 1
        assert [each.outcome for each in log.read()] == [1.0, None, None, None]
        assert [query["run"] for query in server.asked] == [runs]
        client.create_feedback(third, "correctness", session_id=SESSION, score=0.5)
        assert record_feedback(log, "correctness", client) == 1
        assert [each.outcome for each in log.read()] == [1.0, None, 0.5, None]
        assert server.asked[-1]["run"] == [each for each in runs if each != first]


@pytest.mark.slow
def test_feedback_on_many_runs_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, runs = OutcomeLog(tmp_path / "outcomes.jsonl"), [str(uuid.uuid4()) for _ in range(130)]
    for run in runs:
        log.record(QUERY, [("a", 1, 0.5)], None, run=run)
    for run in ("request 17", None):  # LangSmith would refuse the whole page
        log.record(QUERY, [("a", 1, 0.5)], None, run=run)
    with LangSmithServer() as server:
        monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
        monkeypatch.setenv("LANGSMITH_API_KEY", "x")
        get_env_var.cache_clear()
        client = Client(auto_batch_tracing=False)
        for run, value in product(runs, range(2)):
            client.create_feedback(run, "correctness", session_id=SESSION, score=value)
        assert record_feedback(log, "correctness") == 130
    get_env_var.cache_clear()
    assert [each.outcome for each in log.read()] == [1.0] * 130 + [None] * 2
    assert [(len(query["run"]), query["offset"]) for query in server.asked] == [
        *((100, [str(start)]) for start in (0, 100, 200)),
        (30, ["0"]),
    ]
