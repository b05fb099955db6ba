"""The text-to-SQL chain: the schema in the prompt, SQL run read-only, one repair; and the example over it."""

import argparse
import asyncio
import os
import re
import runpy
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from langchain_core.example_selectors import LengthBasedExampleSelector
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from openai_server import OpenAIServer
from places import ROOT
from toys import lexical

from langchain_rcr import (
    InputError,
    Item,
    ProgramError,
    Prompt,
    SequentialCompositionalRetriever,
    open_database,
    schema_text,
    semantic_parsing_chain,
    text_to_sql_chain,
)
from langchain_rcr.chains.few_shot import PICKED

TABLE = "CREATE TABLE river (name TEXT, length INTEGER DEFAULT '{}')"


@pytest.fixture
def rivers(tmp_path: Path) -> str:
    path = tmp_path / "rivers.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(TABLE)
        connection.executemany("INSERT INTO river VALUES (?, ?)", [("Oder", 840), ("Elbe", 1094)])
    connection.close()
    return str(path)


@pytest.fixture
def selector() -> LengthBasedExampleSelector:
    examples = [{"source": "how many rivers are there", "target": "SELECT COUNT(*) FROM river"}]
    return LengthBasedExampleSelector(examples=examples, example_prompt=PromptTemplate.from_template("{source}"))


class Seen(FakeListChatModel):
    """Keeps what it was asked."""

    prompts: list

    def _call(self, messages, *args, **kwargs):
        self.prompts.append([message.text for message in messages])
        return super()._call(messages, *args, **kwargs)


def test_sql_is_run_and_its_prompt_has_schema_and_examples(rivers: str, selector) -> None:
    model = Seen(responses=["```sql\nSELECT name FROM river WHERE length > 1000\n```"], prompts=[])
    answer = text_to_sql_chain(model, selector, rivers).invoke("which rivers are longer than 1000")
    assert (answer.program, answer.result) == ("SELECT name FROM river WHERE length > 1000", [("Elbe",)])
    assert answer.ok
    system, *rest = model.prompts[0]
    assert TABLE in system
    assert "SQLite" in system
    assert rest == ["how many rivers are there", "SELECT COUNT(*) FROM river", "which rivers are longer than 1000"]


@pytest.mark.parametrize("name", ["appendix_d", "sql"])
def test_a_checkpoint_s_own_prompt_is_used_if_it_shows_a_schema(rivers: str, name: str) -> None:
    rows = [{"source": "how many rivers are there", "target": "SELECT COUNT(*) FROM river"}]
    encoder = lexical(rows, dim=8)
    encoder.prompt = Prompt(name=name)
    model = Seen(responses=["SELECT 1"], prompts=[])
    text_to_sql_chain(model, SequentialCompositionalRetriever.from_encoder(encoder, rows), rivers).invoke("how many")
    assert TABLE in "".join(model.prompts[0])
    assert ("Question: how many" in model.prompts[0][-1]) == (name == "sql")


def test_an_error_of_the_database_goes_back_to_the_model_once(rivers: str, selector) -> None:
    model = Seen(responses=["SELECT title FROM river", "SELECT name FROM river"], prompts=[])
    answer = text_to_sql_chain(model, selector, rivers).invoke("which rivers are there")
    assert answer.result == [("Oder",), ("Elbe",)]
    assert answer.answers == ("SELECT title FROM river", "SELECT name FROM river")
    assert "no such column: title" in model.prompts[1][-1]


@pytest.mark.parametrize(
    ("sql", "complaint"),
    [
        ("SELECT title FROM river", "no such column: title"),
        ("DELETE FROM river", "can't be run"),
        ("", "it is empty"),
        # Its first line alone could be run.
        ("SELECT COUNT(*)\nFROM lake", "no such table: lake"),
    ],
)
def test_what_no_repair_helps_is_an_error_in_the_answer(rivers: str, selector, sql: str, complaint: str) -> None:
    answer = text_to_sql_chain(FakeListLLM(responses=[sql]), selector, rivers).invoke("which rivers are there")
    assert not answer.ok
    assert answer.result is None
    assert complaint in answer.error
    assert len(answer.answers) == 2
    with closing(sqlite3.connect(rivers)) as database:
        assert database.execute("SELECT COUNT(*) FROM river").fetchone() == (2,)


def test_the_database_may_be_a_path(rivers: str, selector) -> None:
    assert schema_text(Path(rivers)) == schema_text(rivers)
    chain = text_to_sql_chain(FakeListLLM(responses=["SELECT COUNT(*) FROM river"]), selector, Path(rivers))
    assert chain.invoke("how many rivers are there").result == [(2,)]


