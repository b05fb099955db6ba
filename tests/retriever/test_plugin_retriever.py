"""SequentialCompositionalRetriever over a real (lexical, untrained) policy: shape, values, masks, errors, threads."""

import asyncio
import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from documents import same_documents
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import ConfigurableField
from toys import lexical

from langchain_rcr import (
    ExamplePool,
    ExampleStore,
    InputError,
    Item,
    PoolError,
    SequentialCompositionalRetriever,
    TriEncoder,
)

EXAMPLES = [
    {"source": f"how many {color} {animal} are there", "target": f"count({color}({animal}))", "n": number}
    for number, (color, animal) in enumerate(product(["red", "round", "big"], ["cats", "dogs", "mice"]))
]
QUERY = "how many red cats and big dogs are there"


@pytest.fixture(scope="module")
def encoder() -> TriEncoder:
    return lexical(EXAMPLES, dim=64)


@pytest.fixture
def retriever(encoder: TriEncoder) -> SequentialCompositionalRetriever:
    return SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list("abcdefghi"), k=4)


def test_k_documents_with_id_text_fields_step_and_logit(retriever: SequentialCompositionalRetriever) -> None:
    documents = retriever.invoke(QUERY)
    assert [document.metadata["step"] for document in documents] == [1, 2, 3, 4]
    for document in documents:
        example = EXAMPLES["abcdefghi".index(document.id)]
        assert document.page_content == f"Source: {example['source']}\nTarget: {example['target']}"
        assert document.metadata == {
            **example,
            "step": document.metadata["step"],
            "logit": document.metadata["logit"],
            "probability": document.metadata["probability"],
        }


def test_picks_and_logits_are_those_of_equation_4(
    retriever: SequentialCompositionalRetriever, encoder: TriEncoder
) -> None:
    vectors = encoder.encode_pool([Item(row["source"], row["target"]) for row in EXAMPLES])
    state = encoder.encode_queries([QUERY])[0].astype(np.float64)
    left = set(range(len(EXAMPLES)))
    for document in retriever.invoke(QUERY, k=9):
        logits = {at: float(vectors.candidate[at] @ state) for at in left}
        best = max(logits, key=lambda at: (round(logits[at], 4), -at))
        assert document.id == "abcdefghi"[best]
        assert document.metadata["logit"] == pytest.approx(logits[best], abs=1e-4)
        left.remove(best)
        state += encoder.config.lam * vectors.context[best]


def test_select_examples_gives_the_users_dicts_in_pick_order(retriever: SequentialCompositionalRetriever) -> None:
    picked = retriever.select_examples({"source": QUERY})
    assert picked == [EXAMPLES["abcdefghi".index(document.id)] for document in retriever.invoke(QUERY)]
    picked[0]["source"] = "changed by the caller"
    assert retriever.select_examples({"source": QUERY})[0]["source"] != "changed by the caller"


def test_no_pick_comes_twice_and_the_whole_pool_can_be_asked_for(retriever: SequentialCompositionalRetriever) -> None:
    assert sorted(document.id for document in retriever.invoke(QUERY, k=9)) == list("abcdefghi")


def test_candidates_with_a_picked_program_are_masked(encoder: TriEncoder) -> None:
    copies = [{"source": f"{row['source']} {n}", "target": row["target"]} for row in EXAMPLES for n in range(3)]
    plain = SequentialCompositionalRetriever.from_encoder(encoder, copies, k=9)
    masked = SequentialCompositionalRetriever(store=plain.store, k=9, mask_same_program=True)
    assert len({row["target"] for row in plain.select_examples({"source": QUERY})}) < 9
    assert len({row["target"] for row in masked.select_examples({"source": QUERY})}) == 9
    assert len(masked.invoke(QUERY, k=27)) == 27
    masked.add_example({"source": QUERY, "target": "  count(red(cats)) "})
    first, *rest = masked.select_examples({"source": QUERY})
    assert "count(red(cats))" in first["target"]
    assert all("count(red(cats))" not in row["target"] for row in rest)


def test_the_selector_and_the_retriever_agree_in_every_way_of_calling(
    retriever: SequentialCompositionalRetriever,
) -> None:
    queries = [QUERY, "how many round mice", "big"]
    one_by_one = [retriever.invoke(query, k=3) for query in queries]
    assert all(map(same_documents, retriever.batch(queries, k=3), one_by_one))
    assert list(retriever.stream(QUERY, k=3)) == one_by_one[:1]

    async def at_once() -> Any:
        return (
            await retriever.abatch(queries, k=3),
            await retriever.ainvoke(QUERY, k=3),
            await retriever.aselect_examples({"source": QUERY}),
        )

    batched, alone, examples = asyncio.run(at_once())
    assert all(map(same_documents, batched, one_by_one))
    assert alone == one_by_one[0]
    assert examples == retriever.select_examples({"source": QUERY})


