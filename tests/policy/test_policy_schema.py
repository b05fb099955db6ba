"""A schema that fits a prompt: which tables stay, by question, examples and foreign keys; words of names."""

import os
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from langchain_rcr import InputError, Prompt
from langchain_rcr.basics.items import Item
from langchain_rcr.policy.schema import fitted, of_others, tables_read, words

CITY = "CREATE TABLE city (name TEXT, people INT, state_id INT REFERENCES state(id));\n-- values: name 'Austin'"
STATE = 'CREATE TABLE "state" (\n  id INT PRIMARY KEY,\n  label TEXT\n);'
RIVER = "CREATE TABLE IF NOT EXISTS main.Rivers (title TEXT, length INT);"
CROSSING = "CREATE VIEW `crossing` AS SELECT 1 AS a;"
FRONT = "-- SQLite"
SCHEMA = "\n".join([FRONT, CITY, STATE, RIVER, CROSSING])


def kept(text):
    return [
        name
        for name, table in {"city": CITY, "state": STATE, "river": RIVER, "crossing": CROSSING}.items()
        if table in text
    ]


@pytest.mark.parametrize(
    ("question", "programs", "budget", "expected"),
    [
        ("", [], len(SCHEMA), ["city", "state", "river", "crossing"]),
        ("", [], len(SCHEMA) - 1, ["city", "state", "river"]),  # nothing is spoken of: the first
        ("how long are the rivers", [], 100, ["river"]),
        ("the title of all", [], 100, ["river"]),  # a column
        ("", ["SELECT * FROM RIVERS"], 100, ["river"]),
        ("who lives in which city", [], 180, ["city", "state"]),  # the foreign key's table before others
        ("which states", [], 180, ["city", "state"]),  # or the table of the foreign key
        ("crossings", [], 70, ["crossing"]),
        ("which city", [], 20, ["city"]),  # the first stays however long it is
    ],
)
def test_tables_are_kept_that_are_spoken_of(question, programs, budget, expected):
    text = fitted(SCHEMA, budget, question, programs)
    assert kept(text) == expected
    assert text.startswith(FRONT)
    assert len(text) <= budget or expected == ["city"]


def test_a_name_with_spaces_is_spoken_of_by_a_program():
    details = 'CREATE TABLE "Order Details" (price REAL);'
    schema = f"{CITY}\n{details}"
    for program in ('SELECT 1 FROM x, "order details"', "SELECT 1 FROM [Order Details] AS d"):
        assert fitted(schema, 90, "", [program]).startswith(details)


def test_names_of_the_others_are_given_where_they_fit():
    text = fitted(SCHEMA, len(FRONT) + len(RIVER) + 45, "rivers length title")
    assert text == f"{FRONT}\n{RIVER}\n-- 3 more tables: city, state, crossing"
    text = fitted(SCHEMA, len(FRONT) + len(RIVER) + 34, "rivers length title")
    assert text == f"{FRONT}\n{RIVER}\n-- 3 more tables: city, state"


def test_every_process_keeps_the_same_tables():
    program = """
import random
from langchain_rcr.policy.schema import fitted
draw, columns = random.Random(0), "alpha beta gamma delta price date status kind note city".split()
tables = [f"CREATE TABLE t{at} ({' int, '.join(draw.sample(columns, 6))} int);" for at in range(60)]
print([fitted("\\n".join(tables), 900, " ".join(draw.sample(columns, 5)), []) for _ in range(50)])
"""
    seeds = [{**os.environ, "PYTHONHASHSEED": str(seed)} for seed in range(4)]
    said = [subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True) for env in seeds]
    assert len({each.stdout for each in said}) == 1


def test_what_has_no_statements_stays_whole():
    for text in ("tables: " + "a, " * 99, CITY, ""):
        assert fitted(text, 10, "q") == text


def test_words_of_names():
    assert words("orderItems of HTTPServers, cities_2 the class") == [
        "order", "item", "of", "http", "server", "city", "the", "class",
    ]  # fmt: skip
    assert words("Straßen_größe") == ["strassen", "grösse"]
    assert words("नदी_2 की 河流3") == ["नदी", "की", "河", "流"]


