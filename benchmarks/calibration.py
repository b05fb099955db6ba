"""How well the structure family's likelihoods tell what held-out questions need, by γ (docs/structure.md).

    python benchmarks/calibration.py --data ../shared/data

For each data set and γ the log-loss of the structures' likelihoods, each weighted by what the structure is worth, per
unit of worth that the gold programs have; and how much worth is expected, as a multiple of theirs. Questions are
development questions, or a fifth of training, held out, where there are none. Asks no language model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from answers import SETS, questions_of, settings_of
from common import limit_threads, table

HELD_OUT = ("standard", "spider-random_1", "spider-template_1", "covr-100", "covr-34")
"""Sets whose development questions are none, or not new ones."""
WHERE = "none=http://127.0.0.1/v1"
"""Settings name a model; it isn't asked."""
LEAST = 1e-3
"""Likelihoods are taken as at least this, and at most 1 less it: the loss of a sure mistake has an end."""


def losses(name: str, data: Path, powers: list[float], most: int) -> list[str]:
    """A row of the table: the data set, and for each γ the log-loss and the expected worth."""
    from rcr_trainer.tasks import divide, load_split

    from langchain_rcr.policy.triencoder import TriEncoder

    config = settings_of(name, data, 0, WHERE, 1)
    task = divide(config, load_split(config.data, config.seed))
    pool, asked = questions_of(task, "fold" if name in HELD_OUT else "dev", most)
    encoder = TriEncoder.fitted([each.item for each in pool], spec=task.spec, seed=0).query
    features = encoder.featurize([each.item for each in asked])
    needed = np.array([encoder.inventory.has(each.target) for each in asked])
    kept = encoder.tensors()
    worth = np.exp(kept["worth"] + kept["by_size"][encoder.inventory.lengths.astype(int) - 1])
    whole, cells = (worth * needed).sum(), []
    for power in powers:
        encoder.put({"power": np.array(np.log(power), dtype=np.float32)})
        likely = np.asarray(encoder.likelihoods(features)).clip(LEAST, 1 - LEAST)
        loss = -(worth * np.log(np.where(needed, likely, 1 - likely))).sum() / whole
        cells.append(f"{loss:.2f} ({(worth * likely).sum() / whole:.2f})")
    return [name, *cells]


def main() -> None:
    """Run the benchmark from the command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with geoquery/, text2sql/ …")
    others = ("text2sql-geography", "text2sql-scholar", *HELD_OUT[1:])
    flags.add_argument("--sets", nargs="+", default=[*SETS, *others])
    flags.add_argument("--powers", nargs="+", type=float, default=[1, 1.5, 2, 3], help="γ (default 1 1.5 2 3)")
    flags.add_argument("--questions", type=int, default=110, help="at most, evenly spread (default 110)")
    flags.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    arguments = flags.parse_args()
    limit_threads(arguments.threads)
    rows = [losses(name, arguments.data, arguments.powers, arguments.questions) for name in arguments.sets]
    print(table(["", *(f"γ = {power:g}" for power in arguments.powers)], rows))


if __name__ == "__main__":
    main()