def test_repairs_are_a_whole_number(rivers: str, selector) -> None:
    with pytest.raises(InputError, match="repairs must be a whole number of at least 0, not -1"):
        text_to_sql_chain(FakeListLLM(responses=["SELECT 1"]), selector, rivers, repairs=-1)


async def test_many_questions_together_and_awaited(rivers: str, selector) -> None:
    chain = text_to_sql_chain(FakeListLLM(responses=["SELECT COUNT(*) FROM river"]), selector, rivers)
    answers = await chain.abatch(["how many rivers are there", "count the rivers"])
    assert [answer.result for answer in answers] == [[(2,)], [(2,)]]


@pytest.mark.parametrize("several", [False, True])
async def test_queries_that_wait_hold_none_of_asyncio_s_threads(rivers: str, selector, several: bool) -> None:
    path = rivers.replace("rivers", "{name}") if several else rivers
    chain = text_to_sql_chain(FakeListChatModel(responses=["SELECT 1"]), selector, path, max_processes=1)
    waiting, go = threading.Event(), threading.Event()

    def occupied(*_: object, **__: object) -> bool:
        waiting.set()
        return go.wait()

    if several:
        chain.execute._changed.wait_for = occupied
    else:
        chain.execute._places.acquire = occupied
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    asked = asyncio.create_task(chain.ainvoke({"source": "how many rivers are there", "name": "rivers"}))
    try:
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(asyncio.to_thread(str, "served"), 5) == "served"
        assert not asked.done()
    finally:
        go.set()
    assert (await asked).result == [(1,)]


def test_a_completion_model_reads_the_schema_before_the_examples(rivers: str, selector) -> None:
    chain = text_to_sql_chain(FakeListLLM(responses=[""]), selector, rivers)
    text = chain.prompt.invoke({"source": "q", "picked_examples": selector.examples}).to_string()
    assert text.index(TABLE) < text.index("Question: how many") < text.index("Question: q")


def test_an_executor_that_breaks_is_no_error_of_the_model(selector) -> None:
    def broken(program: str) -> None:
        raise OSError("the disk is gone")

    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), selector, "sql", execute=broken)
    with pytest.raises(OSError, match="the disk is gone"):
        chain.invoke("how many")


def test_a_database_that_isn_t_there_is_named(selector, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.sqlite can't be read"):
        text_to_sql_chain(FakeListLLM(responses=[""]), selector, str(tmp_path / "none.sqlite"))


@pytest.mark.slow
@pytest.mark.skipif("TEST_POSTGRES_URL" in os.environ, reason="a given server's roles are left alone")
def test_the_role_of_the_docs_reads_and_no_more(postgres_url: str) -> None:
    import psycopg
    from psycopg.conninfo import make_conninfo

    [statements] = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "text-to-sql.md").read_text("utf-8"), re.DOTALL)
    shop = make_conninfo(postgres_url, dbname="shop")
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute("CREATE DATABASE shop")
        try:
            with psycopg.connect(shop, autocommit=True) as database:
                database.execute("CREATE TABLE book (title text)")
                database.execute(statements)
                database.execute("CREATE TABLE salary (id int PRIMARY KEY)")
                database.execute("CREATE TABLE writer (id int PRIMARY KEY, name text, salary int)")
                database.execute("INSERT INTO writer VALUES (1, 'Ann', 2)")
                database.execute("GRANT SELECT (name) ON writer TO asker")
            asker = make_conninfo(shop, user="asker", password="change me")
            shown = ["CREATE TABLE book (title text);", "CREATE TABLE writer (name text, PRIMARY KEY (id));"]
            assert schema_text(asker).splitlines() == shown
            assert schema_text(asker, samples=1).splitlines() == [*shown, "-- values: 'Ann'"]
            with open_database(asker, max_processes=1) as run:
                assert run("SELECT count(*), lower('A') FROM book") == [(0, "a")]
                for harm in (
                    *("lo_create(0)", "lo_from_bytea(0, 'x')", "pg_logical_emit_message(false, 'a', 'b')"),
                    *("pg_sleep(0)", "pg_sleep_for('0')", "pg_terminate_backend(1)", "pg_cancel_backend(1)"),
                    *("pg_advisory_lock(1)", "pg_try_advisory_xact_lock(1)", "pg_notify('a', 'b')"),
                    *("set_config('statement_timeout', '0', false)", "pg_read_file('x')", "pg_ls_dir('.')"),
                ):
                    with pytest.raises(ProgramError, match="permission denied for function"):
                        run(f"SELECT {harm}")
                # Those that the server goes on computing can be looked for.
                run._overruns.append((1, 0.0))
                run._forget_ended()
                assert not run._overruns
        finally:
            server.execute("DROP DATABASE shop WITH (FORCE)")
            server.execute("DROP ROLE asker")


