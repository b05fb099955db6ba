"""What a user's calls cost, against LangChain's: `select_examples`, `batch`, adding, loading.

    python benchmarks/serving.py --out serving.json
    python benchmarks/serving.py --sizes 440,3000,100000 --out serving.json

All sides of a row take turns in one process, one thread each; a figure is the median of their CPU time, and the claim
is the ratio to the peer. Vectors are drawn to look like real ones (pools.py) and looked up, so that encoding costs next
to nothing; large.py is for pools of more than 200,000 examples. The rows with a real encoder read questions with the
model of the extra `offline`. The peer is LangChain's `MaxMarginalRelevanceExampleSelector` over its FAISS store: rows
that need it are left out if the package langchain-community is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from common import limit_threads, sweep
from pools import dense, structures
from ratios import BATCH, markdown

if TYPE_CHECKING:
    import numpy as np
    from langchain_core.embeddings import Embeddings

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.index.base import PoolVectors

K, LAM, FADE, FEW, THREADS = 4, -0.3, 4, 8, 32
SIZES, DEPTHS = (440, 3_000, 100_000), (1, 16, 64)
_ASKED = "0"
_ENOUGH, _LEAST, _MOST = 1.0, 7, 200  # CPU seconds per side, and turns
_PROCESSES = 3  # that each load a pool


def examples(size: int) -> list[dict[str, str]]:
    """A pool in which each question is its own position."""
    return [{"source": f"{n}", "target": f"f{n}(x)"} for n in range(size)]


def timed(
    sides: Mapping[str, Callable[[], Any]], most: int | None = None, seconds: float = _ENOUGH
) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time for each side: median and quartiles over turns in which each runs once."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    start = time.process_time()
    for call in sides.values():
        call()
    slowest = time.process_time() - start
    turns = int(min(most or _MOST, max(_LEAST, seconds * len(sides) / max(slowest, 1e-6))))
    order, random = [*sides.items()], Random(0)
    for _ in range(turns):
        random.shuffle(order)  # in a fixed order, a side would always find what the same other one left in the caches
        for name, call in order:
            start = time.process_time()
            call()
            spent[name].append(1e3 * (time.process_time() - start))
    return {name: spread(times) for name, times in spent.items()}


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    return dict(zip(("low", "ms", "high"), quantiles(times, n=4, method="inclusive"), strict=True))


def retriever(vectors: PoolVectors, queries: np.ndarray, index: Any = None) -> SequentialCompositionalRetriever:
    """Ours over given vectors; a question's text is its position in (Q, D)."""
    import numpy as np

    from langchain_rcr import SequentialCompositionalRetriever, TriEncoder
    from langchain_rcr.basics.rows import Rows, SparseRows, taken
    from langchain_rcr.families import get_family
    from langchain_rcr.families.encoding import BaseEncoder

    class Looked(BaseEncoder):
        """Looks vectors up."""

        def __init__(self, rows: Rows) -> None:
            self.table, self.dim = rows, rows.shape[1]

        def featurize(self, items: Sequence[Any]) -> Any:
            return [item.source for item in items]

        def forward(self, features: Any) -> Any:
            raise NotImplementedError

        def vectors(self, features: Any) -> Any:
            return queries[[int(text) for text in features]]

        def rows(self, features: Any) -> Rows:
            return taken(self.table, np.array([int(text) % len(self.table) for text in features], dtype=np.int64))

    sparse = isinstance(vectors.candidate, SparseRows)
    family = get_family("structure" if sparse else "embeddings")
    settings = family.settings(**({"fade": 4.0} if sparse else {"lam": LAM}))
    candidate, context = Looked(vectors.candidate), Looked(vectors.context)
    model = TriEncoder(Looked(vectors.candidate), context, candidate, settings)
    return SequentialCompositionalRetriever.from_encoder(
        model, examples(len(vectors.candidate)), index=index, k=K, input_keys=["source"], order="picked"
    )


