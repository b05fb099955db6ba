"""Coverage of our retriever beside every plain selector and the oracle, over splits and seeds.

    python benchmarks/quality.py --task geoquery --data ../shared/data --out quality.json

Each (split, seed) is an ordinary run of the trainer under runs/quality/, so an interrupted benchmark goes on where it
stopped. Settings are the defaults of the encoder family unless `_settings` says otherwise; they were chosen on
development queries. The file maps split → seed → figures on the test queries, coverage in percent; a Markdown table of
means and spreads goes to standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import COVR, PLAIN, cell, limit_threads, parser, run_or_read, settings_of

SPLITS = {
    "geoquery": ("standard", "template_1", "tmcd_1", "length_1", "template_2", "tmcd_2"),
    "covr": COVR,
    "geography_sql": ("query",),
}
FOLDER = Path("runs/quality")


def run_one(task: str, split: str, seed: int, data: Path, threads: int, family: str) -> dict[str, Any]:
    """Train and evaluate one (split, seed), or read what an earlier call left.

    Returns:
        The figures of `_figures`.
    """
    from rcr_trainer.evaluation import EvaluationReport

    named = "" if family == "embeddings" else f"-{family}"
    run = run_or_read(FOLDER / f"{task}-{split}-{seed}{named}", seed, threads, _settings(task, split, data, family))
    return _figures(EvaluationReport.read(run.path))


def _settings(task: str, split: str, data: Path, family: str) -> dict[str, Any]:
    if task == "geography_sql":
        settings: dict[str, Any] = {
            "data": {"task": "files", "directory": str(_geography(data, split))},
            "program": {"language": "sql"},
        }
    else:
        settings = settings_of(task, split, data, FOLDER / "splits")
    if family != "embeddings":
        # The number of epochs that `settings_of` gives is for gradient descent on text encoders.
        sft = {key: value for key, value in settings.get("sft", {}).items() if key != "epochs"}
        settings = {**settings, "sft": sft, "model": {"family": family}}
    return settings


def _geography(data: Path, kind: str) -> Path:
    """The split folder of Geography with SQL, made once."""
    from rcr_trainer.data import geography_split, write_split

    folder = FOLDER / "splits" / f"geography_sql-{kind}"
    if not (folder / "split.json").is_file():
        write_split(folder, geography_split(data / "geography_sql" / "geography.json", kind))
    return folder


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
            cells = [cell([row["selectors"][name][metric] for row in seeds.values()]) for name in names]
            lines.append(f"| {split} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    gaps = ["| split | best plain | ours | difference | share of the gap to the oracle |", "|---" * 5 + "|"]
    for split, seeds in results.items():
        rows = list(seeds.values())
        difference = [row["ours"] - row["best_plain"] for row in rows]
        closed = [row["gap_closed"] for row in rows if row["gap_closed"] is not None]
        gaps.append(
            f"| {split} | {cell([row['best_plain'] for row in rows])} ({rows[0]['best_plain_name']}) "
            f"| {cell([row['ours'] for row in rows])} | {cell(difference)} | {cell(closed, 2)} |"
        )
    return "\n\n".join([*blocks, "\n".join(gaps)])


def main() -> int:
    """Run the benchmark from the command line."""
    flags = parser(__doc__, threads=2)
    flags.add_argument("--task", choices=tuple(SPLITS), required=True)
    flags.add_argument("--family", default="structure", help="encoder family (default structure)")
    arguments = flags.parse_args()
    splits = arguments.splits.split(",") if arguments.splits else SPLITS[arguments.task]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    limit_threads(arguments.threads)
    from langchain_rcr.errors import RCRError
    from langchain_rcr.files import write_json

    results: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for split in splits:
            for seed in seeds:
                figures = run_one(arguments.task, split, seed, arguments.data, arguments.threads, arguments.family)
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
