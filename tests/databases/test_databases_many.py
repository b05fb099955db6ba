"""Many databases: which file a question's fields name, how many are open at a time, and what its users see of it."""

import copy
import pickle
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.example_selectors import LengthBasedExampleSelector
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.prompts import PromptTemplate
from rcr_trainer.data.examples import Example
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import score

from langchain_rcr import InputError, Prompt, text_to_sql_chain
from langchain_rcr.chains.few_shot import PICKED
from langchain_rcr.databases.database import Database
from langchain_rcr.databases.many import Databases, are_many
from langchain_rcr.errors import ProgramError
from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec(language="sql:sqlite")


@pytest.fixture
def folder(tmp_path):
    """Five databases, laid out as Spider's; number n has a table of n rows."""
    for name, count in zip("abcde", range(1, 6), strict=True):
        (tmp_path / "all" / name).mkdir(parents=True)
        connection = sqlite3.connect(tmp_path / "all" / name / f"{name}.sqlite")
        connection.execute(f"CREATE TABLE t_{name} (x)")
        connection.executemany(f"INSERT INTO t_{name} VALUES (?)", [(number,) for number in range(count)])
        connection.commit()
        connection.close()
    return tmp_path / "all"


@pytest.mark.parametrize(
    "form", ["{folder}", "{folder}/{{db_id}}/{{db_id}}.sqlite", "sqlite:///{folder}/{{db_id}}/{{db_id}}.sqlite"]
)
def test_a_folder_or_a_template_names_the_files(folder, form):
    where = form.format(folder=folder)
    assert are_many(where)
    with Databases(where) as run:
        assert run.names == ("db_id",)
        assert run("SELECT count(*) FROM t_c", {"db_id": "c", "more": [1]}) == [(3,)]
        with pytest.raises(ProgramError, match="no such table: t_c"):
            run("SELECT count(*) FROM t_c", {"db_id": "a"})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_has_processes_of_its_own(folder, copied):
    with Databases(folder, max_databases=2, max_rows=3) as run:
        assert run("SELECT * FROM t_c", {"db_id": "c"}) == [(0,), (1,), (2,)]
        with copied(run) as other:
            assert other("SELECT count(*) FROM t_e", {"db_id": "e"}) == [(5,)]
            with pytest.raises(ProgramError, match="more than 3 rows"):
                other("SELECT * FROM t_e", {"db_id": "e"})
            assert other._most == 2
        assert run("SELECT count(*) FROM t_c", {"db_id": "c"}) == [(3,)]


def test_a_relative_template_means_the_folder_of_its_time(folder, tmp_path, monkeypatch):
    (tmp_path / "{x}").mkdir()
    folder.rename(tmp_path / "{x}" / "all")
    monkeypatch.chdir(tmp_path / "{x}")
    for where in ("all", "all/{db_id}/{db_id}.sqlite"):
        with Databases(where) as run, monkeypatch.context() as moved:
            moved.chdir(tmp_path)
            assert run("SELECT count(*) FROM t_c", {"db_id": "c"}) == [(3,)]


def test_one_database_is_not_many(folder):
    assert not are_many(folder / "a" / "a.sqlite")
    assert not are_many("postgresql://host/{db_id}")
    (folder / "{x}.sqlite").write_bytes(b"")
    assert not are_many(folder / "{x}.sqlite")


@pytest.mark.parametrize("value", ["../b", "b/../b", "/etc/passwd", "", ".", "..", "a\0", "a\nb", None, 3, "x" * 300])
def test_a_field_leads_to_no_other_folder(folder, value):
    with pytest.raises(InputError, match=r"db_id = .* can't name a database"):
        Databases(folder).path({"db_id": value})


def test_a_database_may_be_named_in_any_script(folder):
    for name in ("भूगोल", "地理", "coğrafya", "cafe\u0301"):
        (folder / name).mkdir()
        (folder / name / f"{name}.sqlite").touch()
        assert Databases(folder).path({"db_id": name}).endswith(f"/{name}/{name}.sqlite")


def test_what_is_wrong_is_said_in_a_line(folder):
    run = Databases(folder)
    with pytest.raises(InputError, match=r"needs the field 'db_id'; a question's are 'schema'"):
        run("SELECT 1", {"schema": ""})
    for name in ("gone", "地" * 199):
        with pytest.raises(InputError, match=rf"{name}\.sqlite can't be read: no such file"):
            run.path({"db_id": name})
    for template in ("x/{}.sqlite", "{db_id.real}.sqlite", "{db_id!r}.sqlite", "{db_id:>9}.sqlite", "{db_id", "plain"):
        with pytest.raises(InputError, match="is not a template"):
            Databases(template)
    with pytest.raises(InputError, match="of PostgreSQL give one"):
        Databases("postgresql://host/{db_id}")
    with pytest.raises(InputError, match="max_databases must be a whole number of at least 1, not 0"):
        Databases(folder, max_databases=0)


