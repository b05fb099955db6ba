"""Before and after GRPO, by advantage and by reward, over splits and seeds.

    python benchmarks/reinforcement.py --table gains --data ../shared/data --out gains.json

Tables: `gains`, `advantages` (the paper's Table 2) and `rewards` (its Table 6) on draws of GeoQuery's template split,
where a simulator stands for the language model; `covr` on COVR-10, with the small language model of this repository.
What they have in common is computed once: each (split, seed, column) is an ordinary run of the trainer under
runs/reinforcement/, so an interrupted benchmark goes on where it stopped, and those of a (split, seed) begin from the
same policy. With `--judge FOLDER`, a language model that had no part in training or choice answers the same picks, too.
The file holds the settings and split → seed → column → figures in percent; Markdown goes to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import COVR, cell, parser, print_table, run_or_read, settings_of
from rcr_trainer.baselines import get_baseline, names
from rcr_trainer.layers import merged

Cells = dict[str, dict[str, dict[str, dict[str, float]]]]
"""Split → seed → column → figures, in percent."""

# GeoQuery's were chosen on development queries; see docs/results.md.
SETTINGS: dict[str, dict[str, Any]] = {
    "geoquery": {
        "grpo": {"enabled": True, "lr": 1e-5, "epochs": 4},
        "llm": {"kind": "simulator", "simulator_size": 2},
        "evaluation": {"selectors": []},
    },
    "covr": {
        "model": {"family": "structure"},
        "sft": {"epochs": 0},
        "grpo": {"enabled": True, "epochs": 0, "search": 200},
        "reward": {"names": ["likelihood"]},
        "evaluation": {"gold": "pool", "selectors": ["bm25_coverage", "set_bsr", "oracle"]},
        "llm": {
            "kind": "local",
            "model": str(Path(__file__).parents[1] / "examples/models/covr-parser"),
            "max_tokens": 120,
            "batch_size": 32,
        },
    },
}

TEMPLATES = ("template_1", "template_2", "template_3")
WITHOUT = "w/o RL"
VARIANTS: dict[str, dict[str, Any]] = {
    "GRPO": {"evaluation": {"selectors": names()}},
    "NB": {"grpo": {"advantage": "nb"}},
    "ReMax": {"grpo": {"advantage": "remax"}},
    "RLOO": {"grpo": {"advantage": "rloo"}},
    "correctness": {"reward": {"names": ["correctness"]}},
}
"""Columns that are runs of their own, with what they change."""

TABLES = {
    "gains": ("GRPO",),
    "advantages": ("NB", "ReMax", "RLOO", "GRPO"),
    "rewards": ("GRPO", "correctness"),
    "covr": ("GRPO",),
}
TITLES = {"rewards": {"GRPO": "coverage reward", "correctness": "correctness reward"}}
COMPARED = ("gains", "covr")
"""Tables that also show the selectors that aren't trained."""


METRICS = {"coverage": "coverage", "exact_match": "exact match", "jaccard": "structure Jaccard"}
JUDGED = "exact match by "
"""Of the metrics of `--judge`; its folder follows."""


def run_one(arguments: Any, split: str, seed: int) -> dict[str, dict[str, float]]:
    """Train and evaluate the columns of one (split, seed), or read what an earlier call left: column → figures."""
    from rcr_trainer.evaluation import EvaluationReport

    task = task_of(arguments.table)
    where = settings_of(task, split, arguments.data, arguments.runs / "splits")
    common = merged(where, SETTINGS[task], {"evaluation": {"split": arguments.part}}, *arguments.set)
    folder = arguments.runs / f"{task}-{split}-{seed}"
    sft = run_or_read(Path(f"{folder}-sft"), seed, arguments.threads, before_grpo(common), until="sft")
    figures: dict[str, dict[str, float]] = {}
    for column in TABLES[arguments.table]:
        changes = VARIANTS[column] if task == "geoquery" else {}
        settings = merged(common, changes, {"sft": {"checkpoint": str(sft.path)}})
        run = run_or_read(Path(f"{folder}-{column.lower()}"), seed, arguments.threads, settings)
        for selector, scores in EvaluationReport.read(run.path).selectors.items():
            shown = {"rcr": column, "rcr_without_rl": WITHOUT}.get(selector, selector)
            if shown in (column, WITHOUT) or arguments.table in COMPARED:
                kept = {metric: getattr(scores, metric) for metric in METRICS}
                figures[shown] = {metric: value for metric, value in kept.items() if value is not None}
        figures[column]["as_before"] = float(fingerprint(run.checkpoint) == fingerprint(run.sft_checkpoint))
        for judge in arguments.judge:
            for selector, exact in judged(run, judge).items():
                shown = {"rcr": column, "rcr_without_rl": WITHOUT}.get(selector, selector)
                if shown in figures:
                    figures[shown][f"{JUDGED}{judge}"] = exact
    return figures


