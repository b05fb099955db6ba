"""The splits that the tables are over, by the names that the command line takes."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import atomic_directory
from rcr_trainer.data import Split, geoquery_split, spider_split, text2sql_split, write_split
from rcr_trainer.data.geoquery import PUBLISHED_DIVERGENCE
from rcr_trainer.errors import ConfigError, DataError
from rcr_trainer.settings import DataSettings
from rcr_trainer.tasks import download_corpus

GEOQUERY = ("standard", "template_1", "template_2", "template_3", "tmcd_1", "tmcd_2", "tmcd_3", "length_1")
CSL = (*(f"csl_{name}" for name in GEOQUERY[1:-1]), "csl_length")
"""The paper's own seven."""
COVR = tuple(f"covr-{number}" for number in (8, 25, 34, 43, 48, 51, 99, 100, 110, 115))
FOLDED = ("academic", "imdb", "yelp")
"""The text2sql-data files with folds: a run's seed is its fold of test."""


def named_splits(text: str) -> list[str]:
    """The splits of a comma-separated list, in which `geoquery`, `csl` and `covr` stand for all of theirs.

    Raises:
        ConfigError: it names none.
    """
    groups = {"geoquery": GEOQUERY, "csl": CSL, "covr": COVR}
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not words:
        raise ConfigError(f"--splits '{text}' names no split: give some, such as {GEOQUERY[0]},{GEOQUERY[1]}")
    return list(dict.fromkeys(split for word in words for split in groups.get(word, (word,))))


def split_settings(
    split: str, data: Path, drawn: Path, seed: int = 0, divergence: float | None = PUBLISHED_DIVERGENCE
) -> dict[str, Any]:
    """The settings of a run that say which data it works on.

    Args:
        split: of GeoQuery `standard`, `template_1`, `tmcd_2`, … (published where `data` has the ids; else drawn with
            the number as seed, from a corpus that is downloaded if it is missing) or `csl_template_1`, … (the paper's,
            published in google-research/language, language/compgen/csl), of COVR `covr-110`, or `text2sql-NAME` for
            the query split of a file of text2sql-data, or `spider-template_1`, … of Spider-SSP.
        data: folder with `geoquery/corpus.xml`, `geoquery/splits/` and `geoquery/splits_csl/`, or with
            `text2sql/*.json` and `geography_sql/geography.json`, or with `spider/` (`spider_split`).
        drawn: folder for the splits that are drawn or converted.
        seed: of the run; where a text2sql-data file has folds, that of test.
        divergence: of compounds, where a TMCD split is drawn (`geoquery_split`).

    Raises:
        ConfigError: no such split.
        DataError: its files can't be read.
    """
    if re.fullmatch(r"covr-\d+", split):
        # Of a test program those structures count that the pool has: each has some that no training program has.
        where = {"task": "covr", "split": split.removeprefix("covr-")}
        return {"data": where, "grpo": {"exclude_own_program": True}, "evaluation": {"gold": "pool"}}
    if split.startswith("text2sql-"):
        name = split.removeprefix("text2sql-")
        file = data / ("geography_sql" if name == "geography" else "text2sql") / f"{name}.json"
        fold = seed if name in FOLDED else None
        folder = drawn / (split if fold is None else f"{split}-{fold}")
        where = {"task": "files", "directory": str(_made(folder, lambda: text2sql_split(file, fold=fold)))}
        return {"data": where, "program": {"language": "sql"}}
    if split.startswith("spider-"):
        source, kind = data / "spider", split.removeprefix("spider-")
        databases = _unpacked(source / "database", drawn / "spider")
        folder = _made(drawn / split, lambda: spider_split(source, kind, databases))
        asked = {"prompt": {"name": "sql"}, "reward": {"database": str(databases)}}
        return {"data": {"task": "files", "directory": str(folder)}, "program": {"language": "sql:sqlite"}, **asked}
    known = re.fullmatch(r"(csl_)?(standard|template|tmcd|length)(?:_(\d+))?", split)
    if known is None or (known[1] and split not in CSL):
        raise ConfigError(
            f"unknown split '{split}': {', '.join(GEOQUERY)}, csl_ before the last seven, covr-NUMBER or "
            "text2sql-NAME, spider-template_1 and so on; geoquery, csl or covr for all"
        )
    published, kind, number = known.groups()
    corpus = data / "geoquery" / "corpus.xml"
    ids = data / "geoquery" / ("splits_csl" if published else "splits") / f"{split.removeprefix('csl_')}.json"
    if published and not ids.is_file():
        raise DataError(f"{ids} is missing: it holds the ids of {split}")
    if ids.is_file():
        where = {"task": "geoquery", "split": kind, "corpus": str(corpus), "ids": str(ids)}
    else:
        drawn_by = int(number or 0)
        other = "" if kind != "tmcd" or divergence == PUBLISHED_DIVERGENCE else f"-divergence-{divergence or 'null'}"
        folder = drawn / f"geoquery-{kind}-{drawn_by}{other}"
        _made(folder, lambda: geoquery_split(_corpus(corpus), kind, seed=drawn_by, divergence=divergence))
        where = {"task": "geoquery", "directory": str(folder)}
    own = {"exclude_own_program": kind != "standard"}  # which is i.i.d.: most test programs are in the pool
    return {"data": where, "sft": own, "grpo": own}


def origin(data: DataSettings) -> str:
    """Where the split of such settings is from: "published", "drawn", or "sampled" from COVR's grammar."""
    if data.task == "covr":
        return "sampled"
    return "drawn" if data.task == "geoquery" and data.ids is None else "published"


def _corpus(path: Path) -> Path:
    """GeoQuery's corpus, downloaded if it is missing."""
    try:
        return download_corpus(path)
    except DataError as error:
        raise DataError(f"{error}; or give --data FOLDER with geoquery/corpus.xml") from error


def _unpacked(folder: Path, into: Path) -> Path:
    """A folder, or what its archive holds, `folder.tar.xz`, unpacked once."""
    archive, made = folder.with_name(f"{folder.name}.tar.xz"), into / folder.name
    if folder.is_dir() or not archive.is_file():
        return folder
    if not made.is_dir():
        with atomic_directory(into) as fresh, tarfile.open(archive) as packed:
            packed.extractall(fresh, filter="data")
    return made


def _made(folder: Path, split: Callable[[], Split]) -> Path:
    """A split folder, made once."""
    if not (folder / "split.json").is_file():
        write_split(folder, split())
    return folder
