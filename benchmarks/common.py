"""What the benchmarks share: the settings of a split, runs that are continued or read."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.runs import Run


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
        split: as `rcr_trainer.paper.split_settings` takes it, of COVR and text2sql-data without the task in front.
        data: folder of the corpora.
        drawn: folder for the splits that are drawn or converted.
        seed: of the run; where a text2sql-data file has folds, that of test.

    Raises:
        ConfigError: no such split.
    """
    from rcr_trainer.paper import split_settings

    settings = split_settings(split if task == "geoquery" else f"{task}-{split}", data, drawn, seed)
    settings.pop("evaluation", None)
    if task == "covr":
        # 8 epochs of 2,800 queries: development coverage gains less than half a point after them.
        settings["sft"] = {"epochs": 8}
    return {**settings, "model": {"family": "embeddings"}}


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
    from rcr_trainer.layers import checked

    own = {"name": folder.name, "output": str(folder), "seed": seed, "threads": threads, "tensorboard": False}
    return pipeline.resumed(checked({**own, **settings}), until)


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
    """`rcr_trainer.paper.results.cell`, whose import has to wait until threads are limited."""
    from rcr_trainer.paper.results import cell

    return cell(values, digits, sign=sign)