def plain(candidate: np.ndarray, context: np.ndarray, query: np.ndarray, *, saturating: bool = False) -> list[int]:
    """The paper's loop as one would first write it: each step scores all candidates again."""
    import numpy as np

    state, needs, picks = query, np.maximum(query, 0), list[int]()
    for _ in range(K):
        scores = candidate @ state
        scores[picks] = -np.inf
        picks.append(int(scores.argmax()))
        has = context[picks[-1]]
        if saturating:
            share = (needs @ has / ((needs @ needs) * (has @ has)) ** 0.5) ** FADE
            state = state - has * (state - share * query)
        else:
            state = state + LAM * has
    return picks


def given(pool: np.ndarray, query: np.ndarray) -> Embeddings:
    """LangChain embeddings that look vectors up by the position that a text begins with, or else take the first."""
    from langchain_core.embeddings import Embeddings

    class Given(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            first = (text.split()[0] for text in texts)
            vectors: list[list[float]] = pool[[int(word) if word.isdigit() else 0 for word in first]].tolist()
            return vectors

        def embed_query(self, text: str) -> list[float]:
            vector: list[float] = query.tolist()
            return vector

    return Given()


def langchain_mmr(pool: np.ndarray, query: np.ndarray) -> Any:
    """LangChain's selector; None if its FAISS store is not installed."""
    from langchain_core.example_selectors import MaxMarginalRelevanceExampleSelector

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from langchain_community.vectorstores import FAISS
    except ImportError:
        return None
    texts, of = [str(n) for n in range(len(pool))], examples(len(pool))
    store = FAISS.from_embeddings(zip(texts, pool, strict=True), given(pool, query), metadatas=of)
    return MaxMarginalRelevanceExampleSelector(vectorstore=store, k=K, fetch_k=20, input_keys=["source"])


def selecting(size: int) -> dict[str, dict[str, float]]:
    """One question, apart from encoding, and many of them (`together`)."""
    import numpy as np

    vectors, queries = dense(size)
    pool, query, asked = np.asarray(vectors.candidate), queries[0], {"source": _ASKED}
    ours, mmr, scan = retriever(vectors, queries), langchain_mmr(pool, query), scanned(pool)
    has, needs = structures(size)
    sparse = retriever(has, needs)
    as_matrix, covered = np.asarray(has.candidate), np.asarray(has.context)
    sides: dict[str, Callable[[], Any]] = {
        "ours, dense": lambda: ours.select_examples(asked),
        "ours, structures": lambda: sparse.select_examples(asked),
        "one exact FAISS scan": lambda: scan(query),
        "reading all vectors once": pool.max,
        "plain loop, dense": lambda: plain(pool, np.asarray(vectors.context), query),
        "plain loop, structures as a dense matrix": lambda: plain(as_matrix, covered, needs[0], saturating=True),
    }
    if mmr is not None:
        sides["LangChain MMR"] = lambda: mmr.select_examples(asked)
    for k in DEPTHS:
        deep, deeper = ours.model_copy(update={"k": k}), sparse.model_copy(update={"k": k})
        sides[f"ours, dense, k = {k}"] = lambda of=deep: of.select_examples(asked)
        sides[f"ours, structures, k = {k}"] = lambda of=deeper: of.select_examples(asked)
    return timed(sides) | together(ours, sparse, mmr, asked)


def scanned(pool: np.ndarray) -> Callable[[np.ndarray], Any]:
    """FAISS's exact search for the best K of vectors (N, D), by one (D,)."""
    import faiss

    flat = faiss.IndexFlatIP(pool.shape[1])
    flat.add(pool)
    return lambda query: flat.search(query[None], K)


def together(ours: Any, sparse: Any, mmr: Any, asked: dict[str, str]) -> dict[str, dict[str, float]]:
    """64 questions in one call, plain or awaited, or in 64 calls from 32 threads or awaited at once."""
    many, loop = [str(n) for n in range(BATCH)], asyncio.new_event_loop()
    sides: dict[str, Callable[[], Any]] = {
        "ours, dense, 64 together": lambda: ours.batch(many),
        "ours, structures, 64 together": lambda: sparse.batch(many),
        "ours, dense, abatch of 64": lambda: loop.run_until_complete(ours.abatch(many)),
        "ours, structures, abatch of 64": lambda: loop.run_until_complete(sparse.abatch(many)),
        "ours, dense, 8 together": lambda: ours.batch(many[:FEW]),
        "ours, structures, 8 together": lambda: sparse.batch(many[:FEW]),
    }
    with ThreadPoolExecutor(THREADS) as threads:
        at_once: dict[str, Callable[[], Any]] = {}
        for name, of in {"ours, dense": ours, "ours, structures": sparse, "LangChain MMR": mmr}.items():
            if of is not None:
                at_once[f"{name}, 32 threads"] = lambda of=of: list(threads.map(of.select_examples, [asked] * BATCH))
                at_once[f"{name}, 64 awaited at once"] = lambda of=of: loop.run_until_complete(_gathered(of, asked))
        figures = timed(sides) | timed(at_once)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    return figures


async def _gathered(selector: Any, asked: dict[str, str]) -> None:
    await asyncio.gather(*(selector.aselect_examples(asked) for _ in range(BATCH)))


def adding(size: int) -> dict[str, dict[str, float]]:
    """Adding 1,000 examples to a pool repeatedly; both sides have their vectors at hand."""
    import faiss
    import numpy as np

    vectors, queries = dense(size)
    ours = retriever(vectors, queries)
    new = [{"source": str(n), "target": f"g{n}(x)"} for n in range(1_000)]
    some = np.asarray(vectors.candidate)[np.arange(1_000) % size]
    ready = vectors.take(np.arange(1_000) % size)
    ours.store.encoder.encode_pool = lambda items: ready  # type: ignore[method-assign]

    flat = faiss.IndexFlatIP(some.shape[1])
    flat.add(np.asarray(vectors.candidate))
    copies: list[Any] = []

    def add_raw() -> None:
        if not np.isfinite(some).all():
            raise ValueError
        kept = [dict(one) for one in new if one["source"].strip() and one["target"].strip()]
        ids = {f"{n}": n for n in range(len(kept))}
        copies[:] = [kept, ids]
        flat.add(some)

    sides = {"ours, adding 1,000": lambda: ours.add_examples(new), "FAISS with the same checks, adding 1,000": add_raw}
    return timed(sides, 25)


def reading() -> dict[str, dict[str, float]]:
    """Whole calls with the model of the extra `offline`, one question: each family against the bare forward pass."""
    from rcr_trainer.data.covr import covr_split

    from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder

    split = covr_split("110", 0, 600, 20)
    rows = [{"source": e.source, "target": e.target} for e in split.train]
    items = [Item(row["source"], row["target"]) for row in rows]
    fitted = SequentialCompositionalRetriever.from_examples(rows, language="functional", k=K, input_keys=["source"])
    backbone: Any = fitted.store.encoder.backbone
    embeddings = TriEncoder.build("embeddings", items, backbone=backbone, numpy=True)
    learned = SequentialCompositionalRetriever.from_encoder(embeddings, rows, k=K, input_keys=["source"])
    questions = [e.source for e in split.test]

    def asked(call: Callable[[str], Any]) -> Callable[[], Any]:
        turns = itertools.cycle(questions)  # one per side, so that all read the same questions
        return lambda: call(next(turns))

    def selects(of: SequentialCompositionalRetriever, k: int = K) -> Callable[[], Any]:
        picks = of.model_copy(update={"k": k})
        return asked(lambda question: picks.select_examples({"source": question}))

    whole = timed(
        {
            "the model's forward pass": asked(lambda question: backbone.embed([question])),
            "embeddings": selects(learned),
            "embeddings, k = 1": selects(learned, 1),
            "structure": selects(fitted),
            "structure, k = 1": selects(fitted, 1),
        },
        seconds=3 * _ENOUGH,
    )
    return whole | parts(fitted, questions)


def parts(fitted: SequentialCompositionalRetriever, questions: Sequence[str]) -> dict[str, dict[str, float]]:
    """What a question costs the `structure` family besides the model, by part, each right after a forward pass."""
    from langchain_rcr import Item
    from langchain_rcr.policy.selection import Options, select

    store, encoder = fitted.store, fitted.store.encoder
    query: Any = encoder.query
    views = {question: query.views([Item(question)]) for question in questions}
    tokens = {question: query.backbone.read([question])[1] for question in questions}
    features = {question: query.featurize([Item(question)]) for question in questions}
    vectors = {question: query.vectors(features[question]) for question in questions}

    async def picks(question: str) -> Any:
        async with store.index.read() as reader:
            return await select(vectors[question], encoder.state(), Options(K), reader)

    sides: dict[str, Callable[[str], Any]] = {
        "n-grams": lambda question: query.vocabulary.bags([Item(question)]),
        "words in context": lambda question: query.token_bags.vectors(tokens[question]),
        "likeness to training questions": lambda question: query.landmarks.likeness(views[question]),
        "phrases": lambda question: query.local(views[question].bags),
        "structures, from these": lambda question: query.vectors(features[question]),
        "picks": lambda question: store.index.run(picks(question)),
    }
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for question in questions * 5:
        for name, call in sides.items():
            query.backbone.read([question])
            start = time.process_time()
            call(question)
            spent[name].append(1e3 * (time.process_time() - start))
    return {f"structure's part: {name}": spread(times) for name, times in spent.items()}


def loading(size: int) -> dict[str, dict[str, float]]:
    """`from_pretrained` and one question: CPU milliseconds and peak MB of a process, for each side."""
    out: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save(size, Path(folder))
        for side in ("nothing", "ours", "FAISS.load_local"):
            command = [sys.executable, __file__, "--load", folder, "--side", side, "--out", "-"]
            runs = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(_PROCESSES)]
            figures = [run.stdout.split() for run in runs if not run.returncode]
            if figures:
                ms, mb = (median(float(figure[at]) for figure in figures) for at in (0, 1))
                out[f"loading: {side}"] = {"ms": ms, "mb": mb}
    return out


