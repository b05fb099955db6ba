"""Which tools requests need: ComposedToolSelector beside plain selectors, on ToolLens.

    python benchmarks/tools.py --data toollens --out tools.json

ToolLens (Qu et al., "Towards Completeness-Oriented Tool Retrieval for Large Language Models", CIKM 2024) is the folder
datasets/ToolLens of quchangle1/COLT: 464 tools, 18,770 requests. `published` is its own split, in which each set of
tools that a test request needs is that of training requests, too. `held-out sets`: of all requests those that need any
of some sets, drawn for each seed, as many as leave each tool in another set. `held-out tools`: those that need any of
30 tools, drawn for each seed.

bm25, dense and mmr look for the request among the descriptions of tools; mmr's trade-off is chosen on 500 training
requests. knn knows what training requests used: tools by the summed likeness of the 20 likest requests that used them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import limit_threads, sweep, table

Pairs = list[tuple[str, tuple[str, ...]]]
"""Requests with the tools that they need."""
KS = (3, 5)
ASKED = 2000
"""Requests that each held-out split asks, at most."""


def read(folder: Path) -> tuple[dict[str, str], Pairs, Pairs]:
    """Descriptions of tools, training pairs, test pairs."""

    def texts(name: str) -> dict[str, str]:
        rows = map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
        return {row["_id"]: row["text"] for row in rows}

    requests = texts("queries.jsonl")

    def pairs(name: str) -> Pairs:
        needed = defaultdict(list)
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            request, tool = line.split()
            needed[request].append(tool)
        return [(requests[request], tuple(sorted({*tools}))) for request, tools in needed.items()]

    return texts("corpus.jsonl"), pairs("query_tool_train.txt"), pairs("query_tool_test.txt")


def sets_to_hold_out(pairs: Pairs, seed: int) -> set[tuple[str, ...]]:
    """Sets of which none has a tool that no other set has, as many as there are in a random order."""
    import numpy as np

    sets = sorted({tools for _, tools in pairs})
    left = Counter(tool for tools in sets for tool in tools)
    out = set()
    for at in np.random.default_rng(seed).permutation(len(sets)):
        if all(left[tool] > 1 for tool in sets[at]):
            out.add(sets[at])
            left.subtract(sets[at])
    return out


def splits(name: str, train: Pairs, test: Pairs, tools: Sequence[str], seed: int) -> tuple[Pairs, Pairs]:
    """Training and test pairs of a split."""
    import numpy as np

    if name == "published":
        return train, test
    every, rng = train + test, np.random.default_rng([seed, 1])
    if name == "held-out sets":
        sets = sets_to_hold_out(every, seed)
        out = [pair[1] in sets for pair in every]
    else:
        unseen = {tools[at] for at in rng.permutation(len(tools))[:30]}
        out = [not unseen.isdisjoint(pair[1]) for pair in every]
    asked = [pair for pair, is_out in zip(every, out, strict=True) if is_out]
    kept = [pair for pair, is_out in zip(every, out, strict=True) if not is_out]
    return kept, [asked[at] for at in np.sort(rng.permutation(len(asked))[:ASKED])]


def figures(ranked: Sequence[Sequence[str]], needed: Sequence[Sequence[str]]) -> dict[str, float]:
    """Recall, NDCG and COMP (all needed tools are there), in percent, by k."""
    found = {}
    for k in KS:
        recall = ndcg = comp = 0.0
        for ranking, gold in zip(ranked, needed, strict=True):
            hits = [tool in gold for tool in ranking[:k]]
            best = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(gold))))
            recall += sum(hits) / len(gold)
            ndcg += sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits)) / best
            comp += sum(hits) == len(gold)
        for name, total in (("Recall", recall), ("NDCG", ndcg), ("COMP", comp)):
            found[f"{name}@{k}"] = 100 * total / len(needed)
    return found


def rankings(about: dict[str, str], train: Pairs, asked: Sequence[str], embed: Any, seed: int, landmarks: int) -> Any:
    """Each selector's name and its five tools for each request, best first."""
    import numpy as np
    from rcr_trainer.baselines import get_baseline

    from langchain_rcr import ComposedToolSelector

    names = list(about)
    pool = [{"source": text, "target": name} for name, text in about.items()]

    def named(picks: Any) -> list[list[str]]:
        return [[names[at] for at in row] for row in picks.tolist()]

    rng = np.random.default_rng([seed, 2])
    tuning = [train[at] for at in rng.permutation(len(train))[:500]]
    for name in ("bm25", "dense", "mmr"):
        selector = get_baseline(name)(pool, embed=embed)
        if selector.trade_off is not None:
            asked_here, needed = zip(*tuning, strict=True)

            def complete(
                value: float, selector: Any = selector, asked_here: Any = asked_here, needed: Any = needed
            ) -> float:
                setattr(selector, selector.trade_off.parameter, value)
                return figures(named(selector.pick(asked_here, max(KS))), needed)["COMP@5"]

            setattr(selector, selector.trade_off.parameter, max(selector.trade_off.grid, key=complete))
        yield name, named(selector.pick(asked, max(KS)))
    uses = np.array([[name in tools for name in names] for _, tools in train], dtype=np.float32)
    likeness = embed(asked) @ embed([request for request, _ in train]).T
    likeness[likeness < -np.sort(-likeness, axis=1)[:, 19:20]] = 0
    yield "knn", named(np.argsort(-(likeness @ uses), axis=1, kind="stable")[:, : max(KS)])
    selector = ComposedToolSelector.from_pairs(train, about, max(KS), landmarks=landmarks, seed=seed)
    picks = selector.retriever.batch(list(asked))
    yield "ours", [[pick.id for pick in sorted(one, key=lambda pick: pick.metadata["step"])] for one in picks]


