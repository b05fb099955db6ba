"""Labels that come in after training: one label at a time is held out, then twenty examples with it are added.

    python benchmarks/open_world.py --data ../shared/data --out open_world.json

The structure family is fitted to the training examples without the label; they are the pool. Then twenty examples with
it are added, without training. Asked are the test questions, and the training questions with the label that weren't
added. Of those that need the label: how many get an example with it, before and after. Of the others: coverage, before
and after (%, 4 picks). Labels are drawn from those that at least 25 and at most half of all training programs have. The
file maps task → label → figures; a Markdown table goes to standard output.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from common import parser, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rcr_trainer.data import Example

    from langchain_rcr.programs import ProgramSpec

LABELS, ADDED, K = 5, 20, 4
LEAST = 25
TASKS = ("geoquery", "covr", "scholar")
TITLES = ("label", "questions", "have it shown, before", "after", "others' coverage, before", "after", "seconds to add")


def measure(
    label: str, train: Sequence[Example], test: Sequence[Example], spec: ProgramSpec, seed: int
) -> dict[str, float]:
    """The figures of one label."""
    import time

    import numpy as np

    from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder
    from langchain_rcr.families import get_family
    from langchain_rcr.families.backbone import open_backbone
    from langchain_rcr.folds import Folds

    rng = np.random.default_rng([seed, 20])

    def has(example: Example) -> bool:
        return label in spec.structures(example.target)

    rest, new = [e for e in train if not has(e)], [e for e in train if has(e)]
    added = [new[i] for i in sorted(rng.permutation(len(new))[:ADDED].tolist())]
    needing = [e for e in test if has(e)] + [e for e in new if e not in added]
    needing = [needing[i] for i in sorted(rng.permutation(len(needing))[:200].tolist())]
    others = [e for e in test if not has(e)][:200]
    family = get_family("structure")
    items = [Item(e.source, e.target) for e in rest]
    backbone = open_backbone(family.settings())
    model = TriEncoder.build("structure", items, backbone=backbone, spec=spec, state="saturating")
    family.fit(model.query, items, Folds.of(items, spec), seed=seed)
    picks = SequentialCompositionalRetriever.from_encoder(
        model,
        [{"source": e.source, "target": e.target} for e in rest],
        k=K,
        mask_same_program=True,
        probabilities=False,
    )

    def shown(examples: Sequence[Example]) -> tuple[float, float]:
        """In %: of the questions, how many have the label shown; structures that are shown."""
        found, covered = [], []
        for example, documents in zip(examples, picks.batch([e.source for e in examples]), strict=True):
            structures = set().union(*(spec.structures(d.metadata["target"]) for d in documents))
            wanted = set(spec.structures(example.target))
            found.append(label in structures)
            covered.append(len(wanted & structures) / len(wanted))
        return 100 * float(np.mean(found)), 100 * float(np.mean(covered))

    had, covered = shown(needing)[0], shown(others)[1]
    start = time.perf_counter()
    picks.add_examples([{"source": e.source, "target": e.target} for e in added])
    seconds = time.perf_counter() - start
    return {
        "questions": len(needing),
        "shown_before": had,
        "shown_after": shown(needing)[0],
        "others_before": covered,
        "others_after": shown(others)[1],
        "seconds": seconds,
    }


def labels_of(train: Sequence[Example], spec: ProgramSpec, seed: int) -> list[str]:
    """The labels to hold out."""
    from collections import Counter

    import numpy as np

    counts = Counter(name for e in train for name in spec.structures(e.target) if not {"->", "<->"} & set(name.split()))
    fit = sorted(name for name, count in counts.items() if LEAST <= count <= len(train) / 2)
    drawn = np.random.default_rng([seed, 21]).permutation(len(fit))[:LABELS]
    return [fit[place] for place in drawn.tolist()]


def table_of(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"| task, {' | '.join(TITLES)} |", f"|---|{'---|' * (len(TITLES) - 1)}"]
    for task, found in report.items():
        for label, figures in found.items():
            lines.append(f"| {task}, {label} | {' | '.join(f'{value:.1f}' for value in figures.values())} |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit status."""
    arguments = parser(__doc__, threads=1).parse_args()
    report: dict[str, Any] = {}

    def work(task: str, seed: int) -> str:
        from rcr_trainer.data import covr_split, geoquery_split, text2sql_split

        from langchain_rcr.programs import ProgramSpec

        spec = ProgramSpec("sql" if task == "scholar" else "functional")
        if task == "covr":
            split = covr_split("110", 0, 1000, 300)
        elif task == "scholar":
            split = text2sql_split(arguments.data / "text2sql" / "scholar.json")
        else:
            split = geoquery_split(arguments.data / "geoquery" / "corpus.xml", "standard")
        for label in labels_of(split.train, spec, seed):
            figures = measure(label, split.train, split.test, spec, seed)
            report.setdefault(task, {})[f"{label} ({seed})"] = figures
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        return table_of(report)

    return print_table(arguments, TASKS, work)


if __name__ == "__main__":
    sys.exit(main())
