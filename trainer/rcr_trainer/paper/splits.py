"""The splits of the tables, by their names on the command line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import atomic_directory
from rcr_trainer.data.examples import Split, write_split
from rcr_trainer.data.geoquery import PUBLISHED, download_geoquery, published_ids
from rcr_trainer.data.spider import spider_split
from rcr_trainer.data.text2sql import text2sql_split
from rcr_trainer.errors import ConfigError, DataError

GEOQUERY = tuple(name if name == "standard" else f"csl_{name}" for name in PUBLISHED)
"""The paper's eight: all but the standard one are from google-research/language, language/compgen/csl."""
COVR = tuple(f"covr-{number}" for number in (8, 25, 34, 43, 48, 51, 99, 100, 110, 115))
FOLDED = ("academic", "imdb", "yelp")  # the text2sql-data files with folds: a run's seed is its test fold


def named_splits(text: str) -> list[str]:
    """The splits in a list with commas; `geoquery`, `csl`, `covr` stand for all of theirs, `template_1` for csl's."""
    groups = {"geoquery": GEOQUERY, "csl": GEOQUERY[1:], "covr": COVR}
    groups |= {name.removeprefix("csl_"): (name,) for name in GEOQUERY}
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not words:
        raise ConfigError(f"--splits '{text}' names no split: give some, such as {GEOQUERY[0]},{GEOQUERY[1]}")
    return list(dict.fromkeys(split for word in words for split in groups.get(word, (word,))))


def split_settings(split: str, data: Path, made: Path, seed: int = 0) -> dict[str, Any]:
    """The settings that say which data a run works on.

    Args:
        split: for GeoQuery `standard`, `csl_template_1`, … (the paper's); for COVR `covr-110`; `text2sql-NAME` for the
            query split of a text2sql-data file; for Spider-SSP `spider-template_1`, ….
        data: folder with `geoquery/corpus.xml`, `geoquery/splits/standard.json` and `geoquery/splits_csl/`, which are
            downloaded if missing, or with `text2sql/*.json` and `geography_sql/geography.json`, or with `spider/`
            (`spider_split`).
        made: folder for converted splits.
        seed: of the run; for a text2sql-data file with folds, the test fold.

    Raises:
        ConfigError: no such split.
        DataError: its files can't be read or downloaded.
    """
    if re.fullmatch(r"covr-\d+", split):
        where = {"task": "covr", "split": split.removeprefix("covr-")}
        return {"data": where, "grpo": {"exclude_own_program": True}}
    if split.startswith("text2sql-"):
        name = split.removeprefix("text2sql-")
        file = data / ("geography_sql" if name == "geography" else "text2sql") / f"{name}.json"
        fold = seed if name in FOLDED else None
        folder = made / (split if fold is None else f"{split}-{fold}")
        where = {"task": "files", "directory": str(_made(folder, lambda: text2sql_split(file, fold=fold)))}
        return {"data": where, "program": {"language": "sql"}}
    if split.startswith("spider-"):
        source, kind = data / "spider", split.removeprefix("spider-")
        databases = _unpacked(source / "database", made / "spider")
        folder = _made(made / split, lambda: spider_split(source, kind, databases))
        asked = {"prompt": {"name": "sql"}, "reward": {"database": str(databases)}}
        where = {"task": "files", "directory": str(folder)}
        return {"data": where, "program": {"language": "sql:sqlite"}, **asked}
    if split not in GEOQUERY:
        raise ConfigError(
            f"unknown split '{split}': {', '.join(GEOQUERY)}, covr-NUMBER, text2sql-NAME, spider-template_1 and so on; "
            "geoquery, csl or covr for all"
        )
    folder, name = data / "geoquery", split.removeprefix("csl_")
    try:
        corpus = download_geoquery(folder / "corpus.xml")
        ids = published_ids(folder, name)
    except DataError as error:
        raise DataError(f"{error}; --data FOLDER takes them from a folder, as {folder} would be") from error
    own = {"exclude_own_program": split != "standard"}  # standard is i.i.d.: most test programs are in the pool
    where = {"task": "geoquery", "split": name.partition("_")[0], "corpus": str(corpus), "ids": str(ids)}
    return {"data": where, "sft": own, "grpo": own}


def _unpacked(folder: Path, into: Path) -> Path:
    """A folder, or the contents of its archive `folder.tar.xz`, unpacked once."""
    archive, made = folder.with_name(f"{folder.name}.tar.xz"), into / folder.name
    if folder.is_dir() or not archive.is_file():
        return folder
    if not made.is_dir():
        with atomic_directory(into) as fresh:
            shutil.unpack_archive(archive, fresh, filter="data")
    return made


def _made(folder: Path, split: Callable[[], Split]) -> Path:
    """A split folder, created once."""
    if not (folder / "split.json").is_file():
        write_split(folder, split())
    return folder