def measured(folder: Path, name: str, seed: int, landmarks: int, shared: Any) -> dict[str, Any]:
    """The figures of each selector on a split."""
    about, *given = read(folder)
    train, test = splits(name, *given, list(about), seed)
    asked, needed = [request for request, _ in test], [tools for _, tools in test]
    found = {
        selector: figures(ranked, needed)
        for selector, ranked in rankings(about, train, asked, shared.embed, seed, landmarks)
    }
    return {"train": len(train), "asked": len(test), "selectors": found}


def main() -> None:
    """Measure each split with each seed; the text encoder reads each text once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of ToolLens")
    parser.add_argument("--splits", default="published,held-out sets,held-out tools", help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument("--landmarks", type=int, default=4000, help="pairs that ours learns from (default 4000)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    limit_threads(arguments.threads)
    from langchain_rcr.families import backbone, get_family
    from langchain_rcr.families.base import DEFAULT_FAMILY

    shared = backbone.RememberingBackbone(backbone.open_backbone(get_family(DEFAULT_FAMILY).settings()))
    backbone.open_backbone = lambda settings, embeddings=None: shared  # type: ignore[assignment]

    def cell(split: str, seed: int) -> Callable[[], dict[str, Any]]:
        return lambda: measured(arguments.data, split, seed, arguments.landmarks, shared)

    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    cells = [(f"{split}, seed {seed}", cell(split, seed)) for split in arguments.splits.split(",") for seed in seeds]
    results = sweep(cells, arguments.out)
    for split in arguments.splits.split(","):
        mine = [results[f"{split}, seed {seed}"]["selectors"] for seed in seeds]
        columns = list(mine[0]["ours"])
        rows = ([name, *(spread([one[name][column] for one in mine]) for column in columns)] for name in mine[0])
        print(f"\n{split}\n\n{table([split, *columns], rows)}")


def spread(values: Sequence[float]) -> str:
    """The mean over seeds and, where they differ, the least and the most."""
    mean, least, most = (f"{value:.1f}" for value in (sum(values) / len(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


if __name__ == "__main__":
    main()
