"""What the benchmarks share: the settings of a split, runs that are continued or read, cells of tables."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rcr_trainer.data import Split
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.runs import Run

FOLDED = ("academic", "imdb", "yelp")
"""The text2sql-data files with folds: a run's seed is its fold of test."""
COVR = ("8", "25", "34", "43", "48", "51", "99", "100", "110", "115")


def parser(description: str | None, *, threads: int) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--splits", help="comma-separated; default: those of docs/results.md")
    made.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    made.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder with geoquery/, text2sql/ (not for covr)"
    )
    made.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default {threads})")
    made.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return made


def limit_threads(threads: int) -> None:
    """Limit the threads of linear algebra; to be called before numpy is imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))


def settings_of(task: str, split: str, data: Path, drawn: Path, seed: int = 0) -> dict[str, Any]:
    """The settings of the `embeddings` family for a split, as far as they differ from the defaults.

    Args:
        task: geoquery, covr or text2sql.
        split: `standard`, `template_1`, `tmcd_2`, … (published ids where `data` has them, else drawn with the number
            as seed), the number of a COVR split, or the name of a text2sql-data file, whose query split is taken.
        data: folder with `geoquery/corpus.xml` and `geoquery/splits/`, or with
            `text2sql/*.json` and `geography_sql/geography.json`.
        drawn: folder for the splits that are drawn or converted.
        seed: of the run; where a text2sql-data file has folds, that of test.

    Raises:
        ConfigError: no such split.
    """
    from rcr_trainer.data import geoquery_split, text2sql_split

    where: dict[str, Any]
    if task == "covr":
        # 8 epochs of 2,800 queries: development coverage gains less than half a point after them.
        return {"data": {"task": "covr", "split": split}, "model": {"family": "embeddings"}, "sft": {"epochs": 8}}
    if task == "text2sql":
        file = data / ("geography_sql" if split == "geography" else "text2sql") / f"{split}.json"
        fold = seed if split in FOLDED else None
        folder = drawn / (f"text2sql-{split}" if fold is None else f"text2sql-{split}-{fold}")
        where = {"task": "files", "directory": str(_made(folder, lambda: text2sql_split(file, fold=fold)))}
        return {"data": where, "program": {"language": "sql"}, "model": {"family": "embeddings"}}
    if not re.fullmatch(r"standard|(template|tmcd|length)(_\d+)?", split):
        from rcr_trainer.errors import ConfigError

        msg = f"unknown GeoQuery split '{split}'"
        raise ConfigError(msg)
    kind, _, number = split.partition("_")
    corpus, ids = data / "geoquery" / "corpus.xml", data / "geoquery" / "splits" / f"{split}.json"
    where = {"task": "geoquery", "split": kind}
    if ids.is_file():
        where |= {"corpus": str(corpus), "ids": str(ids)}
    else:
        seed = int(number or 0)
        folder = _made(drawn / f"geoquery-{kind}-{seed}", lambda: geoquery_split(corpus, kind, seed=seed))
        where = {"task": "geoquery", "directory": str(folder)}
    # The standard split is i.i.d.: most test programs are in the pool, so training queries may get their own, too.
    return {"data": where, "model": {"family": "embeddings"}, "sft": {"exclude_own_program": kind != "standard"}}


def _made(folder: Path, split: Callable[[], Split]) -> Path:
    """A split folder, made once."""
    from rcr_trainer.data import write_split

    if not (folder / "split.json").is_file():
        write_split(folder, split())
    return folder


def run_or_read(folder: Path, seed: int, threads: int, settings: Mapping[str, Any], until: str = "evaluation") -> Run:
    """A finished run in a folder: what an earlier call left under the same settings is continued, else done anew.

    Args:
        folder: of the run.
        seed: of the run.
        threads: CPU threads; others leave a run what it is.
        settings: what else differs from the defaults.
        until: the last stage.
    """
    from rcr_trainer import pipeline
    from rcr_trainer.layers import differences
    from rcr_trainer.runs import Run
    from rcr_trainer.settings import Settings

    config = Settings.model_validate(
        {
            "name": folder.name,
            "output": str(folder),
            "seed": seed,
            "threads": threads,
            "tensorboard": False,
            **settings,
        }
    )
    stale = (folder / "config.yaml").is_file() and bool(
        differences(Run.open(folder).config, config, ignore=("threads",))
    )
    return pipeline.run(config, until=until, resume=True, overwrite=stale)


def compared(report: EvaluationReport) -> dict[str, Any]:
    """Coverage of ours, of the best plain selector and of the oracle, %, and the share of the gap between these two.

    Args:
        report: with rcr, a plain selector and the oracle.
    """
    name, best = report.best_plain()
    ours, oracle = report.selectors["rcr"].coverage, report.oracle.coverage
    return {
        "best_plain": round(best, 2),
        "best_plain_name": name,
        "ours": round(ours, 2),
        "oracle": round(oracle, 2),
        "gap_closed": round((ours - best) / (oracle - best), 4) if oracle > best else None,
    }


def print_table(arguments: argparse.Namespace, splits: Sequence[str], work: Callable[[str, int], str]) -> int:
    """The main loop of a benchmark: every seed of every split, then the table of the last; the exit status.

    Args:
        arguments: those of `parser`.
        splits: what is run where the arguments name none.
        work: computes a (split, seed), writes the file and returns the table of all up to there.
    """
    limit_threads(arguments.threads)
    from langchain_rcr.errors import RCRError

    table = ""
    try:
        for split in arguments.splits.split(",") if arguments.splits else splits:
            for seed in map(int, arguments.seeds.split(",")):
                table = work(split, seed)
    except RCRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    return 0


def cell(values: Sequence[float], digits: int = 1, *, sign: bool = False) -> str:
    """Mean ± standard deviation; without the latter for a single value."""
    if not values:
        return "–"
    plus = "+" if sign else ""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{plus}.{digits}f}{spread}"
