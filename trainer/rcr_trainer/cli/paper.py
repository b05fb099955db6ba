"""The command `rcr-train paper`: does the missing runs behind a table, and writes the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from rcr_trainer.cli import console
from rcr_trainer.errors import ConfigError
from rcr_trainer.evaluation.budget import spoken
from rcr_trainer.paper.results import Result
from rcr_trainer.paper.splits import named_splits
from rcr_trainer.paper.sweep import Cell, Sweep, budget, pace
from rcr_trainer.paper.tables import TABLES
from rcr_trainer.runs.layers import given_settings, load_config, merged


def paper(given: argparse.Namespace) -> None:
    """Say what is missing and the most it costs, ask, run, and write the table; with --dry-run, only say."""
    flags = console.flags(given)
    if given.llm is not None:
        kind, _, model = given.llm.partition(":")
        flags |= {"llm.kind": kind, **({"llm.model": model} if model else {})}
    # Load the settings, so that an error names the place of a bad value. All runs have GRPO.
    config = load_config(given.config, {**flags, "grpo.enabled": "true"})
    if config.evaluation.answers is not False and not config.llm.given:
        raise ConfigError("no language model is named: give --llm, such as local:FOLDER or completion:NAME")
    settings = merged({"evaluation": {"answers": True}}, given_settings(given.config, flags))
    table = TABLES[given.table]
    splits = table.splits if given.splits is None else named_splits(given.splits)
    try:
        seeds = [int(seed) for seed in (given.seeds or ("0,1,2" if given.limit is None else "0")).split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {given.seeds} must be numbers, as in 0,1,2") from None
    selectors = None if given.selectors is None else given.selectors.replace(" ", "").split(",")
    folder = given.out
    if given.limit is not None:
        if given.limit < 1:
            raise ConfigError(f"--limit {given.limit} must be 1 or more")
        # The whole can reuse a trial's answers.
        folder = folder / f"limit-{given.limit}"
        settings = merged({"llm": {"cache": str(given.out / "answers.sqlite")}}, settings)
    sweep = Sweep(table, splits, seeds, folder, given.data, settings, selectors, given.limit)
    with console.logged():
        missing = sweep.missing()
        tell = console.show if given.dry_run else console.say
        tell(f"{given.table}: {len(sweep.cells)} runs in {folder}, {len(missing)} of them to do")
        if missing:
            _agree(missing, given, tell)
        if given.dry_run:
            return
        try:
            for number, cell in enumerate(sweep.run(), 1):
                console.say(f"{number} of {len(missing)}: {cell.config.folder}")
        finally:
            outcomes = sweep.outcomes()
            result = Result(given.table, table, outcomes, sweep.left_out())
            paths = result.write(folder) if outcomes else []
    console.show(result.markdown())
    console.show(f"written: {', '.join(map(str, paths))}")


def _agree(cells: Sequence[Cell], given: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Say the most that runs cost and, unless it is a dry run, continue only if the user agrees."""
    cost = budget(cells)
    tell(f"language model: {'none is asked' if cost is None else cost}")
    if given.dry_run:
        return
    if not given.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nothing was run: --yes agrees to this budget")
        sys.stderr.write("Run these? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise ConfigError("nothing was run")
    if cost is not None and (seconds := pace(cells)) is not None:
        took = f"an answer takes {seconds:.2g} s, as a few have just told"
        console.say(f"at most {spoken(seconds * cost.use.calls)} of the language model's time: {took}")
