"""A draft of a question's program: its part in the needs, the retriever's picks and the chain's second prompt."""

import asyncio
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.runnables import ConfigurableField
from pydantic import Field
from toys import lexical

from langchain_rcr import InputError, Item, SequentialCompositionalRetriever, TriEncoder, semantic_parsing_chain
from langchain_rcr.chains.text_to_sql import text_to_sql_chain
from langchain_rcr.programs import ProgramSpec

ROWS = [
    {"source": f"{asks} {table}", "target": f"SELECT {what} FROM {table}"}
    for asks, what in (("how many", "COUNT(*)"), ("name a", "name"), ("largest", "MAX(size)"))
    for table in ("river", "city", "state", "lake")
]
QUESTION, DRAFT = "tell me about that", "SELECT MAX(size) FROM lake"


def retriever(**fields):
    items = [Item(row["source"], row["target"]) for row in ROWS]
    model = TriEncoder.build("structure", items, spec=ProgramSpec("sql"))
    return SequentialCompositionalRetriever.from_encoder(model, ROWS, **fields)


def programs(documents):
    return [document.metadata["target"] for document in documents]


def test_the_log_odds_of_needs_by_hand():
    model = TriEncoder.build("structure", [Item("x", "f(a)"), Item("y", "g(b)")], spec=ProgramSpec(max_size=1)).query
    with torch.no_grad():
        model.mean.fill_(0.5)  # every structure as likely as not
    features = model.drafted(model.featurize([Item("x")] * 4), [None, "f(a)", "f ( a", "unknown"])
    with torch.no_grad():
        likely = model.likelihoods(features).numpy()
    has = np.array([name in ("f", "a", "<root>") for name in model.inventory.names])
    expected = np.where(has, 0.6 / 0.62, 0.4 / 1.38)
    assert likely[[0, 2]] == pytest.approx(0.5)
    assert likely[1][model.inventory.lengths == 1] == pytest.approx(expected[model.inventory.lengths == 1], abs=1e-5)
    chosen = model.likelihoods(features.select(np.array([1])))
    assert chosen.detach().numpy() == pytest.approx(likely[[1]])


def test_what_the_draft_has_is_shown():
    picks = retriever(k=1)
    assert programs(picks.invoke(QUESTION)) != [DRAFT]
    assert programs(picks.invoke(QUESTION, draft=DRAFT)) == [DRAFT]
    assert programs(asyncio.run(picks.ainvoke(QUESTION, draft=DRAFT))) == [DRAFT]
    assert picks.select_examples({"source": QUESTION}, draft=DRAFT) == [ROWS[-1]]
    assert asyncio.run(picks.aselect_examples({"source": QUESTION}, draft=DRAFT)) == [ROWS[-1]]
    assert picks.explain(QUESTION, draft=DRAFT).steps[0].pick.target == DRAFT


def test_each_question_of_a_batch_has_a_draft_of_its_own():
    picks = retriever(k=1)
    drafts = {"a": DRAFT, "b": "SELECT name FROM city"}
    expected = [[DRAFT], ["SELECT name FROM city"], programs(picks.invoke("c"))]
    assert [programs(one) for one in picks.batch(["a", "b", "c"], drafts=drafts)] == expected
    found = asyncio.run(picks.abatch(["a", "b", "c"], drafts=drafts))
    assert [programs(one) for one in found] == expected
    mixed = picks.batch(["a", " ", "b"], drafts=drafts, return_exceptions=True)
    assert (programs(mixed[0]), programs(mixed[2])) == ([DRAFT], ["SELECT name FROM city"])


def test_a_draft_that_does_not_parse_changes_nothing():
    picks = retriever(k=3)
    assert picks.invoke(QUESTION, draft="SELECT FROM ((river") == picks.invoke(QUESTION)


def test_a_draft_must_be_text():
    with pytest.raises(InputError, match="a draft must be a program as a string, not int"):
        retriever().invoke(QUESTION, draft=3)
    with pytest.raises(InputError, match="drafts must map questions to drafts of their programs, not list"):
        retriever().batch([QUESTION], drafts=["f(x)"])


def test_a_family_without_structures_says_so():
    picks = SequentialCompositionalRetriever.from_encoder(lexical(ROWS, 8), ROWS)
    with pytest.raises(InputError, match="the lexical family can't use a draft") as caught:
        picks.invoke(QUESTION, draft=DRAFT)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="the lexical family can't use a draft"):
        semantic_parsing_chain(FakeListLLM(responses=[DRAFT]), picks, "sql", drafts=1)