def judged(run: Any, judge: Path) -> dict[str, float]:
    """By selector, exact match (%) of a run's picks with the answers of another language model."""
    from rcr_trainer.data import read_split
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.evaluation.exact_match import Answerer
    from rcr_trainer.evaluation.picks import read_picks
    from rcr_trainer.tasks import divide, open_language_model

    llm = run.config.llm.model_copy(update={"model": str(judge)})
    config = run.config.model_copy(update={"llm": llm, "output": run.path})
    task = divide(config, read_split(run.path / "data"))
    report = EvaluationReport.read(run.path)
    with open_language_model(config, task) as model:
        answerer = Answerer(model.generate, model.name, model.prompt, queries=config.evaluation.answer_queries)
        answerer.answer_all(report, read_picks(run.path), task.spec)
    return {name: scores.exact_match for name, scores in report.selectors.items() if scores.exact_match is not None}


def task_of(table: str) -> str:
    """The task that a table is about."""
    return "covr" if table == "covr" else "geoquery"


def before_grpo(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of some settings those that the policy before GRPO depends on, so that one serves all columns."""
    kept = {name: settings[name] for name in ("data", "program", "model", "sft") if name in settings}
    queries = settings["grpo"].get("queries")
    if queries is None:
        return kept
    return {**kept, "grpo": {"enabled": True, "queries": queries}, "reward": {"names": ["context_coverage"]}}


def fingerprint(checkpoint: Path) -> str:
    """Of the weights in a checkpoint folder."""
    return str(json.loads((checkpoint / "tri_encoder.json").read_text(encoding="utf-8"))["fingerprint"])


def setting(text: str) -> dict[str, Any]:
    """SECTION.NAME=VALUE as settings."""
    import yaml

    path, _, value = text.partition("=")
    section, _, name = path.partition(".")
    return {section: {name: yaml.safe_load(value)}}


# ---------------------------------------------------------------- Markdown


def markdown(table: str, cells: Cells, part: str) -> str:
    """The table for each metric, and what the trained columns gain."""
    first = next(iter(next(iter(cells.values())).values()))
    names = [WITHOUT, *TABLES[table], *(name for name in first if name not in (WITHOUT, *TABLES[table]))]
    blocks = [_means(table, cells, names, metric, part) for metric in _metrics(cells)]
    return "\n\n".join([*blocks, _gains(table, cells, part)])


def _metrics(cells: Cells) -> list[str]:
    """Those of all tables, then the judges'."""
    row = next(iter(next(iter(cells.values())).values()))
    return [*METRICS, *(metric for metric in next(iter(row.values())) if metric.startswith(JUDGED))]


def _title(table: str, metric: str, part: str) -> str:
    who = "simulated " if metric != "coverage" and task_of(table) == "geoquery" else ""
    title = f"{who}{METRICS.get(metric, metric)}, {'' if part == 'test' else f'{part} queries, '}%"
    return title[0].upper() + title[1:]


def _means(table: str, cells: Cells, names: Sequence[str], metric: str, part: str) -> str:
    """Splits by rows, mean ± spread over seeds; last each seed's mean, of the seeds that all splits have."""
    shown = [TITLES.get(table, {}).get(name, name) for name in names]
    lines = [f"| {_title(table, metric, part)} | " + " | ".join(shown) + " |", "|---" * (len(names) + 1) + "|"]
    by_seed = {
        name: [{seed: at[name][metric] for seed, at in row.items() if metric in at[name]} for row in cells.values()]
        for name in names
    }

    def means(splits: Sequence[Mapping[str, float]]) -> list[float]:
        whole = [seed for seed in splits[0] if all(seed in seeds for seeds in splits)]
        return [sum(seeds[seed] for seeds in splits) / len(splits) for seed in whole]

    for at, split in enumerate(cells):
        lines.append(f"| {split} | " + " | ".join(cell(list(by_seed[name][at].values())) for name in names) + " |")
    lines.append("| mean | " + " | ".join(cell(means(by_seed[name])) for name in names) + " |")
    return "\n".join(lines)


def _gains(table: str, cells: Cells, part: str) -> str:
    """Paired differences: mean ± spread over all (split, seed), and how many of them gained and lost."""
    rows = [row for seeds in cells.values() for row in seeds.values()]
    metrics = _metrics(cells)
    titles = " | ".join(_title(table, metric, part).replace("%", "points") for metric in metrics)
    lines = [
        f"| gain in each of {len(rows)} (split, seed) | {titles} | weights of SFT kept |",
        "|---" * (2 + len(metrics)) + "|",
    ]
    pairs = [(name, WITHOUT) for name in TABLES[table]]
    if table in COMPARED:
        pairs += [(name, "best plain") for name in (WITHOUT, *TABLES[table])]
    for name, other in pairs:
        found = []
        for metric in metrics:
            gains = [row[name][metric] - _figure(row, other, metric) for row in rows if metric in row[name]]
            up, down = (sum(sign * round(gain, 2) > 0 for gain in gains) for sign in (1, -1))
            found.append(f"{cell(gains, sign=True)} ({up} up, {down} down)" if gains else cell(gains))
        kept = "" if name == WITHOUT else str(int(sum(row[name]["as_before"] for row in rows)))
        title = TITLES.get(table, {}).get(name, name)
        lines.append(f"| {title} against {other} | " + " | ".join(found) + f" | {kept} |")
    return "\n".join(lines)


def _figure(row: Mapping[str, Mapping[str, float]], name: str, metric: str) -> float:
    """A column's figure; `best plain` is the best of the plain selectors in this metric."""
    if name != "best plain":
        return row[name][metric]
    plain = [name for name in names() if not get_baseline(name).oracle]
    return max(row[name][metric] for name in plain if metric in row.get(name, {}))


def main() -> int:
    """Run the benchmark from the command line."""
    flags = parser(__doc__, threads=1)
    flags.add_argument("--table", choices=tuple(TABLES), required=True)
    flags.add_argument("--part", choices=("test", "dev"), default="test", help="which queries (default test)")
    flags.add_argument("--runs", type=Path, default=Path("runs/reinforcement"), help="folder for the runs")
    flags.add_argument(
        "--judge", type=Path, action="append", default=[], metavar="FOLDER", help="a local model that judges, too"
    )
    flags.add_argument(
        "--set", type=setting, action="append", default=[], metavar="SECTION.NAME=VALUE", help="a setting, for trials"
    )
    arguments = flags.parse_args()
    settings = merged(SETTINGS[task_of(arguments.table)], *arguments.set)
    cells: Cells = {}

    def work(split: str, seed: int) -> str:
        from langchain_rcr.files import write_json

        figures = cells.setdefault(split, {})[str(seed)] = run_one(arguments, split, seed)
        print(f"{split} seed {seed}: {json.dumps(figures)}", file=sys.stderr, flush=True)
        result = {"table": arguments.table, "part": arguments.part, "settings": settings, "cells": cells}
        write_json(arguments.out, result)
        return markdown(arguments.table, cells, arguments.part)

    return print_table(arguments, COVR if arguments.table == "covr" else TEMPLATES, work)


if __name__ == "__main__":
    sys.exit(main())
