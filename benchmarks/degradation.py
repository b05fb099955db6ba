"""How quality falls with fewer examples and with broken programs: GeoQuery, ours beside the best plain selector.

    python benchmarks/degradation.py --data ../shared/data --out degradation.json

Conditions: a pool of 50, 100, 200 and of all training examples; of all, with a share of 0.1, 0.3, 0.5, 1 of the
programs broken, which is to say cut off at a random place, so that they don't parse; and of all, unbroken, by their
tokens, as programs of a language without a parser are. Smaller pools are parts of larger ones; so are smaller shares.
Development queries come out of the pool, as they do for a user who brings no others. Test queries keep their programs.

A broken example stays in the pool: its question may get it picked. What it is worth then is counted twice:
- `as read`: nothing. A model that sees half a program learns something from it, so this is too strict. Where no program
  parses, the run reads all of them by their tokens, those of the test queries too, and coverage is of token n-grams.
- `as meant`: all that the program had before it was broken, which is too much. The picks are the same; the oracle's are
  by the unbroken programs.

Each (split, condition, seed) is an ordinary run of the trainer with default settings under runs/degradation/, so an
interrupted benchmark goes on where it stopped. The file maps split → condition → reading → seed → figures, coverage
in percent; a Markdown table of means and spreads goes to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import cell, compared, parser, print_table, run_or_read, settings_of

if TYPE_CHECKING:
    from rcr_trainer.data import Example, Split
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.runs import Run

    from langchain_rcr.programs import ProgramSpec

SPLITS = ("standard", "template_1")
POOLS = ("50", "100", "200", "all")
SHARES = (0.1, 0.3, 0.5, 1.0)
FOLDER = Path("runs/degradation")
READ, MEANT = "as read", "as meant"
FIGURES = {"best_plain": ("best plain", 1), "ours": ("ours", 1), "oracle": ("oracle", 1), "gap_closed": ("gap", 2)}
"""The columns of numbers: title and decimals."""


class Condition(NamedTuple):
    """What a run works with.

    Args:
        size: of the pool; None: all.
        share: of the programs that is broken.
        language: by which programs are read, as far as they parse.
    """

    size: int | None = None
    share: float = 0.0
    language: str = "functional"

    @property
    def hidden(self) -> bool:
        """Whether the run sees less of the programs than they are made of."""
        return self.share > 0 or self.language != "functional"


CONDITIONS = {
    **{f"pool of {size}": Condition(None if size == "all" else int(size)) for size in POOLS},
    **{f"{share:.0%} broken": Condition(share=share) for share in SHARES},
    "by tokens": Condition(language="tokens"),
}


# ---------------------------------------------------------------- splits


def degraded(split: Split, size: int | None, share: float, seed: int, spec: ProgramSpec) -> Split:
    """A part of a split's pool, a share of its programs broken, without its development queries.

    Args:
        split: whose test queries stay as they are.
        size: of the pool; None: all.
        share: of the programs, rounded to whole ones.
        seed: which examples are kept, which are broken, and where.
        spec: decides what parses.
    """
    import numpy as np

    order = np.random.default_rng([seed, 1]).permutation(len(split.train))[:size]
    broken = set(order[: round(share * len(order))].tolist())
    kept = set(order.tolist())
    cuts = np.random.default_rng([seed, 2]).random(len(split.train))
    train = [
        replace(example, target=cut_off(example.target, cuts[place], spec)) if place in broken else example
        for place, example in enumerate(split.train)
        if place in kept
    ]
    meta = {**split.meta, "how": f"{len(train)} of {len(split.train)} training examples, {len(broken)} broken"}
    return replace(split, train=train, dev=[], meta=meta)


def cut_off(program: str, where: float, spec: ProgramSpec) -> str:
    """A beginning of a program that doesn't parse.

    Args:
        program: the program.
        where: from 0 to 1, which of its beginnings that don't parse; if there is none, a bracket is left open.
        spec: decides what parses.
    """
    beginnings = (program[:end].rstrip() for end in range(1, len(program)))
    unparsable = [text for text in dict.fromkeys(beginnings) if text and spec.tree(text) is None]
    return unparsable[int(where * len(unparsable))] if unparsable else f"{program} ("


# ---------------------------------------------------------------- runs


def run_one(name: str, condition: str, seed: int, data: Path, threads: int, family: str) -> dict[str, dict[str, Any]]:
    """Train and evaluate under one condition, or read what an earlier call left.

    Returns:
        Reading → the figures of `compared`; `as meant` only where the run doesn't see programs as they are.
    """
    from rcr_trainer.data import write_split
    from rcr_trainer.evaluation import EvaluationReport
    from rcr_trainer.settings import DataSettings
    from rcr_trainer.tasks import load_split

    from langchain_rcr.programs import ProgramSpec

    given = CONDITIONS[condition]
    settings = settings_of("geoquery", name, data, FOLDER / "splits")
    whole, spec = load_split(DataSettings.model_validate(settings["data"]), 0), ProgramSpec()
    title = f"{name}-{condition.replace(' ', '-').replace('%', '')}-{seed}"
    folder = FOLDER / "splits" / title
    if not (folder / "split.json").is_file():
        write_split(folder, degraded(whole, given.size, given.share, seed, spec))
    settings |= {"data": {"task": "files", "directory": str(folder)}, "model": {"family": family}}
    settings |= {"program": {"language": given.language}}
    run = run_or_read(FOLDER / f"{title}-{family}", seed, threads, settings)
    found = {READ: compared(EvaluationReport.read(run.path))}
    if given.hidden:
        found[MEANT] = compared(_as_meant(run, whole.train, spec))
    return found


def _as_meant(run: Run, unbroken: Sequence[Example], spec: ProgramSpec) -> EvaluationReport:
    """The run's selectors, their picks counted by the programs before they were broken.

    Args:
        run: a finished run.
        unbroken: the examples, found by their ids.
        spec: how these are read.
    """
    from rcr_trainer.baselines import get_baseline
    from rcr_trainer.baselines.base import Resources
    from rcr_trainer.baselines.greedy import OracleSelector
    from rcr_trainer.baselines.set_bsr import TransformerTokens
    from rcr_trainer.data import read_split
    from rcr_trainer.evaluation import evaluate, plain_selectors
    from rcr_trainer.evaluation.stage import policy_picks
    from rcr_trainer.folds import own_positions
    from rcr_trainer.policies import load_model
    from rcr_trainer.tasks import divide

    config, evaluation = run.config, run.config.evaluation
    split = read_split(run.path / "data")
    task = divide(config, split)
    model, read = load_model(config, run.checkpoint, {}), task.spec
    base, questions = config.model.base, [example.source for example in task.pool]
    plain = plain_selectors(
        task.pool,
        Resources(
            read,
            config.seed,
            None if model.backbone is None else model.backbone.embed,
            None if base is None else TransformerTokens(base, max_length=config.model.max_length, remember=questions),
        ),
        dev=task.dev,
        k=evaluation.k,
        exclude_dev=own_positions(task.dev, task.pool, read, same_program=config.sft.exclude_own_program),
        names=[name for name in evaluation.selectors if not get_baseline(name).oracle],
    ).selectors
    targets = {example.id: example.target for example in unbroken}
    meant = [replace(example, target=targets[example.id]) for example in task.pool]
    return evaluate(
        {
            "rcr": policy_picks(model, task.pool, read, mask_duplicates=evaluation.mask_duplicates),
            **plain,
            "oracle": OracleSelector([{"source": e.source, "target": e.target} for e in meant], spec=spec),
        },
        meant,
        task.test,
        spec,
        k=evaluation.k,
        steps=evaluation.k,
        split=split.name,
        seed=config.seed,
        exclude=[*own_positions(task.test, task.pool, read, same_program=False)],
    )


# ---------------------------------------------------------------- output

Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]]
"""split → condition → reading → seed → figures."""


def markdown(results: Results) -> str:
    """The table: a row for each split, condition and reading, mean ± spread over the seeds."""
    titles = ["split", "condition", "counted", *(title for title, _ in FIGURES.values())]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for split, named in results.items():
        for condition, readings in named.items():
            for reading, seeds in readings.items():
                rows = list(seeds.values())
                cells = {
                    key: cell([row[key] for row in rows if row[key] is not None], digits)
                    for key, (_, digits) in FIGURES.items()
                }
                cells["best_plain"] += f" ({', '.join(dict.fromkeys(row['best_plain_name'] for row in rows))})"
                counted = reading if CONDITIONS[condition].hidden else "–"
                lines.append(f"| {split} | {condition} | {counted} | " + " | ".join(cells.values()) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark from the command line."""
    flags = parser(__doc__, threads=2)
    flags.add_argument("--family", default="structure", help="encoder family (default structure)")
    arguments = flags.parse_args()
    results: dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]] = {}

    def work(split: str, seed: int) -> str:
        from langchain_rcr.files import write_json

        for condition in CONDITIONS:
            found = run_one(split, condition, seed, arguments.data, arguments.threads, arguments.family)
            for reading, figures in found.items():
                of_condition = results.setdefault(split, {}).setdefault(condition, {})
                of_condition.setdefault(reading, {})[str(seed)] = figures
                print(f"{split}, {condition}, seed {seed}, {reading}: {figures}", file=sys.stderr, flush=True)
            write_json(arguments.out, results)
        return markdown(results)

    return print_table(arguments, SPLITS, work)


if __name__ == "__main__":
    sys.exit(main())
