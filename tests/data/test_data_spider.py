"""Spider's questions in the splits of Spider-SSP: fields, what is missing, faults, the command that writes a folder."""

import json
import shutil
import sqlite3

import pytest
from places import DATA
from rcr_trainer import cli
from rcr_trainer.data import spider
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import read_split
from rcr_trainer.data.spider import KINDS, spider_split
from rcr_trainer.errors import DataError
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import score

from langchain_rcr.errors import InputError
from langchain_rcr.programs import ProgramSpec

SPIDER = DATA / "spider"
ROWS = [
    ("pets", "how many dogs", "SELECT count(*) FROM dog"),
    ("elsewhere", "no question of the splits", "SELECT 1"),
    ("pets", "how many cats", 'SELECT count(*) FROM "CAT"'),
    ("gone", "a question", "SELECT a FROM b"),
    ("pets", "which owners", "SELECT o.name FROM dog JOIN owner AS o ON o.id = dog.owner"),
]


def schema(name, tables, columns, primary=(), foreign=()):
    return {
        "db_id": name,
        "table_names_original": tables,
        "column_names_original": [[-1, "*"], *([of, column] for of, column, _ in columns)],
        "column_types": ["text", *(kind for *_, kind in columns)],
        "primary_keys": [*primary],
        "foreign_keys": [*foreign],
    }


ROW = {"db_id": "pets", "question": "how many dogs", "query": "SELECT count(*) FROM dog"}
PETS = schema(
    "pets",
    ["dog", "owner", "cat", "sqlite_sequence"],
    [(0, "owner", "number"), (0, "the name", "text"), (1, "id", "number"), (1, "name", "text"), (2, "a", "text")],
    [3, [4, 5]],
    [[1, 3]],
)
SCHEMA = """CREATE TABLE dog (owner number, "the name" text, FOREIGN KEY (owner) REFERENCES owner(id));
CREATE TABLE owner (id number, name text, PRIMARY KEY (id, name));
CREATE TABLE cat (a text, PRIMARY KEY (a));"""


@pytest.fixture
def folder(tmp_path):
    spider = tmp_path / "spider"
    (spider / "ssp").mkdir(parents=True)
    (spider / "database" / "pets").mkdir(parents=True)
    written(spider / "train_spider.json", [{"db_id": d, "question": q, "query": s, "more": 1} for d, q, s in ROWS])
    written(spider / "tables.json", [PETS, schema("gone", ["b"], [(0, "a", "text")])])
    written(spider / "ssp" / "databases.json", ["pets", "gone"])
    written(spider / "ssp" / "template_1.json", {"train": [3, 0, 1], "test": [2]})  # 0 to 3: all but elsewhere's
    connection = sqlite3.connect(spider / "database" / "pets" / "pets.sqlite")
    connection.executescript(
        "CREATE TABLE Dog (owner, 'the name'); INSERT INTO dog VALUES (1, 'a');"
        "CREATE TABLE owner (id, name); INSERT INTO owner VALUES (1, 'b'); CREATE TABLE cat (a);"
    )
    connection.close()
    return spider


