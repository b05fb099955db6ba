"""Several databases in one pool: further fields go along, and questions pick within their own database."""

import json
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import ConfigurableField
from rcr_trainer import pipeline
from rcr_trainer.data.examples import Example, Split
from rcr_trainer.data.files import read_split
from rcr_trainer.data.held_out import Barred, HeldOut
from rcr_trainer.errors import DataError
from rcr_trainer.evaluation.report import read_picks
from rcr_trainer.rewards.ours import structure_coverage
from rcr_trainer.rewards.reward import score
from rcr_trainer.runs.tasks import divide
from rcr_trainer.settings import Settings
from toys import lexical

from langchain_rcr import InputError, Item, SequentialCompositionalRetriever, TriEncoder, semantic_parsing_chain
from langchain_rcr.programs import ProgramSpec

SPEC, SHAPES = ProgramSpec("sql"), ProgramSpec("sql", anonymize="names")
TABLES = {"geo": ("river", "city", "state"), "shop": ("order", "client", "item")}
ASKS = {
    "how many {}": "SELECT COUNT(*) FROM {}",
    "list all {}": "SELECT * FROM {}",
    "newest {}": "SELECT MAX(a) FROM {}",
}
ROWS = [
    {"source": asked.format(f"{table}s"), "target": sql.format(f'"{table}"'), "db_id": db}
    for db, tables in TABLES.items()
    for table, (asked, sql) in product(tables, ASKS.items())
]


def examples(rows: list[dict[str, Any]]) -> list[Example]:
    return [Example(str(n), row["source"], row["target"], {"db_id": row["db_id"]}) for n, row in enumerate(rows)]