def test_a_schema_that_can_t_be_read_says_so(tmp_path: Path, selector) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE t (a TEXT DEFAULT '{'x' * 9_000_000}')")
    with pytest.raises(InputError, match="the schema can't be read: rows of more than 8388608 bytes; give"):
        text_to_sql_chain(FakeListLLM(responses=[""]), selector, path)
    path.write_bytes(b"")  # as sqlite3.connect leaves it for a name that is misspelt
    with pytest.raises(InputError, match=r"no tables to write queries for: .*x\.sqlite"):
        text_to_sql_chain(FakeListLLM(responses=[""]), selector, path)


def test_examples_of_another_selector_need_not_be_texts(rivers: str, selector) -> None:
    selector.examples[0]["target"] = {"from": "river"}
    model = Seen(responses=["SELECT 1"], prompts=[])
    assert text_to_sql_chain(model, selector, rivers).invoke("how many").ok
    assert "{'from': 'river'}" in model.prompts[0]


@pytest.mark.parametrize("form", ["sql", "sql_chat"])
def test_of_a_long_schema_question_and_picks_say_what_is_shown(rivers: str, selector, form: str) -> None:
    with closing(sqlite3.connect(rivers)) as database:
        database.execute("CREATE TABLE lake (name TEXT, depth INTEGER)")
        database.execute("CREATE TABLE harbour (ships INTEGER)")
    prompt = Prompt(name=form, schema_budget=150)
    model = Seen(responses=["SELECT 1"], prompts=[])
    chain = text_to_sql_chain(model, selector, rivers, prompt=prompt)
    chain.batch(["how deep are the lakes", "what else"])
    first, second = (" ".join(messages) for messages in model.prompts)
    assert [TABLE in first, "TABLE lake" in first, "TABLE harbour" in first] == [True, True, False]  # the pick's table
    assert [TABLE in second, "TABLE lake" in second, "-- 2 more tables: lake, harbour" in second] == [True, False, True]
    # As in training and in the comparison.
    items = [Item(each["source"], each["target"]) for each in selector.examples]
    schema = f"-- SQLite\n{schema_text(rivers)}"
    asked = prompt.request(items, "how deep are the lakes", {"schema": schema})
    assert schema_text(rivers) not in str(asked)
    assert str(asked).split("\n\n")[1].strip().startswith("-- SQLite\n")
    assert str(asked).split("\n\n")[1].split("\nQuestion")[0] in "\n".join(model.prompts[0])
    # A variable of this name takes the place of the database's own.
    chain.invoke({"source": "q", "schema": "CREATE TABLE mine (x)"})
    assert "CREATE TABLE mine (x)" in " ".join(model.prompts[-1])
    assert TABLE not in " ".join(model.prompts[-1])


@pytest.mark.parametrize("model_type", [FakeListLLM, FakeListChatModel])
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_schema_without_the_examples_tables_stands_beside_the_question(
    rivers: str, tmp_path: Path, selector, model_type, as_batch: bool
) -> None:
    path = tmp_path / "lakes.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE lake (name TEXT)")
        database.commit()
    chain = text_to_sql_chain(model_type(responses=["SELECT name FROM lake"] * 2), selector, path)
    name = "sql" if model_type is FakeListLLM else "sql_chat"
    items = [Item(each["source"], each["target"]) for each in selector.examples]
    own = Prompt(name=name, db_schema=f"-- SQLite\n{schema_text(path)}")
    question = "which lakes are there"
    given = {"source": question, PICKED: selector.examples}
    # As in training and in the comparison.
    messages = (chain.prompt.batch([given])[0] if as_batch else chain.prompt.invoke(given)).to_messages()
    asked = own.request(items, question)
    assert [message.content for message in messages] == (
        [asked] if isinstance(asked, str) else [asked.system, *asked.turns]
    )
    assert messages[-1].content.index("CREATE TABLE lake") < messages[-1].content.index(question)
    assert chain.batch([question, {"source": question}])[1].program == "SELECT name FROM lake"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "text_to_sql.py"))


