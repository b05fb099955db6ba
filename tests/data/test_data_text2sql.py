"""Files of the text2sql-data form: variables, splits and folds, faults, the command that writes a folder."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from places import DATA
from rcr_trainer import cli
from rcr_trainer.data.examples import Example
from rcr_trainer.data.files import read_split
from rcr_trainer.data.text2sql import text2sql_split
from rcr_trainer.errors import ConfigError, DataError

from langchain_rcr.programs import ProgramSpec

GEOGRAPHY = DATA / "geography_sql"
COLLECTION = DATA / "text2sql"

QUERIES: list[dict[str, Any]] = [
    {
        "query-split": "train",
        "sql": ['SELECT a FROM t WHERE n = "state_name0" OR n = "state_name1" ;', "SELECT other ;"],
        "variables": [],
        "sentences": [
            {
                "question-split": "test",
                "text": "state_name0 or state_name1",
                "variables": {"state_name0": "state_name1", "state_name1": "ohio"},
            },
            {"question-split": "dev", "text": "no variable1 here", "variables": {}},
        ],
    }
]


def written(path: Path, queries: Any) -> Path:
    path.write_text(json.dumps(queries))
    return path


def folded(labels: str) -> list[dict[str, Any]]:
    """A query with one question for each label."""
    sentence: dict[str, Any] = {"question-split": "0", "text": "a ?", "variables": {}}
    return [{"query-split": label, "sql": ["SELECT a"], "variables": [], "sentences": [sentence]} for label in labels]


def ids(examples: list[Example]) -> list[str]:
    return [example.id for example in examples]


def test_variables_are_filled_in_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "geography.json", QUERIES)
    first = Example("0-0", "state_name1 or ohio", 'SELECT a FROM t WHERE n = "state_name1" OR n = "ohio" ;')
    by_query, by_question = text2sql_split(path), text2sql_split(path, "question")
    assert ids(by_query.train) == ["0-0", "0-1"]
    assert by_query.train[0] == first
    assert by_query.test == []
    assert by_question.test == [first]
    assert by_question.dev[0].source == "no variable1 here"


def test_what_a_question_leaves_unsaid_has_the_querys_example(tmp_path: Path) -> None:
    queries = deepcopy(QUERIES)
    queries[0]["variables"] = [{"name": "state_name0", "example": "iowa", "location": "sql-only"}]
    said, unsaid = text2sql_split(written(tmp_path / "some.json", queries)).train
    assert '"state_name1"' in said.target
    assert '"iowa"' in unsaid.target


@pytest.mark.parametrize(("fold", "test", "dev"), [(None, "0", "1"), (0, "0", "1"), (2, "2", "4"), (4, "4", "0")])
def test_one_fold_is_test_and_the_next_dev(tmp_path: Path, fold: int | None, test: str, dev: str) -> None:
    labels = "0421420"
    split = text2sql_split(written(tmp_path / "yelp.json", folded(labels)), "query", fold)
    parts = {"test": test, "dev": dev}
    for part, label in parts.items():
        assert ids(getattr(split, part)) == [f"{n}-0" for n, each in enumerate(labels) if each == label]
    assert ids(split.train) == [f"{n}-0" for n, each in enumerate(labels) if each not in parts.values()]
    assert (split.name, split.meta["split"]) == (f"yelp-query-{test}", f"query-{test}")


def test_what_the_file_excludes_is_left_out(tmp_path: Path) -> None:
    queries = [QUERIES[0], {**QUERIES[0], "query-split": "exclude"}]
    assert text2sql_split(written(tmp_path / "some.json", queries)).counts() == {"train": 2, "dev": 0, "test": 0}


def changed(**changes: Any) -> str:
    """Two queries, of which the second is changed."""
    return json.dumps([*QUERIES, {**QUERIES[0], **{key.replace("_", "-"): value for key, value in changes.items()}}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON file"),
        (f"[{'9' * 5_000}]", "is not a JSON file: too deep, or a number too long"),
        ("[" * 100_000, "is not a JSON file: too deep, or a number too long"),
        ("{}", "should be a valid list"),
        ("[]", "at least 1 item"),
        ("[1]", "query 0: not of the text2sql-data form"),
        ('[{"sql": []}]', "query 0, sql: .* at least 1 item"),
        (changed(sentences=[{**QUERIES[0]["sentences"][0], "text": " "}]), "query 1, sentences, 0, text: "),
        (changed(sentences=[*QUERIES[0]["sentences"], {"text": "a ?"}]), "query 1, sentences, 2, .*Field required"),
        (changed(query_split="tset"), "query 1, query-split: .* should match"),
        (changed(query_split="3"), "mixes numbered folds with train"),
    ],
)
def test_the_first_fault_takes_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "geography.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        text2sql_split(path)
    assert str(caught.value).count("\n") == 0
    assert str(path) in str(caught.value)


def test_missing_file_and_unknown_fold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^can't read .*nowhere\.json"):
        text2sql_split(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"some\.json has no folds: leave out fold = 0"):
        text2sql_split(written(tmp_path / "some.json", QUERIES), "query", 0)
    for labels, fold in (("012", 3), ("01", 0)):
        with pytest.raises(ConfigError, match=rf"has no fold {fold} beside two more; its folds are \[0, 1"):
            text2sql_split(written(tmp_path / "some.json", folded(labels)), "query", fold)


@pytest.mark.usefixtures("here")
def test_the_command_writes_a_folder_that_a_run_takes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(here / "yelp.json", folded("0123"))
    assert cli.main(["data", "text2sql", "yelp.json", "--fold", "3", "--out", "yelp"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("yelp written: 2 train, 1 dev, 1 test.\n")
    assert "--data.directory=yelp --program.language=sql" in out
    assert read_split("yelp") == text2sql_split(path, "query", 3)
    assert cli.main(["data", "text2sql", "yelp.json", "--fold", "4", "--out", "other"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (here / "other").exists()


@pytest.mark.skipif(not COLLECTION.is_dir(), reason=f"no text2sql-data at {COLLECTION}")
@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("scholar", "query", (408, 94, 315)),
        ("academic", "query", (157, 19, 20)),
        pytest.param("atis", "question", (4347, 486, 447), marks=pytest.mark.slow),
        ("imdb", "query", (107, 10, 14)),
        ("yelp", "question", (102, 13, 13)),
    ],
)
def test_the_public_files(name: str, kind: str, sizes: tuple[int, int, int]) -> None:
    split = text2sql_split(COLLECTION / f"{name}.json", kind)
    assert tuple(split.counts().values()) == sizes
    everything = split.train + split.dev + split.test
    variables = {
        variable["name"]
        for query in json.loads((COLLECTION / f"{name}.json").read_text())
        for variable in query["variables"]
    }
    # One question of atis and one query of imdb name a variable that the file gives no value.
    filled = [e for e in everything if not variables & {*re.findall(r"\w+", f"{e.source} {e.target}")}]
    assert len(everything) - len(filled) == (name in ("atis", "imdb"))
    spec = ProgramSpec(language="sql")
    assert all(spec.tree(program) for program in {example.target for example in everything[::10]})


@pytest.mark.skipif(not GEOGRAPHY.is_dir(), reason=f"no Geography data at {GEOGRAPHY}")
def test_geography_runs_on_its_database() -> None:
    query, question = (text2sql_split(GEOGRAPHY / "geography.json", kind) for kind in ("query", "question"))
    assert query.counts() == {"train": 536, "dev": 159, "test": 182}
    assert question.counts() == {"train": 549, "dev": 49, "test": 279}
    everything = query.train + query.dev + query.test
    assert len({example.id for example in everything}) == 877
    assert set(everything) == set(question.train + question.dev + question.test)
    assert not any("_name0" in example.source + example.target for example in everything)
    with closing(sqlite3.connect(f"file:{GEOGRAPHY / 'geography.sqlite'}?mode=ro", uri=True)) as database:
        failing = [example.id for example in everything if not _runs(database, example.target)]
    # Two queries of the public file itself are beyond SQLite: a column out of scope, and ALL.
    assert sorted(failing) == ["222-0", "38-0", "38-1", "38-2", "38-3"]


def _runs(database: sqlite3.Connection, sql: str) -> bool:
    try:
        database.execute(sql).fetchall()
    except sqlite3.Error:
        return False
    return True
