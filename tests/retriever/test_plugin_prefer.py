"""Examples of the question's own database are preferred, not demanded."""

from enum import Enum

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListLLM
from langchain_core.runnables import ConfigurableField, RunnableLambda

from langchain_rcr import SequentialCompositionalRetriever, semantic_parsing_chain
from langchain_rcr.errors import InputError

NOUNS = ("river", "city", "state", "lake", "road", "hill")
EXAMPLES = [
    {"question": question.format(noun), "sql": f"{sql} {noun}", "db_id": db}
    for db in ("north", "south")
    for noun in NOUNS
    for question, sql in (("how many {}s are there", "SELECT COUNT(*) FROM"), ("name the {}s", "SELECT name FROM"))
]
ONLY_NORTH = {"question": "how many boats are there", "sql": "SELECT COUNT(*) FROM boat", "db_id": "north"}


def fitted(**options):
    keys = {"input_keys": ["question"], "target_key": "sql", "language": "sql"}
    return SequentialCompositionalRetriever.from_examples(EXAMPLES, k=3, **keys, **options)


def homes(picks):
    return [pick["db_id"] for pick in picks]


@pytest.fixture(scope="module")
def retriever():
    return fitted()


def test_a_variable_says_which_database_is_the_question_s(retriever):
    asked = {"question": "how many rivers are there"}
    for db in ("north", "south"):
        picks = retriever.select_examples({**asked, "db_id": db})
        assert homes(picks)[1:] == [db] * 2  # the third has the very query, of the other database
        assert {pick["sql"] for pick in picks if pick["db_id"] != db} <= {"SELECT COUNT(*) FROM river"}
        assert [pick.metadata["db_id"] for pick in retriever.invoke(asked["question"], within=db)][1:] == [db] * 2
        assert len(retriever.batch([asked["question"]] * 2, within=db)) == 2
    assert retriever.select_examples({**asked, "db_id": None}) == retriever.select_examples(asked)
    assert homes(retriever.select_examples({**asked, "db_id": "elsewhere"}))  # none of its own: all the same


def test_databases_may_be_an_enum(retriever):
    class Db(str, Enum):  # noqa: UP042 - prints its name, unlike a StrEnum
        NORTH = "north"
        SOUTH = "south"

    keys = {"input_keys": ["question"], "target_key": "sql", "language": "sql"}
    rows = [{**each, "db_id": Db(each["db_id"])} for each in EXAMPLES]
    typed = SequentialCompositionalRetriever.from_examples(rows, k=3, **keys)
    for db in Db:
        asked = {"question": "how many rivers are there", "db_id": db}
        assert typed.select_examples(asked) == retriever.select_examples(asked)


@pytest.mark.parametrize(
    ("examples", "options", "field"),
    [
        (EXAMPLES, {}, "db_id"),
        (EXAMPLES, {"prefer": ""}, None),
        (EXAMPLES, {"group": "db_id"}, None),
        (EXAMPLES, {"group": "db_id", "prefer": "db_id"}, "db_id"),
        ([each for each in EXAMPLES if each["db_id"] == "north"], {}, None),
        ([{**each, "db_id": [each["db_id"]]} for each in EXAMPLES], {}, None),
        ([{key: each[key] for key in ("question", "sql")} for each in EXAMPLES], {}, None),
    ],
)
def test_what_is_preferred_unless_said(examples, options, field):
    keys = {"input_keys": ["question"], "target_key": "sql", "language": "sql"}
    made = SequentialCompositionalRetriever.from_examples(examples, **keys, **options)
    assert made.store.encoder.prefer == field


def test_others_are_picked_where_they_show_more(retriever):
    store = fitted(k_min=1)
    store.add_example(ONLY_NORTH)
    picked = store.select_examples({"question": "how many boats are there", "db_id": "south"})
    assert picked[-1] == ONLY_NORTH  # next to the question, first to be picked
    assert "south" in homes(picked)


def test_a_chain_prefers_the_database_of_each_question(retriever):
    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), retriever, "sql")
    asked = [{"question": "how many rivers are there", "db_id": db} for db in ("north", "south")]
    for answer, given in zip([*chain.batch(asked), chain.invoke(asked[0])], [*asked, asked[0]], strict=True):
        assert homes(each.metadata for each in answer.picks)[1:] == [given["db_id"]] * 2
    assert chain.invoke(asked[0]["question"]).picks == tuple(retriever.invoke(asked[0]["question"]))


@pytest.mark.parametrize("field", ["group", "prefer"])
@pytest.mark.slow
async def test_a_chain_s_fallbacks_know_the_database_where_they_can(field):
    none, other = fitted(k_min=99, **{field: "db_id"}), fitted(**{field: "db_id"})
    asked = {"question": "how many rivers are there", "db_id": "north"}
    known = RunnableLambda(lambda question: [Document(question, metadata={"question": question, "sql": "SELECT 2"})])
    for fallback, homes_there in ((other, ["north"] * 2), (known, [None])):
        chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), none.with_fallbacks([fallback]), "sql")
        for answer in (chain.invoke(asked), await chain.ainvoke(asked)):
            assert [each.metadata.get("db_id") for each in answer.picks][-2:] == homes_there


def test_the_preferred_value_is_not_taken_for_that_of_a_configured_group(retriever):
    flexible = retriever.configurable_fields(group=ConfigurableField(id="group"))
    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), flexible, "sql")
    asked = {"question": "how many rivers are there", "db_id": "north"}
    assert homes(each.metadata for each in chain.invoke(asked).picks)[1:] == ["north"] * 2
    with pytest.raises(InputError, match="examples are picked within one 'tenant'"):
        chain.invoke(asked, {"configurable": {"group": "tenant"}})


def test_it_is_saved_and_outlives_a_refit(retriever, tmp_path):
    retriever.save(tmp_path / "saved")
    again = SequentialCompositionalRetriever.from_pretrained(tmp_path / "saved")
    asked = {"question": "name the hills", "db_id": "south"}
    assert again.select_examples(asked) == retriever.select_examples(asked)
    again.refit()
    assert again.select_examples(asked) == retriever.select_examples(asked)
    assert homes(again.select_examples(asked))[-1] == "south"


def test_what_can_t_be_preferred_is_an_input_error(retriever):
    with pytest.raises(InputError, match=r"prefer: .*db_idx"):
        SequentialCompositionalRetriever.from_examples(
            EXAMPLES, input_keys=["question"], prefer="db_idx", target_key="sql"
        )
    with pytest.raises(InputError, match=r"db_id.*list"):
        retriever.invoke("name the hills", within=["north"])
