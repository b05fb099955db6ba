"""The text2sql-data collection: ATIS, Scholar, Geography, Academic, IMDB, Yelp (Finegan-Dollak et al., ACL 2018)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from rcr_trainer.data.examples import PARTS, Example, Split, read_json_as
from rcr_trainer.errors import ConfigError, DataError

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_Label = Annotated[str, StringConstraints(pattern=r"^(train|dev|test|exclude|0|[1-9][0-9]*)$")]


class _Variable(BaseModel):
    name: str
    example: str


class _Sentence(BaseModel):
    text: _Text
    variables: dict[str, str]
    label: _Label = Field(alias="question-split")


class _Query(BaseModel):
    sql: Annotated[list[_Text], Field(min_length=1)]
    sentences: list[_Sentence]
    variables: list[_Variable] = []
    label: _Label = Field(alias="query-split")


_File = Annotated[list[_Query], Field(min_length=1)]


def text2sql_split(
    json_path: str | Path, kind: Literal["query", "question"] = "query", fold: int | None = None
) -> Split:
    """Read a file of the collection with its variables filled in, in its own split.

    A file has train, dev and test, or numbered folds. Then one fold becomes test, the next one dev (the first follows
    the last), and the others train. Examples that the file excludes are left out.

    Args:
        json_path: the file.
        kind: ``question`` divides questions at random; ``query`` keeps all questions of a query on one side.
        fold: the fold that becomes test; None: fold 0, if there are folds.

    Returns:
        The split. If a question has several queries, the first counts. Ids such as ``12-3`` give the query's place in
        the file and the question's place among the query's.

    Raises:
        ConfigError: no such fold.
        DataError: the file is missing or not of that form; one line names the first fault.
    """
    path = Path(json_path)
    queries = read_json_as(_File, path, "the text2sql-data", "query ")
    labels = {each.label for query in queries for each in ([query] if kind == "query" else query.sentences)}
    part_of = _parts(labels - {"exclude"}, fold, path)
    parts: dict[str, list[Example]] = {part: [] for part in (*PARTS, "exclude")}
    for number, query in enumerate(queries):
        examples = {variable.name: variable.example for variable in query.variables}
        for place, sentence in enumerate(query.sentences):
            values = examples | sentence.variables  # some queries have values that the question doesn't name
            source, target = (_filled(text, values) for text in (sentence.text, query.sql[0]))
            label = query.label if kind == "query" else sentence.label
            parts[part_of.get(label, "exclude")].append(Example(f"{number}-{place}", source, target))
    name = kind + "".join(f"-{label}" for label, part in part_of.items() if part == "test" != label)
    meta = {"task": path.stem, "split": name, "how": f"the {kind} split of {path.name}"}
    return Split(f"{path.stem}-{name}", parts["train"], parts["dev"], parts["test"], meta)


def _parts(labels: Set[str], fold: int | None, path: Path) -> dict[str, str]:
    if labels <= set(PARTS):
        if fold is not None:
            raise ConfigError(f"{path.name} has no folds: leave out fold = {fold}")
        return {label: label for label in labels}
    if labels & set(PARTS):
        raise DataError(f"{path} mixes numbered folds with {', '.join(sorted(labels & set(PARTS)))}")
    folds = sorted(map(int, labels))
    test = fold or 0
    if test not in folds or len(folds) < 3:
        raise ConfigError(f"{path.name} has no fold {test} beside two more; its folds are {folds}")
    dev = folds[(folds.index(test) + 1) % len(folds)]
    return {str(each): {test: "test", dev: "dev"}.get(each, "train") for each in folds}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace all variables at once, so that no value is taken for a variable."""
    return re.sub(r"\b[a-z_]+\d+\b", lambda match: values.get(match[0], match[0]), text)