def test_the_example_s_test_questions_combine_what_no_training_question_does(example) -> None:
    train, test = example["make_pairs"](300, 60)
    assert (len(train), len(test)) == (300, 60)

    def form(pair: dict[str, str]) -> tuple[bool, ...]:
        ends = [sql.split("{where}") for _, sql in example["ASKED"].values()]
        asked = [pair["sql"].startswith(first) and pair["sql"].endswith(last) for first, last in ends]
        return *asked, *(condition.split("{")[0] in pair["sql"] for _, condition, _ in example["WHICH"].values())

    assert not {form(pair) for pair in train} & {form(pair) for pair in test}


def test_the_example_says_in_a_line_that_a_key_is_missing(
    example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("sys.argv", ["text_to_sql.py", "--llm", "m", "--train", "30", "--test", "6"])
    with pytest.raises(SystemExit, match="no API key: set OPENAI_API_KEY, or give --base-url"):
        example["main"]()
    assert capsys.readouterr().out == ""
    assert not [*tmp_path.iterdir()]
    given = argparse.Namespace(llm="m", base_url="http://127.0.0.1:9/v1")
    assert example["asked"](given).model_name == "m"


@pytest.mark.slow
def test_the_example_says_what_it_will_cost_before_it_asks(
    example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []

    def answer(prompt: str) -> str:
        said.append(capsys.readouterr())
        return "SELECT COUNT(*) FROM books"

    with OpenAIServer(answer) as server:
        words = ["text_to_sql.py", "--llm", "m", "--base-url", server.base_url, "--train", "30", "--test", "9"]
        monkeypatch.setattr("sys.argv", words)
        example["main"]()
    found = re.search(r"m will be called (\d+) times.*and read some ([\d,]+) tokens", said[0].out)
    assert found is not None
    assert int(found[1]) == len(server.requests) == 18
    read = sum(len(str(message["content"])) for each in server.requests for message in each.body["messages"])
    assert int(found[2].replace(",", "")) == pytest.approx(read / 4, rel=0.3)
    progress = "".join(each.err for each in [*said, capsys.readouterr()])
    assert [f"{name}: {n} of 9 answered" in progress for name in ("LangChain's selector", "ours") for n in (8, 9)] == [
        True
    ] * 4


@pytest.mark.slow
def test_the_example_s_bookshop_on_postgresql(example, postgres_url: str, selector) -> None:
    import psycopg

    example["make_database"](postgres_url)
    try:
        answer = text_to_sql_chain(lambda prompt: "SELECT count(*) FROM books", selector, postgres_url).invoke("q")
        assert answer.result == [(120,)]
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP TABLE orders, customers, books, authors")


def test_a_prompt_of_langchain_s_shows_the_schema_too(rivers: str, selector) -> None:
    llm = Seen(responses=["SELECT 1"], prompts=[])
    example = PromptTemplate.from_template("{source} {target}")
    few_shot = partial(FewShotPromptTemplate, example_selector=selector, example_prompt=example)
    prompt = few_shot(prefix="{schema}", suffix="{source}", input_variables=["schema", "source"])
    for given in (None, "CREATE TABLE mine (x)"):
        text_to_sql_chain(llm, selector, rivers, prompt=prompt, schema=given).invoke("how many")
        assert llm.prompts[-1][0].startswith(f"-- SQLite\n{given or schema_text(rivers)}\n")
    with pytest.raises(InputError, match=r"schema is given, but prompt has no \{schema\}"):
        text_to_sql_chain(llm, selector, rivers, prompt=few_shot(suffix="{source}"), schema=TABLE)
    with pytest.raises(InputError, match=r"schema is given, but prompt has no \{schema\}"):
        text_to_sql_chain(llm, selector, rivers, prompt=Prompt(), schema=TABLE)
    text_to_sql_chain(llm, selector, rivers, prompt=Prompt()).invoke("how many")
    assert "CREATE" not in llm.prompts[-1][0]


def test_a_prompt_that_shows_a_schema_nobody_gives_is_an_error(selector) -> None:
    chain = semantic_parsing_chain(FakeListLLM(responses=["SELECT 1"]), selector, "sql", prompt=Prompt(name="sql"))
    with pytest.raises(InputError, match=r"prompt.prefix shows \{schema\}.*set prompt.db_schema"):
        chain.invoke("how many")
    assert chain.invoke({"source": "how many", "schema": TABLE}).program == "SELECT 1"