class Keeping(FakeListLLM):
    """Keeps its prompts."""

    prompts: list[str] = Field(default_factory=list)

    def _call(self, prompt, *args, **more):
        self.prompts.append(prompt)
        return super()._call(prompt, *args, **more)

    async def _acall(self, prompt, *args, **more):
        return self._call(prompt)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_chain_asks_again_with_other_picks(is_async, wrapped):
    model, picks = Keeping(responses=[DRAFT, "SELECT MAX(size) FROM city"]), retriever(k=1)
    if wrapped:
        picks = picks.configurable_fields(k=ConfigurableField(id="k")).with_fallbacks([picks])
    chain = semantic_parsing_chain(model, picks, "sql", drafts=1)
    answer = asyncio.run(chain.ainvoke(QUESTION)) if is_async else chain.invoke(QUESTION)
    assert answer.program == "SELECT MAX(size) FROM city"
    assert answer.answers == (DRAFT, "SELECT MAX(size) FROM city")
    assert programs(answer.picks) == [DRAFT]
    first, second = model.prompts
    assert DRAFT not in first
    assert DRAFT in second


@pytest.mark.parametrize("is_async", [False, True])
def test_a_retriever_configured_by_the_call_takes_drafts(is_async):
    picks = retriever(k=1).configurable_fields(k=ConfigurableField(id="k"))
    chain = semantic_parsing_chain(Keeping(responses=[DRAFT, "SELECT MAX(size) FROM city"]), picks, "sql", drafts=1)
    config = {"configurable": {"k": 2}}
    answer = asyncio.run(chain.ainvoke(QUESTION, config)) if is_async else chain.invoke(QUESTION, config)
    assert len(answer.answers) == len(answer.picks) == 2
    assert DRAFT in programs(answer.picks)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_question_asked_twice_has_a_draft_of_each(is_async):
    drafts = [DRAFT, "SELECT name FROM city"]
    chain = semantic_parsing_chain(Keeping(responses=[*drafts, *drafts]), retriever(k=1), "sql", drafts=1)
    answers = asyncio.run(chain.abatch([QUESTION] * 2)) if is_async else chain.batch([QUESTION] * 2)
    assert [programs(answer.picks) for answer in answers] == [[draft] for draft in drafts]


def test_the_chain_asks_once_by_default():
    model = Keeping(responses=[DRAFT])
    assert semantic_parsing_chain(model, retriever(k=1), "sql").invoke(QUESTION).answers == (DRAFT,)
    assert len(model.prompts) == 1


def test_a_draft_that_leads_to_the_same_picks_costs_no_call():
    model, picks = Keeping(responses=[DRAFT]), retriever(k=1)
    same = programs(picks.invoke(QUESTION))[0]
    answer = semantic_parsing_chain(model.model_copy(update={"responses": [same]}), picks, "sql", drafts=2).invoke(
        QUESTION
    )
    assert (answer.program, answer.answers) == (same, (same,))


def test_the_draft_is_the_answer_where_no_later_one_parses():
    model, picks = Keeping(responses=[DRAFT, "no", "no"]), retriever(k=1)
    answer = semantic_parsing_chain(model, picks, "sql", drafts=1).invoke(QUESTION)
    assert (answer.program, answer.error, answer.answers) == (DRAFT, None, (DRAFT, "no", "no"))
    assert programs(answer.picks) != [DRAFT]


def test_without_a_program_there_is_no_draft():
    model = Keeping(responses=["no", "no", DRAFT])
    answer = semantic_parsing_chain(model, retriever(k=1), "sql", drafts=1).invoke(QUESTION)
    assert (answer.program, answer.answers) == (None, ("no", "no"))


def test_sql_that_was_run_is_a_draft_for_the_next_picks(tmp_path):
    path = tmp_path / "lakes.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE lake (size); INSERT INTO lake VALUES (3), (7)")
    model = Keeping(responses=[DRAFT, "SELECT MIN(size) FROM lake"])
    answer = text_to_sql_chain(model, retriever(k=1), str(path), drafts=1).invoke(QUESTION)
    assert answer.answers == (DRAFT, "SELECT MIN(size) FROM lake")
    assert (answer.program, answer.result) == ("SELECT MIN(size) FROM lake", [(3,)])
    assert programs(answer.picks) == [DRAFT]
    # The draft's rows stay where no later SQL can be run.
    model = Keeping(responses=[DRAFT, "SELECT depth FROM lake", "SELECT depth FROM lake"])
    answer = text_to_sql_chain(model, retriever(k=1), str(path), drafts=1).invoke(QUESTION)
    assert (answer.program, answer.result, len(answer.answers)) == (DRAFT, [(7,)], 3)


@pytest.mark.parametrize(("drafts", "error"), [(-1, "drafts must be a whole number"), (True, "drafts must be")])
def test_invalid_numbers_of_drafts(drafts, error):
    with pytest.raises(InputError, match=error):
        semantic_parsing_chain(FakeListLLM(responses=[DRAFT]), retriever(), "sql", drafts=drafts)


def test_drafts_need_our_retriever():
    from langchain_core.runnables import RunnableLambda

    with pytest.raises(InputError, match="drafts need a SequentialCompositionalRetriever, not RunnableLambda"):
        semantic_parsing_chain(FakeListLLM(responses=[DRAFT]), RunnableLambda(lambda _: []), "sql", drafts=1)