async def test_encoding_does_not_hold_up_the_event_loop(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = retriever.store.encoder.judge_queries
    threads = set()

    def slow(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        time.sleep(0.1)
        return original(*arguments, **options)

    monkeypatch.setattr(retriever.store.encoder, "judge_queries", slow)
    tasks = [asyncio.create_task(retriever.ainvoke(QUERY)), asyncio.create_task(retriever.aselect_examples({"q": "x"}))]
    ticks = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks >= 4
    assert threading.get_ident() not in threads
    assert [len(task.result()) for task in tasks] == [4, 4]


@pytest.mark.parametrize("k", [1, 3, 9])
def test_k_is_honoured_exactly(retriever: SequentialCompositionalRetriever, k: int) -> None:
    other = SequentialCompositionalRetriever(store=retriever.store, k=k)
    assert len(other.invoke(QUERY)) == len(retriever.invoke(QUERY, k=k)) == len(other.select_examples({"q": "x"})) == k
    assert len(other.invoke(QUERY, k=2)) == 2


@pytest.mark.parametrize("k", [0, -1, 2.0, "3", True])
def test_a_k_that_is_no_positive_whole_number_is_refused(retriever: SequentialCompositionalRetriever, k: Any) -> None:
    message = f"k must be (greater than or equal to 1|a valid integer), not {k!r}"
    with pytest.raises(InputError, match=message):
        retriever.invoke(QUERY, k=k)
    with pytest.raises(InputError, match=message):
        SequentialCompositionalRetriever(store=retriever.store, k=k)
    with pytest.raises(InputError, match=message):
        SequentialCompositionalRetriever.from_encoder(retriever.store.encoder, EXAMPLES, k=k)
    with pytest.raises(InputError, match=message):
        retriever.model_copy(update={"k": k}).select_examples({"source": QUERY})


def test_k_above_the_pool_gives_all_of_it_and_says_so(
    retriever: SequentialCompositionalRetriever, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert {document.id for document in retriever.invoke(QUERY, k=10)} == set("abcdefghi")
    assert "k = 10 examples asked for, but there are only 9" in caplog.text
    assert len(retriever.invoke(QUERY, k=10**12)) == 9  # and takes memory for 9
    small = SequentialCompositionalRetriever.from_encoder(retriever.store.encoder, EXAMPLES[:1], k=2)
    assert small.select_examples({"source": QUERY}) == EXAMPLES[:1]
    assert len(small.explain(QUERY).steps) == 1
    small.add_example(EXAMPLES[1])
    assert len(small.select_examples({"source": QUERY})) == 2


def test_a_pool_may_start_empty(encoder: TriEncoder) -> None:
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, [], k=1)
    assert retriever.invoke(QUERY) == []
    assert retriever.select_examples({"source": QUERY}) == []
    with pytest.raises(PoolError, match="no candidates to explain"):
        retriever.explain(QUERY)
    retriever.add_example(EXAMPLES[0])
    assert retriever.select_examples({"source": QUERY}) == [EXAMPLES[0]]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "the query is blank"),
        (" \n\t", "the query is blank"),
        (None, "the query must be a string, not NoneType"),
        ({"source": "x"}, "the query must be a string, not dict"),
        ("a\udfff", "the query is not valid Unicode text: lone surrogate at character 1"),
    ],
)
def test_a_query_that_is_no_text_is_refused(
    retriever: SequentialCompositionalRetriever, query: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        retriever.invoke(query)


def test_a_huge_query_is_answered(retriever: SequentialCompositionalRetriever) -> None:
    assert len(retriever.invoke("red cats " * 11_112)) == 4


@pytest.mark.parametrize(
    ("variables", "input_keys", "query"),
    [
        ({"source": QUERY, "style": "terse"}, None, QUERY),
        ({"question": QUERY}, None, QUERY),
        ({"b": "dogs", "a": "big", "c": "not this"}, ["b", "a"], "big dogs"),
        ({"source": "not this", "question": QUERY}, ["question"], QUERY),
    ],
)
def test_which_variable_is_the_query(
    retriever: SequentialCompositionalRetriever, variables: dict[str, str], input_keys: list[str] | None, query: str
) -> None:
    selector = SequentialCompositionalRetriever(store=retriever.store, input_keys=input_keys)
    assert selector.select_examples(variables) == retriever.select_examples({"source": query})


@pytest.mark.parametrize(
    ("variables", "input_keys", "message"),
    [
        ({"a": "x", "b": "y"}, None, "Expected 'source' or a single one, got 'a', 'b': set input_keys"),
        ({}, None, "got nothing"),
        ({"a": "x"}, ["b"], "input_keys names 'b', but the input variables are 'a'"),
        ({"a": 3}, None, "the input variable 'a' must be a string, not int"),
        ("x", None, "input_variables must be a mapping of names to values, not str"),
        ({"source": ""}, None, "the query is blank"),
    ],
)
def test_variables_without_a_query_are_refused_by_name(
    retriever: SequentialCompositionalRetriever, variables: Any, input_keys: list[str] | None, message: str
) -> None:
    selector = SequentialCompositionalRetriever(store=retriever.store, input_keys=input_keys)
    with pytest.raises(InputError, match=message):
        selector.select_examples(variables)


def test_an_added_example_is_found_at_once_and_alone_encoded(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    original = retriever.store.encoder.encode_pool
    monkeypatch.setattr(
        retriever.store.encoder, "encode_pool", lambda items: encoded.append(len(items)) or original(items)
    )
    new = {"source": QUERY, "target": "count(red(cats), big(dogs))", "note": "new"}
    new_id = retriever.add_example(new)
    assert encoded == [1]
    first = retriever.invoke(QUERY)[0]
    assert (first.id, first.metadata["note"]) == (new_id, "new")
    assert retriever.select_examples({"source": QUERY})[0] == new
    assert retriever.add_example(EXAMPLES[0], id="mine") == "mine"
    assert retriever.store.index.count() == 11


def test_adding_equals_starting_with_it(encoder: TriEncoder, retriever: SequentialCompositionalRetriever) -> None:
    grown = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES[:5], ids=list("abcde"))
    assert grown.store.add(EXAMPLES[5:], list("fghi")) == list("fghi")
    assert grown.invoke(QUERY, k=9) == retriever.invoke(QUERY, k=9)


async def test_adding_works_from_async_code(retriever: SequentialCompositionalRetriever) -> None:
    new_id = await retriever.aadd_example({"source": QUERY, "target": "x"})
    assert (await retriever.ainvoke(QUERY))[0].id == new_id


@pytest.mark.parametrize(
    ("example", "example_id", "message"),
    [
        ({"source": "x"}, None, r"has no 'target' \(the program\)"),
        ({"source": "x", "target": "y"}, "a", "the id 'a' is taken by another example"),
        (["source"], None, "must be a mapping"),
    ],
)
def test_a_refused_example_leaves_the_pool_as_it_was(
    retriever: SequentialCompositionalRetriever, example: Any, example_id: str | None, message: str
) -> None:
    before = retriever.invoke(QUERY, k=9)
    with pytest.raises(PoolError, match=message):
        retriever.add_example(example, id=example_id)
    assert retriever.store.index.count() == 9
    assert retriever.invoke(QUERY, k=9) == before


@pytest.mark.parametrize("masking", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_readers_never_see_half_a_change(encoder: TriEncoder, masking: bool) -> None:
    shared = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, mask_same_program=masking)

    def write(worker: int) -> list[str]:
        return [shared.add_example({"source": f"{QUERY} {worker} {n}", "target": f"{worker}.{n}"}) for n in range(20)]

    def read(_: int) -> None:
        for _ in range(20):
            documents = shared.invoke(QUERY, k=5)
            assert len({document.id for document in documents}) == 5
            for document in documents:
                assert document.page_content == f"Source: {document.metadata['source']}\n" + (
                    f"Target: {document.metadata['target']}"
                )

    with ThreadPoolExecutor(8) as threads:
        readers = [threads.submit(read, n) for n in range(4)]
        written = [example_id for ids in threads.map(write, range(4)) for example_id in ids]
        for reader in readers:
            reader.result()
    rows, _ = shared.store.index.content()
    assert len(rows) == 89
    again = SequentialCompositionalRetriever.from_encoder(
        encoder, [row.example for row in rows], ids=[row.id for row in rows], mask_same_program=masking
    )
    assert same_documents(shared.invoke(QUERY, k=20), again.invoke(QUERY, k=20))
    assert {*written} == {row.id for row in rows[9:]}


def test_adding_at_the_same_time_loses_nothing(
    retriever: SequentialCompositionalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ExamplePool.extended

    def slow(*arguments: Any) -> ExamplePool:
        larger = original(*arguments)
        time.sleep(0.005)
        return larger

    monkeypatch.setattr(ExamplePool, "extended", slow)
    with ThreadPoolExecutor(4) as threads:
        added = list(threads.map(lambda n: retriever.add_example({"source": "x", "target": f"{n}"}), range(8)))
    assert retriever.store.index.known([*"abcdefghi", *added]) == {*"abcdefghi", *added}
    assert len(retriever.invoke(QUERY, k=17)) == 17


@pytest.mark.parametrize("clone", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy])
def test_a_clone_picks_the_same_and_lives_on_its_own(retriever: SequentialCompositionalRetriever, clone: Any) -> None:
    other = clone(retriever)
    assert other.invoke(QUERY) == retriever.invoke(QUERY)
    other.add_example({"source": QUERY, "target": "x"})
    assert (other.store.index.count(), retriever.store.index.count()) == (10, 9)


def test_configurable_fields_share_the_store(retriever: SequentialCompositionalRetriever) -> None:
    flexible = retriever.configurable_fields(k=ConfigurableField(id="k"))
    assert len(flexible.invoke(QUERY, {"configurable": {"k": 2}})) == 2
    new_id = retriever.add_example({"source": QUERY, "target": "x"})
    assert flexible.invoke(QUERY, {"configurable": {"k": 1}})[0].id == new_id
    with pytest.raises(InputError, match="not 0"):
        flexible.invoke(QUERY, {"configurable": {"k": 0}})


def test_callbacks_see_the_run_and_its_error(retriever: SequentialCompositionalRetriever) -> None:
    class Recorder(BaseCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_retriever_start(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append("start")

        def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
            self.seen.append(len(documents))

        def on_retriever_error(self, error: BaseException, **kwargs: Any) -> None:
            self.seen.append(type(error))

    recorder = Recorder()
    retriever.invoke(QUERY, {"callbacks": [recorder]})
    with pytest.raises(InputError):
        retriever.invoke("", {"callbacks": [recorder]})
    assert recorder.seen == ["start", 4, "start", InputError]


def test_unknown_arguments_are_refused(retriever: SequentialCompositionalRetriever) -> None:
    with pytest.raises(InputError, match=r"unknown 'top_k'; known: .*k_min"):
        SequentialCompositionalRetriever(store=retriever.store, top_k=3)
    with pytest.raises(InputError, match="option of the call: unknown 'top_k'"):
        retriever.invoke(QUERY, top_k=3)


def test_repr_says_what_matters_and_stays_short(retriever: SequentialCompositionalRetriever) -> None:
    store = "ExampleStore(9 examples in MemoryIndex, keys 'source' and 'target')"
    assert repr(retriever) == f"SequentialCompositionalRetriever(store={store}, k=4)"


def test_the_store_is_one_field_and_the_retriever_has_no_length(retriever: SequentialCompositionalRetriever) -> None:
    assert isinstance(retriever.store, ExampleStore)
    assert bool(retriever)
    assert not hasattr(retriever, "__len__")


def test_other_keys(encoder: TriEncoder) -> None:
    rows = [{"question": row["source"], "sql": row["target"]} for row in EXAMPLES]
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, rows, source_key="question", target_key="sql")
    assert retriever.select_examples({"question": QUERY, "other": "x"})[0] in rows
    assert retriever.invoke(QUERY)[0].page_content.startswith("Source: how many")
    with pytest.raises(PoolError, match="has no 'question': it has 'source', 'target', 'n'"):
        retriever.add_example(EXAMPLES[0])


@pytest.mark.slow
def test_32_threads_ask_while_examples_come_and_go(encoder: TriEncoder) -> None:
    shared = SequentialCompositionalRetriever.from_encoder(encoder, EXAMPLES, ids=list("abcdefghi"), k=5)
    stop = threading.Event()

    def change(worker: int) -> None:
        # Two examples that only ever change together.
        ids = [f"{worker}-{n}" for n in range(2)]
        while not stop.is_set():
            shared.add_examples([{"source": QUERY, "target": f"{worker}"}] * 2, ids)
            shared.upsert([{"source": QUERY, "target": f"{worker}!"}] * 2, ids)
            shared.delete(ids)

    def ask(_: int) -> None:
        for _ in range(15):
            documents = shared.invoke(QUERY, k=9)
            assert len({document.id for document in documents}) == 9
            for worker in "01":
                targets = {d.metadata["target"] for d in documents if (d.id or "").startswith(f"{worker}-")}
                assert len(targets) <= 1  # never one as it was and one as it is

    with ThreadPoolExecutor(34) as threads:
        changes = [threads.submit(change, n) for n in range(2)]
        asked = [threads.submit(ask, n) for n in range(32)]
        for one in asked:
            one.result()
        stop.set()
        for one in changes:
            one.result()
    assert shared.store.index.count() == 9