def written(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def test_what_is_missing_is_left_out_named_and_counted(folder):
    split = spider_split(folder)
    fields = {"db_id": "pets", "schema": SCHEMA}
    first, last = Example("0", ROWS[0][1], ROWS[0][2], fields), Example("4", ROWS[4][1], ROWS[4][2], fields)
    assert (split.train, split.dev, split.test) == ([last, first], [], [])
    assert split.name == "spider-template_1"
    assert split.meta["missing_databases"] == ["gone"]
    assert split.meta["empty_tables"] == ["pets.cat"]
    assert split.meta["left_out"] == {
        "their query reads a table without rows": 1,
        "their database is missing": 1,
    }


def test_spiders_own_split_is_tested_on_the_questions_of_dev_json(folder):
    rows = [{"db_id": "pets", "question": "all dogs", "query": "SELECT * FROM dog"}, {**ROW, "db_id": "gone"}]
    written(folder / "dev.json", rows)
    written(folder / "train_spider.json", [ROW, ROW])
    shutil.rmtree(folder / "ssp")
    split = spider_split(folder, "dev")
    assert [(each.id, each.target) for each in split.train] == [("0", ROW["query"]), ("1", ROW["query"])]
    assert split.test == [Example("dev0", "all dogs", "SELECT * FROM dog", {"db_id": "pets", "schema": SCHEMA})]
    assert split.meta["left_out"] == {"their database is missing": 1}


def test_the_schema_may_show_values(folder):
    [first, _] = spider_split(folder, samples=2).train
    lines = first.fields["schema"].splitlines()
    assert lines[1::2] == ["-- values: 1 | 'a'", "-- values: 1 | 'b'"]
    assert lines[::2] == SCHEMA.splitlines()


def test_databases_may_be_elsewhere(folder, tmp_path):
    shutil.move(folder / "database", tmp_path / "others")
    with pytest.raises(DataError, match=r"database is not a folder: unpack Spider's databases there, DB/DB\.sqlite"):
        spider_split(folder)
    assert spider_split(folder, databases=tmp_path / "others").counts() == {"train": 2, "dev": 0, "test": 0}


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("ssp/template_1.json", {"train": [4]}, "4 in 'train' is not among 4 questions"),
        ("ssp/template_1.json", {"train": ["x"]}, r"template_1\.json, train, 0: not of Spider's form"),
        ("train_spider.json", [{"db_id": "../x", "question": "q", "query": "s"}], "0, db_id: not of Spider's form"),
        ("tables.json", [], "has no database 'gone', which a question names"),
        ("tables.json", [{}], "0, db_id: not of Spider's form: Field required"),
        ("database/pets/pets.sqlite", [], r"pets\.sqlite can't be read"),
    ],
)
def test_a_fault_takes_one_line(folder, file, value, message):
    written(folder / file, value)
    with pytest.raises((DataError, InputError), match=message) as caught:
        spider_split(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_file(folder):
    with pytest.raises(DataError, match=r"^can't read .*tmcd_1\.json"):
        spider_split(folder, "tmcd_1")


def test_the_command_writes_a_folder_that_a_run_takes(folder, here, capsys):
    assert cli.main(["data", "spider", str(folder), "--out", "ssp"]) == 0
    out = capsys.readouterr().out
    assert "1 questions left out: their database is missing.\n" in out
    assert "missing databases: gone\nempty tables: pets.cat\nssp written: 2 train, 0 dev, 0 test.\n" in out
    assert f"--program.language=sql:sqlite --prompt.name=sql_chat --reward.database={folder / 'database'}" in out
    assert read_split("ssp") == spider_split(folder)


def test_the_command_and_the_reader_know_the_same_splits():
    parser = cli.build_parser([])
    for name in ("data", "spider"):
        parser = parser._subparsers._group_actions[0].choices[name]
    assert next(action.choices for action in parser._actions if action.dest == "split") == KINDS


@pytest.mark.slow
@pytest.mark.skipif(not SPIDER.is_dir(), reason=f"no Spider at {SPIDER}")
def test_gold_queries_of_spider_give_their_own_rows(tmp_path, monkeypatch):
    read, known = spider._described, {}

    def described(file, *others):
        """Each database is opened for the first split only; that takes most of the time."""
        if file not in known:
            known[file] = read(file, *others)
        return known[file]

    monkeypatch.setattr(spider, "_described", described)
    shutil.unpack_archive(SPIDER / "database.tar.xz", tmp_path, filter="data")
    split = spider_split(SPIDER, "template_1", tmp_path / "database")
    assert split.counts() == {"train": 3072, "dev": 0, "test": 1042}
    assert split.meta["missing_databases"] == ["formula_1", "music_2", "sakila_1"]
    assert split.meta["left_out"] == {"their database is missing": 262}
    sizes = {kind: spider_split(SPIDER, kind, tmp_path / "database").counts() for kind in KINDS if kind != "dev"}
    assert {sum(counts.values()) for counts in sizes.values()} == {4114}
    some = split.test[::10]
    reward = make_reward("execution", ProgramSpec(language="sql:sqlite"), database=str(tmp_path / "database"))
    assert set(score(reward, [each.target for each in some], some, [[]] * len(some)).tolist()) == {1.0}