def save(size: int, folder: Path) -> None:
    """Write what `load` reads."""
    import numpy as np

    from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder
    from langchain_rcr.families.backbone import LangChainBackbone

    vectors, queries = dense(size)
    pool = np.asarray(vectors.candidate)
    np.save(folder / "first.npy", np.stack([pool[0], queries[0]]))
    backbone = LangChainBackbone(given(pool, pool[0]))
    model = TriEncoder.build("embeddings", [Item("0", "f0(x)")], backbone=backbone, ngrams=0, numpy=True)
    model.encode_pool = lambda items: vectors  # type: ignore[method-assign]
    SequentialCompositionalRetriever.from_encoder(model, examples(size), k=K, input_keys=["source"]).save(
        folder / "ours"
    )
    mmr = langchain_mmr(pool, queries[0])
    if mmr is not None:
        mmr.vectorstore.save_local(str(folder))


def peak() -> float:
    """Peak MB of this process; on Linux without the parent's memory, which `ru_maxrss` counts there."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def load(folder: Path, side: str) -> None:
    """One side of `loading`: prints CPU milliseconds, and peak MB including imports."""
    import numpy as np

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.families import heads  # noqa: F401 — as in a process that has loaded one before

    probe, query = np.load(folder / "first.npy")
    community: Any = None
    if side != "ours":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from langchain_community.vectorstores import FAISS as community  # noqa: N811
    start = time.process_time()
    if side == "ours":
        embeddings = given(probe[None], probe)
        ours = SequentialCompositionalRetriever.from_pretrained(folder / "ours", embeddings=embeddings, k=K)
        ours.select_examples({"source": _ASKED})
    elif side != "nothing":
        store = community.load_local(str(folder), given(query[None], query), allow_dangerous_deserialization=True)
        store.similarity_search(_ASKED, K)
    spent = time.process_time() - start
    print(1e3 * spent, peak())


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="comma-separated pool sizes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    limit_threads(options.threads)
    logging.disable(logging.WARNING)
    if options.load:
        load(options.load, options.side)
        return 0

    def calls(size: int) -> dict[str, dict[str, float]]:
        return selecting(size) | adding(size) | loading(size)

    cells = [(size, partial(calls, int(size))) for size in options.sizes.split(",")]
    print(markdown(sweep([*cells, ("600, whole calls", reading)], options.out, threads=options.threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
