"""Which tools do requests need? ComposedToolSelector against plain selectors, on ToolLens.

    python benchmarks/tools.py --data ToolLens --out tools.json

ToolLens (Qu et al., "Towards Completeness-Oriented Tool Retrieval for Large Language Models", CIKM 2024) is the folder
datasets/ToolLens of quchangle1/COLT: 464 tools, 18,770 requests. `published` is its own split, where every set of tools
that a test request needs is also needed by training requests. `held-out sets` tests all requests that need one of some
sets of tools, drawn for each seed as long as each tool remains in a set that isn't held out. `held-out tools` tests the
requests that need any of 30 tools, drawn for each seed.

bm25, dense and mmr compare the request with the tools' descriptions; mmr's trade-off is chosen on 500 training
requests. knn knows what training requests used: it ranks tools by the summed similarity of the 20 most similar requests
that used them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import files_of, limit_threads, sweep, table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pairs = list[tuple[str, tuple[str, ...]]]
"""Requests with the tools they need."""
KS = (3, 5)
ASKED = 2000
"""Most requests that each held-out split asks."""


def read(folder: Path) -> tuple[dict[str, str], Pairs, Pairs]:
    """Tool descriptions, training pairs, test pairs."""

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
    """Sets of tools to hold out, chosen greedily in random order; each tool remains in a set that isn't held out."""
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
    """A split's training and test pairs."""
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
    """Recall, NDCG and COMP (all needed tools found), in percent, by k."""
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
    """Each selector's name, and its five tools for each request, best first."""
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


class StoredVectors:
    """A text encoder that reads some texts once for all runs, and keeps their vectors and tokens in a folder.

    Args:
        backbone: reads them the first time, and any other text.
        texts: the texts to keep.
        folder: written if missing (1.2 GB for ToolLens, some 20 minutes on two cores).
    """

    def __init__(self, backbone: Any, texts: Sequence[str], folder: Path) -> None:
        import numpy as np

        self._backbone, self.dim, self.symmetric = backbone, backbone.dim, backbone.symmetric
        if not (folder / "texts.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            vectors, tokens = backbone.read(texts)
            np.save(folder / "vectors.npy", vectors)
            np.save(folder / "tokens.npy", np.concatenate(tokens))
            np.save(folder / "ends.npy", np.cumsum([len(one) for one in tokens]))
            (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        self._row = {text: row for row, text in enumerate(json.loads((folder / "texts.json").read_text("utf-8")))}
        self._vectors = np.load(folder / "vectors.npy")
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._tokens = np.split(tokens, np.load(folder / "ends.npy")[:-1])

    def embed(self, texts: Sequence[str], *, queries: bool = False) -> NDArray[np.float32]:
        """See `langchain_rcr.families.encoding.Backbone`."""
        return self.read(texts)[0]

    def read(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """See `langchain_rcr.families.backbone.TransformerBackbone`."""
        import numpy as np

        others = [text for text in dict.fromkeys(texts) if text not in self._row]
        fresh = dict(zip(others, zip(*self._backbone.read(others), strict=True), strict=True)) if others else {}
        found = [fresh[text] if text in fresh else self._stored(self._row[text]) for text in texts]
        vectors = np.array([vector for vector, _ in found], dtype=np.float32).reshape(len(texts), self.dim)
        return vectors, [tokens for _, tokens in found]

    def _stored(self, row: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self._vectors[row], self._tokens[row]


def measured(folder: Path, name: str, seed: int, landmarks: int, shared: Any) -> dict[str, Any]:
    """Each selector's figures on a split."""
    about, *given = read(folder)
    train, test = splits(name, *given, list(about), seed)
    asked, needed = [request for request, _ in test], [tools for _, tools in test]
    found = {
        selector: figures(ranked, needed)
        for selector, ranked in rankings(about, train, asked, shared.embed, seed, landmarks)
    }
    return {"train": len(train), "asked": len(test), "selectors": found}


def main() -> None:
    """Measure each split with each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of ToolLens")
    parser.add_argument("--vectors", type=Path, default=Path("build/toollens"), help="where read texts are kept")
    parser.add_argument("--splits", default="published,held-out sets,held-out tools", help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument("--landmarks", type=int, default=4000, help="pairs that ours learns from (default 4000)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    limit_threads(arguments.threads)
    from langchain_rcr.families import backbone, get_family
    from langchain_rcr.families.base import DEFAULT_FAMILY

    with files_of(parser):
        about, *given = read(arguments.data)
    texts = [*(request for pairs in given for request, _ in pairs), *about.values()]
    texts += [f"{name.replace('_', ' ')}: {text}" for name, text in about.items()]
    model = backbone.open_backbone(get_family(DEFAULT_FAMILY).settings())
    shared = StoredVectors(model, list(dict.fromkeys(texts)), arguments.vectors)
    backbone.open_backbone = lambda settings, embeddings=None: shared  # type: ignore[assignment,return-value]

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
    """The mean over seeds and, if they differ, the least and the most."""
    mean, least, most = (f"{value:.1f}" for value in (sum(values) / len(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


if __name__ == "__main__":
    main()