def test_a_prompt_shows_what_fits_for_question_and_picks():
    picks = [Item("a question", "SELECT length FROM rivers")]
    own = Prompt(name="sql", db_schema=SCHEMA, schema_budget=90)
    for prompt, fields in ((own, {}), (Prompt(name="sql", schema_budget=90), {"schema": SCHEMA})):
        assert kept(prompt.text(picks, "q", fields)) == ["river"]
        assert kept(str(prompt.request(picks, "q", fields))) == ["river"]
        assert kept(prompt.text([], "crossing", fields)) == ["crossing"]
    assert kept(Prompt(name="sql", db_schema=SCHEMA).text(picks, "q")) == ["city", "state", "river", "crossing"]
    chat = Prompt(name="sql_chat", db_schema=SCHEMA, schema_budget=90).request(picks, "q")
    assert kept(chat.system) == ["river"]
    with pytest.raises(InputError, match=r"shows \{schema\}"):
        Prompt(name="sql").text(picks, "q")


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ([], False),
        (["SELECT 1"], False),  # reads no table
        (["SELECT * FROM Rivers JOIN city ON 1"], False),
        (["select a from `crossing`", "SELECT a FROM lake"], False),  # as many of its own
        (["SELECT a FROM lake"], True),
        (["SELECT a FROM city JOIN lake ON 1"], True),
        (["SELECT a FROM city", "SELECT a FROM lake", 'SELECT a FROM main."ocean"'], True),
        (["SELECT 1", "SELECT a FROM lake"], True),
        (["WITH x AS (SELECT a FROM state), y AS (SELECT 1) SELECT * FROM x JOIN y"], False),
        (["SELECT * FROM (SELECT a FROM lake)"], True),
        (["SELECT * FROM (SELECT a FROM city)"], False),
        (["SELECT EXTRACT(YEAR FROM day), TRIM(BOTH 'x' FROM a) FROM city WHERE a IS DISTINCT FROM b"], False),
        (["SELECT a FROM city WHERE b = 'letters from home, it''s from lake'"], False),
        (["SELECT a FROM ONLY city JOIN LATERAL unnest(b) AS c ON true"], False),
        (["SELECT EXTRACT(YEAR FROM day) FROM lake"], True),
        (["-- all from Bob's list\nSELECT a /* from lake,\nfor now */ FROM city"], False),
        (["SELECT '--', a FROM lake"], True),
        (["SELECT SUBSTRING(LOWER(a) FROM 2) FROM city"], False),
        (["WITH RECURSIVE x(n) AS (SELECT 1), y AS NOT MATERIALIZED (SELECT 2) SELECT * FROM x, y"], False),
        (["SELECT a FROM city, lake"], True),
        (['SELECT a FROM city AS c, "state" s,main.rivers, LATERAL unnest(b) u ORDER BY length, a LIMIT 2, 3'], False),
    ],
)
def test_whose_tables_the_examples_read(programs, expected):
    assert of_others(SCHEMA, programs) is expected
    assert not of_others("tables: city", programs)  # nothing is known of its tables


@pytest.mark.parametrize("name", ["sql", "sql_chat"])
def test_the_schema_follows_examples_of_other_databases(name):
    own, other = Item("a question", "SELECT length FROM rivers"), Item("another", "SELECT a FROM lake")
    prompt = Prompt(name=name, db_schema=SCHEMA)
    before, after = (str(prompt.request(picks, "q")) for picks in ([own], [other]))
    assert before.index(FRONT) < before.index(own.source)
    assert after.index(other.source) < after.index(FRONT) < after.rindex("q")
    assert after.count(FRONT) == 1
    assert "other databases" in after
    assert "other databases" not in before
    assert str(prompt.request([], "q")).startswith(before.split("CREATE")[0])
    mine = Prompt(name=name, db_schema=SCHEMA, suffix="Dialect: SQLite")  # one's own stays where one puts it
    assert str(mine.request([other], "q")).index(FRONT) < str(mine.request([other], "q")).index(other.source)
    assert Prompt.model_validate(prompt.model_dump()) == prompt


LAKES = "-- SQLite\nCREATE TABLE lake (name TEXT);\nCREATE TABLE fish (name TEXT, lake TEXT);"


class Known(NamedTuple):
    source: str
    target: str
    fields: dict