def settings(**sections: Any) -> Settings:
    values: dict[str, Any] = {
        "data": {"task": "files", "train": "train.jsonl", "test": "test.jsonl", "dev_size": 4, "group": "db_id"},
        "program": {"language": "sql"},
        "model": {"family": "lexical", "dim": 8},
        "sft": {"epochs": 1, "k": 2},
        "evaluation": {"k": 2, "selectors": ["random", "bm25", "oracle"]},
        "threads": 1,
    }
    return Settings.model_validate({**values, **sections})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two databases, trained and compared."""
    here = tmp_path_factory.mktemp("run")
    for name, rows in (("train", ROWS), ("test", ROWS[::2])):
        (here / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {
        "task": "files",
        "train": here / "train.jsonl",
        "test": here / "test.jsonl",
        "dev_size": 4,
        "group": "db_id",
    }
    pipeline.run(settings(data=data, output=here / "demo"))
    return here / "demo"


@pytest.mark.parametrize("new", [1.0, 0.5, 0.0])
def test_nothing_of_another_group_is_ever_left(new: float) -> None:
    task = divide(settings(), Split("files", examples(ROWS), test=examples(ROWS)))
    group_of = np.array([example.group for example in task.pool])
    held_out = HeldOut(task.pool, task.queries, SPEC, new=new)
    every = [
        (task.queries, held_out.barred(task.queries)),
        (task.dev, held_out.barred(task.dev)),
        (task.test, Barred(task.test, task.pool, SPEC)),
    ]
    for queries, barred in every:
        assert queries
        for query, positions in zip(queries, barred, strict=True):
            left = np.setdiff1d(np.arange(len(task.pool)), positions)
            assert set(group_of[left]) == {query.group}
            assert len(left) >= 2


def test_without_groups_any_example_may_be_picked() -> None:
    across = settings(data={"task": "files", "train": "x.jsonl", "dev_size": 4})
    task = divide(across, Split("files", examples(ROWS)))
    assert all(len(row) == 1 for row in Barred(task.queries, task.pool, SPEC))


def test_queries_whose_group_is_too_small_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    few = [{"source": f"rare {n}", "target": "SELECT 1", "db_id": "rare"} for n in range(3)]
    task = divide(settings(), Split("files", examples([*ROWS, *few]), test=examples(few[:1] + ROWS)))
    assert {query.group for query in [*task.queries, *task.dev]} == {"geo", "shop"}
    assert len(task.test) == len(ROWS) + 1  # three candidates are enough for k = 2
    assert "training queries have too few candidates of their db_id" in caplog.text
    with pytest.raises(DataError, match="no training query has enough candidates with its own db_id for k = 2"):
        divide(settings(), Split("files", examples(3 * few)))


def test_an_example_without_the_field_is_named() -> None:
    split = Split("files", [*examples(ROWS), Example("x", "q", "SELECT 1", {"db": "geo"})])
    with pytest.raises(DataError, match=r"data.group = 'db_id': example 'x' has no such field \(fields: 'db'\)"):
        divide(settings(), split)
    wrong = Settings.model_validate({"data": {"prefer": "db", "dev_size": 2}})
    with pytest.raises(DataError, match=r"data.prefer = 'db': no example has such a field \(fields: 'db_id'\)"):
        divide(wrong, Split("files", examples(ROWS)))


@pytest.mark.slow
def test_a_run_whose_examples_are_preferred_by_their_database(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS), ("test", ROWS[::2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = {part: tmp_path / f"{part}.jsonl" for part in ("train", "test")}
    data = {"task": "files", **files, "dev_size": 4}
    model, sft = {"family": "structure", "base": None, "home": 1.0}, {"epochs": 0}
    pipeline.run(settings(data=data, output=tmp_path / "demo", model=model, sft=sft))
    question = ROWS[0]["source"]
    retriever = SequentialCompositionalRetriever.from_pretrained(tmp_path / "demo", k=3)
    for db in TABLES:
        picks = retriever.select_examples({"source": question, "db_id": db})
        assert picks[-1]["db_id"] == db  # the first pick is shown last
    db_of = {
        each.id: each.fields["db_id"]
        for part in ("train", "test")
        for each in getattr(read_split(tmp_path / "demo/data"), part)
    }
    for each in read_picks(tmp_path / "demo"):
        assert db_of[each.selectors["rcr"].picks[0].id] == db_of[each.id]


@pytest.mark.slow
def test_a_run_compares_and_serves_within_each_database(run: Path) -> None:
    db_of = {
        example.id: example.fields["db_id"]
        for part in ("train", "test")
        for example in getattr(read_split(run / "data"), part)
    }
    picks = read_picks(run)
    assert all(set(each.selectors) == {"rcr", "random", "bm25", "oracle"} for each in picks)
    assert all(
        {db_of[pick.id] for pick in own.picks} == {db_of[each.id]} for each in picks for own in each.selectors.values()
    )

    retriever = SequentialCompositionalRetriever.from_pretrained(run, k=5)
    assert retriever.picks_within == "db_id"
    for row in ROWS:
        picked = retriever.select_examples({"source": row["source"], "db_id": row["db_id"]})
        assert len(picked) == 5
        assert {one["db_id"] for one in picked} == {row["db_id"]}
    documents = retriever.invoke("how many rivers", filter={"db_id": "shop"})
    assert {document.metadata["db_id"] for document in documents} == {"shop"}
    across = SequentialCompositionalRetriever.from_pretrained(run, k=18, group="")
    assert len(across.invoke("how many rivers")) == 18


@pytest.fixture
def within() -> SequentialCompositionalRetriever:
    encoder = lexical(ROWS, 16)
    return SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=4, group="db_id")


def test_the_question_has_to_say_its_database(within: SequentialCompositionalRetriever) -> None:
    with pytest.raises(
        InputError, match="examples are picked within one 'db_id', but the input variables are 'source'"
    ):
        within.select_examples({"source": "how many rivers"})
    with pytest.raises(InputError, match=r"examples are picked within one 'db_id': pass filter=\{'db_id': …\}"):
        within.invoke("how many rivers")
    assert within.select_examples({"source": "how many rivers", "db_id": "none"}) == []
    narrow = within.model_copy(update={"filter": {"source": {"$ne": "how many rivers"}, "db_id": "shop"}})
    picked = narrow.select_examples({"source": "how many rivers", "db_id": "shop"})
    assert {one["db_id"] for one in picked} == {"shop"}
    assert "how many rivers" not in [one["source"] for one in picked]
    assert narrow.select_examples({"source": "how many rivers", "db_id": "geo"}) == []


NO_VALUES: list[Any] = [
    *({"$exists": True}, {"$ne": "geo"}, {"$in": ["geo", "shop"]}, {"$eq": "geo"}, {"$gte": ""}, {"$or": []}, {}),
    *(None, ["geo"], ("geo", "shop"), float("nan"), float("inf"), 10**5000, b"geo", object()),
]


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_a_value_of_a_group_is_no_condition(within: SequentialCompositionalRetriever, value: Any) -> None:
    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), within, "sql")
    asked: Any = {"source": "how many rivers", "db_id": value}
    for ask in (within.select_examples, chain.invoke):
        with pytest.raises(InputError, match="db_id"):
            ask(asked)
    with pytest.raises(InputError, match="db_id"):
        within.invoke("how many rivers", within=value)


OPEN: list[Any] = [
    *({}, {"db_id": {"$exists": True}}, {"db_id": {"$in": ["geo"]}}, {"$or": [{"db_id": "geo"}, {"db_id": "shop"}]}),
    *({"$not": {"db_id": "geo"}}, {"db_id": {"$ne": "geo"}}, {"source": "db_id"}, None, {"db_id": None}),
]


@pytest.mark.parametrize("where", OPEN, ids=str)
def test_a_call_without_a_value_of_the_group_reads_nothing(
    within: SequentialCompositionalRetriever, where: Any
) -> None:
    question = "how many rivers"
    calls = (within.invoke, lambda one, **options: within.batch([one], **options), within.explain)
    for call in calls:
        with pytest.raises(InputError, match="within one 'db_id': pass filter="):
            call(question, filter=where)
    for found in (within.invoke(question, filter=where, within="geo"), within.batch([question], within="geo")[0]):
        assert {document.metadata["db_id"] for document in found} <= {"geo"}
    of_shop = {row["source"] for row in ROWS if row["db_id"] == "shop"}
    assert {step.pick.source for step in within.explain(question, within="shop").steps} < of_shop
    assert within.invoke(question, filter={"db_id": "shop"}, within="geo") == []
    with pytest.raises(InputError, match="of which field"):
        within.model_copy(update={"group": ""}).invoke(question, within="geo")


def test_a_chain_replaces_no_filter(within: SequentialCompositionalRetriever) -> None:
    llm, asked = FakeListLLM(responses=["SELECT 1"]), {"source": "list all rivers", "db_id": "geo"}
    only = {"source": {"$gte": "n"}}
    flexible = within.configurable_fields(filter=ConfigurableField(id="where"))
    chain = semantic_parsing_chain(llm, flexible, "sql")
    bound = semantic_parsing_chain(llm, within.bind(filter=only), "sql")
    plain = semantic_parsing_chain(llm, within, "sql")
    found = (
        chain.invoke(asked, {"configurable": {"where": only}}),
        bound.invoke(asked),
        plain.invoke(asked, filter=only),
        bound.batch([asked])[0],
    )
    for answer in found:
        sources = [pick.metadata["source"] for pick in answer.picks]
        assert sorted(sources) == ["newest citys", "newest rivers", "newest states"]
        assert {pick.metadata["db_id"] for pick in answer.picks} == {"geo"}
    assert plain.invoke(asked, filter={"db_id": "shop"}).picks == ()


def test_a_variable_replaces_no_value_of_the_group_that_a_call_or_bind_names(
    within: SequentialCompositionalRetriever,
) -> None:
    llm, asked = FakeListLLM(responses=["SELECT 1"]), {"source": "how many rivers"}
    bound = semantic_parsing_chain(llm, within.bind(within="geo"), "sql")
    plain = semantic_parsing_chain(llm, within, "sql")
    for ask in (bound.invoke, lambda question: plain.invoke(question, within="geo")):
        assert ask({**asked, "db_id": "shop"}).picks == ()
        for question in (asked, {**asked, "db_id": "geo"}):
            assert {pick.metadata["db_id"] for pick in ask(question).picks} == {"geo"}
        with pytest.raises(InputError, match="db_id"):
            ask({**asked, "db_id": {"$exists": True}})


class Sly(str):
    """A text that says it is equal to all others."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def test_values_are_compared_by_what_they_are_made_of(within: SequentialCompositionalRetriever) -> None:
    for value in (Sly("geo"), StrEnum("Named", {"GEO": "geo"})("geo")):
        picked = within.select_examples({"source": "how many rivers", "db_id": value})
        assert {one["db_id"] for one in picked} == {"geo"}