def test_the_least_recently_used_is_closed_for_another(folder):
    with Databases(folder, max_databases=2) as run:
        processes = {}
        for name in "abacab":
            assert run(f"SELECT count(*) FROM t_{name}", {"db_id": name})
            assert len(run._idle) <= 2
            [process] = run._idle[run.path({"db_id": name})]._idle
            processes.setdefault(name, []).append(process)
        assert processes["a"][0] is processes["a"][1] is processes["a"][2]  # c took b's place, and b took c's
        assert processes["b"][0] is not processes["b"][1]
        assert [processes[name][0].is_alive() for name in "abc"] == [True, False, False]
    assert not processes["a"][0].is_alive()


@pytest.mark.slow
def test_many_threads_share_few_databases(folder, monkeypatch):
    opened, asking, together = set(), Counter(), []
    close, call = Database.close, Database.__call__

    def asked(database, program):
        opened.add(database)
        asking[database] += 1
        together.append((len(opened), asking[database]))
        try:
            return call(database, program)
        finally:
            asking[database] -= 1

    monkeypatch.setattr(Database, "__call__", asked)
    monkeypatch.setattr(Database, "close", lambda database: opened.discard(database) or close(database))
    with Databases(folder, max_databases=2, timeout_s=60.0) as run:

        def ask(number):
            name = "abcde"[number % 5]
            return run(f"SELECT count(*) FROM t_{name}", {"db_id": name})

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(40))) == [[(number % 5 + 1,)] for number in range(40)]
    assert max(together)[0] == 2  # databases at a time
    assert {queries for _, queries in together} == {1}  # on one of them


def test_limits_are_those_of_each(folder):
    with Databases(folder, max_rows=2) as run:
        assert run("SELECT x FROM t_b", {"db_id": "b"}) == [(0,), (1,)]
        with pytest.raises(ProgramError, match="more than 2 rows"):
            run("SELECT x FROM t_c", {"db_id": "c"})


