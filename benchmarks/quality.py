"""Coverage of our retriever beside every plain selector and the oracle, over splits and seeds.

    python benchmarks/quality.py --task geoquery --data ../shared/data --out quality.json

Each (split, seed) is an ordinary run of the trainer under runs/quality/, so an interrupted benchmark goes on where it
stopped. Settings are the defaults of the encoder family unless `run_settings` says otherwise; they were chosen on
development queries. On COVR only those structures of the gold programs count that the pool has. Of text2sql-data the
query splits are taken; academic, imdb and yelp have ten folds, and a run's seed is its fold of test. Exact match is
simulated: `StructureBoundLLM` with its defaults (it answers right where the picks show every structure of up to two
nodes), which is no language model.

The best plain selector is that of a split, over all its seeds or folds; the share of the gap is that of their means.
The file maps split → seed → figures on the test queries, rates in percent; `sft_seconds` are those of the whole SFT
stage, the frozen model's reading of pool and queries included (of an interrupted stage: since it was last continued).
Markdown tables of means and spreads go to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import COVR, cell, compared, parser, print_table, run_or_read, settings_of

SPLITS = {
    "geoquery": ("standard", "template_1", "tmcd_1", "length_1", "template_2", "tmcd_2"),
    "covr": COVR,
    "text2sql": ("scholar", "atis", "geography", "academic", "imdb", "yelp"),
}
FOLDER = Path("runs/quality")
METRICS = {
    "coverage": "Coverage, %",
    "full_coverage": "Full coverage, %",
    "specific_coverage": "Specific coverage, %",
    "label_complete": "Label-complete queries, %",
    "implied_shown": "Queries with implied values that the picks show, %",
    "exact_match": "Simulated exact match, %",
    "duplicate_rate": "Queries with a program picked twice, %",
    "hub_share": "Part of the picks that are the ten most picked examples, %",
    "prompt_length": "Characters of the picks",
}
GAINS = ("full_coverage", "specific_coverage", "exact_match")
"""Metrics in which ours stands beside the plain selector that is best in that metric."""


def run_one(task: str, split: str, seed: int, data: Path, threads: int, family: str) -> dict[str, Any]:
    """Train and evaluate one (split, seed), or read what an earlier call left.

    Returns:
        The figures of `figures`.
    """
    from rcr_trainer.evaluation import EvaluationReport

    named = "" if family == "embeddings" else f"-{family}"
    settings = run_settings(task, split, seed, data, family)
    run = run_or_read(FOLDER / f"{task}-{split}-{seed}{named}", seed, threads, settings)
    record = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
    return {**figures(EvaluationReport.read(run.path)), "sft_seconds": record["stages"]["sft"]["seconds"]}


def run_settings(task: str, split: str, seed: int, data: Path, family: str) -> dict[str, Any]:
    """The settings of a run, as in its YAML."""
    settings = settings_of(task, split, data, FOLDER / "splits", seed)
    if family != "embeddings":
        # The number of epochs that `settings_of` gives is for gradient descent on text encoders.
        sft = {key: value for key, value in settings.get("sft", {}).items() if key != "epochs"}
        settings = {**settings, "sft": sft}
    if task == "covr":
        settings["evaluation"] = {"gold": "pool"}
    return {**settings, "model": {"family": family}, "llm": {"kind": "simulator"}}


def figures(report: Any) -> dict[str, Any]:
    """What the tables need of a report."""
    return {
        **compared(report),
        "selectors": {
            selector: {name: round(value, 2) for name in METRICS if (value := getattr(scores, name)) is not None}
            for selector, scores in report.selectors.items()
        },
    }


# ---------------------------------------------------------------- Markdown


def markdown(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Tables for docs/results.md: a table for each metric, mean ± spread over the seeds, then what we gain.

    Args:
        results: split → seed → figures.
    """
    names = list(next(iter(next(iter(results.values())).values()))["selectors"])
    blocks = []
    shown = {metric for seeds in results.values() for row in seeds.values() for metric in row["selectors"]["rcr"]}
    for metric, title in METRICS.items():
        if metric not in shown:
            continue
        lines = [f"| {title} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for split, seeds in results.items():
            cells = [
                cell([row["selectors"][name][metric] for row in seeds.values() if metric in row["selectors"][name]])
                for name in names
            ]
            lines.append(f"| {split} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, _gains({split: list(seeds.values()) for split, seeds in results.items()})])


COLUMNS = {
    "best_plain": ("best plain", 1, False),
    "ours": ("ours", 1, False),
    "difference": ("difference", 1, True),
    "gap_closed": ("share of the gap to the oracle", 2, False),
    **{
        f"{metric}_gain": (f"{METRICS[metric].lower().removesuffix(', %')}, ours − best plain in it", 1, True)
        for metric in GAINS
    },
    "sft_seconds": ("SFT stage, s", 0, False),
}
"""The columns of the last table: title, decimals, whether numbers have a sign."""


def _gains(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What ours has more than the best plain selector in each metric; the last row is of the splits' means."""
    titles = ["split", *(title for title, _, _ in COLUMNS.values())]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    means: dict[str, list[float]] = {key: [] for key in COLUMNS}
    for split, seeds in results.items():
        best, columns = _against_plain(seeds)
        cells = {}
        for key, (_, digits, sign) in COLUMNS.items():
            cells[key] = cell(columns[key], digits, sign=sign)
            means[key] += [mean(columns[key])] if columns[key] else []
        cells["best_plain"] += f" ({best})"
        lines.append(f"| {split} | " + " | ".join(cells.values()) + " |")
    lines.append("| mean of the splits | " + " | ".join(_over_splits(key, means[key]) for key in COLUMNS) + " |")
    return "\n".join(lines)


def _against_plain(seeds: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, list[float]]]:
    """The plain selector of the best coverage over all seeds, and the values of each column; of the gap one."""

    def of(name: str, metric: str) -> list[float]:
        return [row["selectors"][name][metric] for row in seeds]

    def gains(metric: str) -> tuple[str, list[float]]:
        best = max(plain, key=lambda name: mean(of(name, metric)))
        return best, [ours - its for ours, its in zip(of("rcr", metric), of(best, metric), strict=True)]

    plain = [name for name in seeds[0]["selectors"] if name not in ("rcr", "oracle")]
    best, differences = gains("coverage")
    left = mean(of("oracle", "coverage")) - mean(of(best, "coverage"))
    return best, {
        "best_plain": of(best, "coverage"),
        "ours": of("rcr", "coverage"),
        "difference": differences,
        "gap_closed": [mean(differences) / left] if left > 0 else [],
        **{f"{metric}_gain": gains(metric)[1] for metric in GAINS},
        "sft_seconds": [row["sft_seconds"] for row in seeds],
    }


def _over_splits(key: str, values: Sequence[float]) -> str:
    """Mean and worst of a column."""
    if not values:
        return "–"
    _, digits, sign = COLUMNS[key]
    word, worst = ("most", max(values)) if key == "sft_seconds" else ("least", min(values))
    return f"{cell([mean(values)], digits, sign=sign)} ({word} {cell([worst], digits, sign=sign)})"


def main() -> int:
    """Run the benchmark from the command line."""
    flags = parser(__doc__, threads=2)
    flags.add_argument("--task", choices=tuple(SPLITS), required=True)
    flags.add_argument("--family", default="structure", help="encoder family (default structure)")
    arguments = flags.parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {}

    def work(split: str, seed: int) -> str:
        from langchain_rcr.files import write_json

        figures = run_one(arguments.task, split, seed, arguments.data, arguments.threads, arguments.family)
        results.setdefault(split, {})[str(seed)] = figures
        brief = {key: value for key, value in figures.items() if key != "selectors"}
        print(f"{split} seed {seed}: {json.dumps(brief)}", file=sys.stderr, flush=True)
        write_json(arguments.out, results)
        return markdown(results)

    return print_table(arguments, SPLITS[arguments.task], work)


if __name__ == "__main__":
    sys.exit(main())
