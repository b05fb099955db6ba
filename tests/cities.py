"""A small SQLite database of cities, and what a reward makes of pairs of programs."""

import sqlite3
from pathlib import Path
from typing import Any


def city_database(folder: Path) -> Path:
    """A file in this folder, with one table of three rows."""
    path = folder / "a b?.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE city (name TEXT, people INT, area REAL);"
        "INSERT INTO city VALUES ('austin', 3, 0.1), ('boston', 2, 0.2), ('paris', 2, NULL);"
    )
    connection.close()
    return path


def rewards(reward: Any, *pairs: tuple[str | None, str]) -> Any:
    """The rewards of pairs (prediction, gold program)."""
    predictions, references = zip(*pairs, strict=True)
    return reward(predictions, references, queries=[""] * len(pairs), contexts=[[]] * len(pairs))
