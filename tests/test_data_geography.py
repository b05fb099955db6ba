from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rcr_trainer.data import Example, geography_split
from rcr_trainer.errors import ConfigError, DataError

DATA = Path(os.environ.get("RCR_DATA", Path(__file__).parents[2] / "shared" / "data")) / "geography_sql"

QUERIES = [
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


def test_variables_are_filled_in_at_once(tmp_path: Path) -> None:
    path = tmp_path / "geography.json"
    path.write_text(json.dumps(QUERIES))
    first = Example("0-0", "state_name1 or ohio", 'SELECT a FROM t WHERE n = "state_name1" OR n = "ohio" ;')
    by_query, by_question = geography_split(path), geography_split(path, "question")
    assert [example.id for example in by_query.train] == ["0-0", "0-1"]
    assert by_query.train[0] == first
    assert by_query.test == []
    assert by_question.test == [first]
    assert by_question.dev[0].source == "no variable1 here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON file"),
        ("[]", "must hold one JSON list"),
        ("[1]", "query 0 isn't"),
        ('[{"sql": []}]', "query 0"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "geography.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        geography_split(path)


def test_missing_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"can't read .*nowhere\.json"):
        geography_split(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="no Geography split 'template'; the splits are query, question"):
        geography_split(tmp_path / "nowhere.json", "template")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no Geography data at {DATA}")
def test_the_public_file() -> None:
    query, question = (geography_split(DATA / "geography.json", kind) for kind in ("query", "question"))
    assert query.counts() == {"train": 536, "dev": 159, "test": 182}
    assert question.counts() == {"train": 549, "dev": 49, "test": 279}
    everything = query.train + query.dev + query.test
    assert len({example.id for example in everything}) == 877
    assert set(everything) == set(question.train + question.dev + question.test)
    assert not any("_name0" in example.source + example.target for example in everything)
    with closing(sqlite3.connect(f"file:{DATA / 'geography.sqlite'}?mode=ro", uri=True)) as database:
        failing = [example.id for example in everything if not _runs(database, example.target)]
    # Two queries of the public file itself are beyond SQLite: a column out of scope, and ALL.
    assert sorted(failing) == ["222-0", "38-0", "38-1", "38-2", "38-3"]


def _runs(database: sqlite3.Connection, sql: str) -> bool:
    try:
        database.execute(sql).fetchall()
    except sqlite3.Error:
        return False
    return True