async def test_a_chain_asks_each_question_with_examples_of_its_database(
    within: SequentialCompositionalRetriever,
) -> None:
    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), within, "sql")
    asked = [{"source": row["source"], "db_id": row["db_id"]} for row in ROWS[::4]]
    for answers in (chain.batch(asked), await chain.abatch(asked)):
        for question, answer in zip(asked, answers, strict=True):
            assert len(answer.picks) == 4
            assert {pick.metadata["db_id"] for pick in answer.picks} == {question["db_id"]}
    one, lacking = chain.batch([asked[0], {"source": "how many rivers"}], return_exceptions=True)
    assert one.ok
    assert "within one 'db_id'" in str(lacking)


def test_across_databases_examples_are_found_by_the_shape_of_their_queries() -> None:
    encoder = TriEncoder.build("structure", [Item(row["source"], row["target"]) for row in ROWS], spec=SHAPES)
    retriever = SequentialCompositionalRetriever.from_encoder(encoder, ROWS, k=18, mask_same_program=True)
    by_shape = {SHAPES.key(row["target"]) for row in ROWS}
    assert len(by_shape) == len(ASKS)
    assert len({SHAPES.key(row["target"]) for row in retriever.select_examples({"source": "newest rivers"})[-3:]}) == 3


def test_answers_are_judged_by_their_names_all_the_same() -> None:
    reward = structure_coverage(SHAPES)
    asked = Example("1", "how many rivers", "SELECT COUNT(*) FROM river")
    right, other = score(reward, ["SELECT COUNT(*) FROM river", "SELECT COUNT(*) FROM city"], [asked] * 2, [[], []])
    assert right == 1 > other
