"""Geography with SQL: GeoQuery's questions with queries that run on the public SQLite database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rcr_trainer.data.examples import PARTS, Example, Split, read_json_file
from rcr_trainer.errors import ConfigError, DataError

KINDS = ("query", "question")


def geography_split(json_path: str | Path, kind: str = "query") -> Split:
    """Read geography.json of the text2sql-data collection, its variables filled in, in its own split.

    Args:
        json_path: the file.
        kind: ``question`` divides questions at random; ``query`` keeps all questions of a query on one side
            (Finegan-Dollak et al., 2018), so that test asks for queries never seen.

    Returns:
        The split. A question with several queries has the first of the file's list. An id is the place of the
        query in the file and that of the question among the query's, as ``12-3``, in both kinds of split.

    Raises:
        ConfigError: no such kind.
        DataError: the file is missing or not of that form.
    """
    path = Path(json_path)
    if kind not in KINDS:
        raise ConfigError(f"there is no Geography split {kind!r}; the splits are {', '.join(KINDS)}")
    queries = read_json_file(path)
    if not isinstance(queries, list) or not queries:
        raise DataError(f"{path}: must hold one JSON list of queries with their sentences")
    parts: dict[str, list[Example]] = {part: [] for part in PARTS}
    for number, query in enumerate(queries):
        try:
            for part, example in _examples(number, query, kind):
                parts[part].append(example)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(f"{path}: query {number} isn't of the text2sql-data form ({error!r})") from error
    meta = {"task": "geography_sql", "split": kind, "how": f"the {kind}-split of {path.name}"}
    return Split(f"geography-sql-{kind}", parts["train"], parts["dev"], parts["test"], meta)


def _examples(number: int, query: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Example]]:
    sql = query["sql"][0]
    for place, sentence in enumerate(query["sentences"]):
        part = query["query-split"] if kind == "query" else sentence["question-split"]
        values = sentence["variables"]
        yield part, Example(f"{number}-{place}", _filled(sentence["text"], values), _filled(sql, values))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with every variable replaced at once, so that no value is taken for a variable."""
    return re.sub(r"\b[a-z_]+\d+\b", lambda match: values.get(match[0], match[0]), text)
