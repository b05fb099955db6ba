"""How far held-out training questions are from the questions of the test: coverage on either.

    python benchmarks/development.py --task geoquery --data ../shared/data --out development.json

The policies are those of quality.py: its runs are continued or made. 300 training questions of each are taken as
questions to come, half of them held out with the programs of their fold, half with their cluster (`Folds.ways`): E_x is
as if not fitted to these, and they are barred from the pool. Beside that stands the test. On both sides only those
structures count that a question's candidates have. The file maps split → seed → figures, in percent; a Markdown table
goes to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import quality
from common import cell, parser, print_table, run_or_read

COLUMNS = {"folds": "held-out training questions", "test": "test", "difference": "difference"}
QUESTIONS, K = 300, 4


def measured(run: Path, seed: int, *, own_program: bool) -> dict[str, float]:
    """Coverage (%) of a run's policy on held-out training questions and on the test."""
    import numpy as np
    from rcr_trainer.coverage import program_groups
    from rcr_trainer.data import read_split
    from rcr_trainer.folds import HeldOut, own_positions
    from rcr_trainer.training.supervision import Supervision

    from langchain_rcr import TriEncoder
    from langchain_rcr.selection import greedy

    model, split = TriEncoder.from_pretrained(run / "checkpoint"), read_split(run / "data")
    rows = np.random.default_rng([seed, 30]).permutation(len(split.train))[:QUESTIONS]
    questions = [split.train[row] for row in sorted(rows.tolist())]
    held_out = HeldOut(split.train, questions, model.spec, own_program=own_program, seed=seed)
    pool = model.encode_pool([example.item for example in split.train])
    groups = program_groups(model.spec, [example.target for example in split.train])

    def coverage(asked: Any, vectors: Any, barred: Any) -> float:
        picks = greedy(vectors, pool, model.state(), K, exclude=barred, groups=groups).positions
        return Supervision.build(asked, split.train, model.spec, barred, reachable=True).coverage(picks)

    features = held_out.features(model, questions)
    folds = coverage(questions, model.query.vectors(features), held_out.barred(questions))
    asked = model.encode_queries([example.source for example in split.test])
    test = coverage(split.test, asked, own_positions(split.test, split.train, model.spec))
    return {"folds": round(folds, 2), "test": round(test, 2), "difference": round(folds - test, 2)}


def markdown(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Splits by rows, mean ± spread over seeds."""
    lines = [f"| split | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for split, seeds in results.items():
        cells = [cell([row[name] for row in seeds.values()], sign=name == "difference") for name in COLUMNS]
        lines.append(f"| {split} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit status."""
    flags = parser(__doc__, threads=1)
    flags.add_argument("--task", choices=tuple(quality.SPLITS), required=True)
    arguments = flags.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}

    def work(split: str, seed: int) -> str:
        settings = quality.run_settings(arguments.task, split, seed, arguments.data, "structure")
        folder = quality.FOLDER / f"{arguments.task}-{split}-{seed}-structure"
        run = run_or_read(folder, seed, arguments.threads, settings, until="sft")
        own_program = not settings.get("sft", {}).get("exclude_own_program", True)
        results.setdefault(split, {})[str(seed)] = measured(run.path, seed, own_program=own_program)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        return markdown(results)

    return print_table(arguments, quality.SPLITS[arguments.task], work)


if __name__ == "__main__":
    sys.exit(main())