def test_the_tables_that_a_query_reads():
    assert tables_read(LAKES, "SELECT name FROM Lake", 100) == "CREATE TABLE lake (name TEXT);"
    both = "CREATE TABLE lake (name TEXT);\nCREATE TABLE fish (name TEXT, lake TEXT);"
    assert tables_read(LAKES, "SELECT 1 FROM fish JOIN lake ON 1", 100) == both
    assert tables_read(LAKES, "SELECT 1 FROM fish f, lake AS l WHERE 1", 100) == both
    assert "fish (" not in tables_read(LAKES, "SELECT 1 FROM fish JOIN lake ON 1", 40)
    for nothing in ("SELECT 1", "SELECT a FROM sea"):
        assert tables_read(LAKES, nothing, 100) == ""
    assert tables_read("", "SELECT name FROM lake", 100) == ""
    hindi = "CREATE TABLE नदी (नाम TEXT);\nCREATE TABLE नदि (नाम TEXT);"
    assert tables_read(hindi, "SELECT नाम FROM नदी", 100) == "CREATE TABLE नदी (नाम TEXT);"
    assert fitted(hindi, 30, "कुल", ["SELECT नाम FROM नदी"]).startswith("CREATE TABLE नदी (")
    assert tables_read(SCHEMA, "SELECT name FROM city", 500) == CITY.split("\n", maxsplit=1)[0]  # without the values


@pytest.mark.parametrize("long", [40_000 * "a", 40_000 * '"', 40_000 * "[", 40_000 * "[a"])
def test_a_long_word_of_a_program_takes_no_quadratic_time(long):
    began = time.process_time()
    assert tables_read(SCHEMA, f"SELECT 1 FROM city WHERE x = {long}", 100) == CITY.split("\n", maxsplit=1)[0]
    assert time.process_time() - began < 2


def test_examples_of_other_databases_stand_below_the_tables_that_they_read():
    known = Known("which lakes", "SELECT name FROM lake", {"schema": LAKES})
    unknown = Known("which seas", "SELECT name FROM sea", {})
    prompt = Prompt(name="sql", db_schema=SCHEMA)
    assert prompt.request([known, unknown], "q") == (
        "Write one SQL query that answers the last question. Answer with the query alone. "
        "These are questions to other databases:\n\n\nTables:\nCREATE TABLE lake (name TEXT);\n"
        "Question: which lakes\nSQL: SELECT name FROM lake\nQuestion: which seas\nSQL: SELECT name FROM sea\n\n"
        f"The database:\n\n{SCHEMA}\n\nQuestion: q\nSQL:"
    )
    assert prompt.stop == ("\nQuestion:", "\nTables:")  # with what a model would go on
    chat = Prompt(name="sql_chat", db_schema=SCHEMA).request([known, unknown], "q")
    assert chat.turns[0] == "Tables:\nCREATE TABLE lake (name TEXT);\n\nwhich lakes"
    assert chat.turns[2] == "which seas"
    mine = Prompt(name="sql", db_schema=SCHEMA, others={"prefix": "Others:"})
    assert "Tables:" not in mine.request([known], "q")
    assert mine.stop == ("\nQuestion:",)
    # Each of the examples has its share of the budget, and of its own database no table is shown twice.
    fish = Known("which fish", "SELECT 1 FROM fish JOIN lake ON 1", {"schema": LAKES})
    short = Prompt(name="sql", db_schema=SCHEMA, schema_budget=150)
    assert short.request([fish], "q").count("fish (") == 1
    assert short.request([fish] * 4, "q").count("fish (") == 0
    own = Known("which city", "SELECT name FROM city", {"schema": SCHEMA})
    assert "Tables:" not in prompt.request([own], "q")


def test_what_takes_their_place_is_checked_too():
    for wrong in ("no name", "{schema} {schema}", "{source}"):
        with pytest.raises(InputError, match=r"prompt\.others\.example = .*: must have \{schema\} once"):
            Prompt(name="sql", others={"example": wrong})
    with pytest.raises(InputError, match=r"\{a\.b\} is not a plain name"):
        Prompt(name="sql", others={"suffix": "{a.b}"})
    with pytest.raises(InputError, match=r"contradicts prompt\.form = 'chat'"):
        Prompt(name="sql_chat", others={"prefix": "x"})