def test_the_reward_runs_each_program_once_on_each_database(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(Database, "__call__", lambda self, program: asked.append(program) or [(program,)])
    reward = make_reward("execution", SPEC, database=str(folder))
    examples = [Example(str(n), "q", "gold", {"db_id": name}) for n, name in enumerate("abab")]
    for _ in range(3):  # selectors
        assert score(reward, ["gold", "other", "gold", None], examples, [[]] * 4).tolist() == [1, 0, 1, 0]
    assert sorted(asked) == ["gold", "gold", "other"]


def test_the_reward_compares_on_the_questions_database(folder):
    examples = [Example(name, "q", f"SELECT count(*) FROM t_{name}", {"db_id": name}) for name in "abc"]
    answers = ["SELECT 1", "SELECT 1", "SELECT count(*) FROM t_a"]
    alone = make_reward("execution", SPEC, database=str(folder))
    mixed = make_reward({"execution": 2.0, "correctness": 1.0}, SPEC, database=f"{folder}/{{db_id}}/{{db_id}}.sqlite")
    assert score(alone, answers, examples, [[]] * 3).tolist() == [1, 0, 0]
    assert score(mixed, answers, examples, [[]] * 3).tolist() == [2, 0, 0]
    with pytest.raises(InputError, match="needs the field 'db_id'"):
        score(alone, ["SELECT 1"], [Example("1", "q", "SELECT 1")], [[]])


def test_a_chain_takes_database_and_schema_of_each_question(folder):
    rows = [{"source": "how many", "target": "SELECT 1"}]
    selector = LengthBasedExampleSelector(examples=rows, example_prompt=PromptTemplate.from_template("{source}"))
    prompts = []

    class Seen(FakeListLLM):
        def _call(self, prompt, *args, **kwargs):
            prompts.append(prompt)
            return super()._call(prompt, *args, **kwargs)

    chain = text_to_sql_chain(Seen(responses=["SELECT count(*) FROM t_a"]), selector, folder, repairs=0)
    asked = [{"source": "q", "db_id": name} for name in ("a", "b", "../a")]
    first, second, third = chain.batch([*asked], return_exceptions=True)
    assert first.result == [(1,)]
    assert "no such table: t_a" in second.error
    assert isinstance(third, InputError)
    assert ["CREATE TABLE t_a (x)" in prompt for prompt in prompts] == [True, False]
    assert ["CREATE TABLE t_b (x)" in prompt for prompt in prompts] == [False, True]
    with pytest.raises(InputError, match="needs the field 'db_id'"):
        chain.invoke("q")
    typical = text_to_sql_chain(FakeListLLM(responses=["SELECT count(*) FROM t_b"]), selector, folder)
    assert pickle.loads(pickle.dumps(typical)).invoke(asked[1]).result == [(2,)]
    # Nor is a call paid for where no schema is looked up.
    chain = text_to_sql_chain(Seen(responses=["SELECT 1"]), selector, folder, schema="CREATE TABLE t (x)")
    with pytest.raises(InputError, match="needs the field 'db_id'"):
        chain.invoke("q")
    assert len(prompts) == 2


@pytest.mark.parametrize("model_type", [FakeListLLM, FakeListChatModel])
def test_examples_are_shown_with_their_databases_tables(folder, model_type):
    rows = [
        {"source": "how many b", "target": "SELECT count(*) FROM t_b", "db_id": "b"},
        {"source": "how many c", "target": "SELECT count(*) FROM t_c", "db_id": "gone"},
        {"source": "how many d", "target": "SELECT count(*) FROM d", "schema": "CREATE TABLE d (y)"},
    ]
    selector = LengthBasedExampleSelector(examples=rows, example_prompt=PromptTemplate.from_template("{source}"))
    chain = text_to_sql_chain(model_type(responses=["SELECT 1"]), selector, folder)
    messages = chain.prompt.invoke({"source": "q", "db_id": "a", PICKED: rows}).to_messages()
    fields = [{"schema": "CREATE TABLE t_b (x);"}, {}, {"schema": "CREATE TABLE d (y)"}]
    shown = [Example(str(at), each["source"], each["target"], fields[at]) for at, each in enumerate(rows)]
    # As in training and in the comparison.
    prompt = Prompt(name="sql" if model_type is FakeListLLM else "sql_chat")
    asked = prompt.request(shown, "q", {"schema": "-- SQLite\nCREATE TABLE t_a (x);"})
    texts = [message.content for message in messages]
    assert texts == ([asked] if isinstance(asked, str) else [asked.system, *asked.turns])
    assert ["CREATE TABLE" in text for text in texts[-2:]] == ([True] if isinstance(asked, str) else [False, True])
    # Values of other databases' rows stay there, those of the question's own are shown.
    sampled = text_to_sql_chain(model_type(responses=["SELECT 1"]), selector, folder, samples=3)
    assert sampled.prompt.invoke({"source": "q", "db_id": "c", PICKED: rows[:1]}).to_string().count("-- values:") == 1
    # Examples of the question's own database stand below its schema, without a further one.
    own = chain.prompt.invoke({"source": "q", "db_id": "b", PICKED: rows[:1]}).to_string()
    assert own.count("CREATE TABLE") == 1
    assert own.index("CREATE TABLE") < own.index("how many b")


def test_large_values_and_text_that_is_no_utf_8_come_back_as_they_are(folder):
    with Databases(folder) as run:
        sql = "SELECT x, hex(zeroblob(9000)), replace(hex(zeroblob(9000)), '0', 'é'), zeroblob(9000), x'00' FROM t_b"
        zeros, accents = "0" * 18000, "é" * 18000
        assert run(sql, {"db_id": "b"}) == [(n, zeros, accents, bytes(9000), bytes(1)) for n in (0, 1)]
        assert run("SELECT CAST(x'41ff42' AS TEXT), x'41ff42', 'ä'", {"db_id": "b"}) == [("A\ufffdB", b"A\xffB", "ä")]
        assert run("SELECT CAST(x'ff' AS TEXT)", {"db_id": "b"}) == [("\ufffd",)]
    with Databases(folder, max_bytes=100_000) as run:
        assert run("SELECT zeroblob(90000)", {"db_id": "a"}) == [(bytes(90_000),)]
        with pytest.raises(ProgramError, match="rows of more than 100000 bytes"):
            run("SELECT zeroblob(90000) UNION ALL SELECT zeroblob(20000)", {"db_id": "a"})
        assert run("SELECT 1", {"db_id": "a"}) == [(1,)]


def test_rows_are_written_some_at_a_time_and_come_back_in_order(folder):
    rows = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {}) SELECT x, {} FROM n"
    with Databases(folder, max_rows=25_000, max_bytes=1_000_000) as run:
        found = run(rows.format(25_000, "x % 3"), {"db_id": "a"})
        assert found == [(n, n % 3) for n in range(1, 25_001)]
        mixed = run(rows.format(300, "CASE WHEN x % 100 = 0 THEN hex(zeroblob(3000)) ELSE 'a' END"), {"db_id": "a"})
        assert mixed == [(n, "a" if n % 100 else "0" * 6000) for n in range(1, 301)]
        with pytest.raises(ProgramError, match="more than 25000 rows"):
            run(rows.format(25_001, "x"), {"db_id": "a"})
        with pytest.raises(ProgramError, match="rows of more than 1000000 bytes"):
            run(rows.format(25_000, "'a text of some forty characters, or more'"), {"db_id": "a"})
        assert run("SELECT 1 WHERE 0", {"db_id": "a"}) == []
