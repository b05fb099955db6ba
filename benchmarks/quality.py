"""Coverage of our retriever beside every plain selector and the oracle, over splits and seeds.

    python benchmarks/quality.py --task geoquery --data ../shared/data --out quality.json

Each (split, seed) is an ordinary run of the trainer under runs/quality/, so an interrupted benchmark goes on where it
stopped. Settings are the defaults of `rcr-train` unless `settings_of` says otherwise; they were chosen on development
queries. The file maps split → seed → figures on the test queries, coverage in percent; a Markdown table of means and
spreads goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PUBLISHED = ("standard", "template_1", "tmcd_1", "length_1")
COVR = ("8", "25", "34", "43", "48", "51", "99", "100", "110", "115")
PLAIN = ("random", "fixed", "bm25", "dense", "mmr")


def settings_of(task: str, split: str, seed: int, data: Path) -> dict[str, Any]:
    """The settings of one run that differ from the defaults.

    Args:
        task: geoquery or covr.
        split: `standard`, `template_1`, `tmcd_2`, … (published ids where `data` has them, else drawn with the number
            as seed), or the number of a COVR split.
        seed: of the run; for COVR also of the sample.
        data: folder with `geoquery/corpus.xml` and `geoquery/splits/`.
    """
    if task == "covr":
        # 8 epochs of 2,800 queries: development coverage gains less than half a point after them.
        return {"data": {"task": "covr", "split": split}, "sft": {"epochs": 8}}
    kind, _, number = split.partition("_")
    corpus, ids = data / "geoquery" / "corpus.xml", data / "geoquery" / "splits" / f"{split}.json"
    where: dict[str, Any] = {"task": "geoquery", "split": kind}
    if ids.is_file():
        where |= {"corpus": str(corpus), "ids": str(ids)}
    else:
        where = {"task": "geoquery", "directory": str(_drawn(corpus, kind, int(number or 0)))}
    # The standard split is i.i.d.: most test programs are in the pool, so training queries may get their own, too.
    return {"data": where, "sft": {"exclude_own_program": kind != "standard"}}


def _drawn(corpus: Path, kind: str, number: int) -> Path:
    """A split folder drawn by the procedure with `number` as seed, made once."""
    from rcr_trainer.data import geoquery_split, write_split

    folder = Path("runs/quality/splits") / f"geoquery-{kind}-{number}"
    if not (folder / "split.json").is_file():
        write_split(folder, geoquery_split(corpus, kind, seed=number))
    return folder


def run_one(task: str, split: str, seed: int, data: Path, threads: int) -> dict[str, Any]:
    """Train and evaluate one (split, seed), or read what an earlier call left.

    Returns:
        The figures of `_figures`.
    """
    from rcr_trainer import pipeline
    from rcr_trainer.config import Config
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.runs import Run

    folder = Path("runs/quality") / f"{task}-{split}-{seed}"
    config = Config.model_validate(
        {
            "name": folder.name,
            "output": str(folder),
            "seed": seed,
            "threads": threads,
            "tensorboard": False,
            **settings_of(task, split, seed, data),
        }
    )
    # What an earlier call left under the same settings is continued or read; under others it is done anew.
    stale = (folder / "config.yaml").is_file() and Run.open(folder).config != config
    run = pipeline.run(config, resume=True, overwrite=stale)
    return _figures(EvaluationReport.read(run.path))


def _figures(report: Any) -> dict[str, Any]:
    name, best = report.best_plain(PLAIN)
    ours, oracle = report.selectors["rcr"].coverage, report.selectors["oracle"].coverage
    return {
        "best_plain": round(best, 2),
        "best_plain_name": name,
        "ours": round(ours, 2),
        "oracle": round(oracle, 2),
        "gap_closed": round((ours - best) / (oracle - best), 4) if oracle > best else None,
        "selectors": {
            selector: {
                "coverage": round(scores.coverage, 2),
                "full_coverage": round(scores.full_coverage, 2),
                "duplicate_rate": round(scores.duplicate_rate, 2),
            }
            for selector, scores in report.selectors.items()
        },
    }


def markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Tables for docs/results.md: coverage, then full coverage and duplicates, mean ± spread over the seeds."""
    names = list(next(iter(next(iter(results.values())).values()))["selectors"])
    blocks = []
    for metric, title in (
        ("coverage", "Coverage"),
        ("full_coverage", "Full coverage"),
        ("duplicate_rate", "Queries with a program picked twice"),
    ):
        lines = [f"| {title}, % | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for split, seeds in results.items():
            cells = [_cell([row["selectors"][name][metric] for row in seeds.values()]) for name in names]
            lines.append(f"| {split} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    gaps = ["| split | best plain | ours | difference | share of the gap to the oracle |", "|---" * 5 + "|"]
    for split, seeds in results.items():
        rows = list(seeds.values())
        difference = [row["ours"] - row["best_plain"] for row in rows]
        closed = [row["gap_closed"] for row in rows if row["gap_closed"] is not None]
        gaps.append(
            f"| {split} | {_cell([row['best_plain'] for row in rows])} ({rows[0]['best_plain_name']}) "
            f"| {_cell([row['ours'] for row in rows])} | {_cell(difference)} | {_cell(closed, 2)} |"
        )
    return "\n\n".join([*blocks, "\n".join(gaps)])


def _cell(values: list[float], digits: int = 1) -> str:
    if not values:
        return "–"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=("geoquery", "covr"), required=True)
    parser.add_argument("--splits", help="comma-separated; default: the published ones")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder with geoquery/ (not for covr)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.task == "geoquery" and arguments.data is None:
        parser.error("--task geoquery needs --data")
    splits = arguments.splits.split(",") if arguments.splits else PUBLISHED if arguments.task == "geoquery" else COVR
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(arguments.threads))
    from langchain_rcr.errors import RCRError
    from langchain_rcr.files import write_json

    results: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for split in splits:
            if arguments.task == "geoquery" and not re.fullmatch(r"standard|(template|tmcd|length)(_\d+)?", split):
                parser.error(f"unknown GeoQuery split '{split}'")
            for seed in seeds:
                figures = run_one(arguments.task, split, seed, arguments.data or Path(), arguments.threads)
                results.setdefault(split, {})[str(seed)] = figures
                brief = {key: value for key, value in figures.items() if key != "selectors"}
                print(f"{split} seed {seed}: {json.dumps(brief)}", file=sys.stderr, flush=True)
                write_json(arguments.out, results)
    except RCRError as error:
        print(f"quality: error: {error}", file=sys.stderr)
        return 2
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
