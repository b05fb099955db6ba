"""One question to a large pool, exactly and by inverted lists, against one exact FAISS scan of its dense vectors.

    python benchmarks/large.py --sizes 100000,1000000 --out large.json

Pools and timing are serving.py's; a million examples take ten minutes and 11 GB. "lost" is the share by which the
logits of picks by inverted lists (`FaissIndex("ivf")`) fall short of the exact ones, summed over 64 questions. The scan
is timed beside both kinds of vectors; the table shows the one beside the sparse ones.

Of more than two million examples only structures are searched (`mapped`): dense vectors of ten million take 15 GB.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import limit_threads, sweep
from pools import COLUMNS, QUESTIONS, dense, structures
from ratios import markdown
from serving import FADE, K, retriever, scanned, timed

if TYPE_CHECKING:
    import numpy as np

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.index.base import PoolVectors

Figures = dict[str, dict[str, float]]
_WHOLE = 2_000_000
"""The most examples of which both kinds of vectors are searched, by whole calls."""


def searching(size: int) -> Figures:
    """Both kinds of vectors, one after the other."""
    import numpy as np

    if size > _WHOLE:
        return mapped(size)

    vectors, queries = dense(size)
    scan = partial(scanned(np.asarray(vectors.candidate)), queries[0])
    figures = compared("dense", vectors, queries, scan)
    del vectors
    return figures | compared("structures", *structures(size), scan)


def compared(kind: str, vectors: PoolVectors, queries: np.ndarray, scan: Callable[[], Any]) -> Figures:
    """Exact search, inverted lists and the scan, in turn."""
    from langchain_rcr.index.faiss import FaissIndex

    exact, lists = retriever(vectors, queries), retriever(vectors, queries, FaissIndex("ivf"))
    name, other = f"ours, {kind}", f"ours, {kind}, in inverted lists"
    calls = {side: partial(of.select_examples, {"source": "0"}) for side, of in ((name, exact), (other, lists))}
    figures = timed(calls | {"one exact FAISS scan": scan})
    figures[other]["lost"] = 1 - logits(lists) / logits(exact)
    return figures


def mapped(size: int) -> Figures:
    """Structures read from files that are mapped into memory: a call's picks, without the examples themselves."""
    import numpy as np

    from langchain_rcr.basics.rows import TRIALS, SparseRows
    from langchain_rcr.families.state import make_state
    from langchain_rcr.index.base import InThisThread, PoolVectors
    from langchain_rcr.index.memory import ColumnTable, MatrixTable
    from langchain_rcr.policy.selection import Options, select

    with tempfile.TemporaryDirectory() as folder:
        vectors, queries = structures(size)
        arrays = {"starts": vectors.candidate.starts, "columns": vectors.candidate.columns}
        arrays |= {"values": vectors.candidate.values, "ones": vectors.context.values}
        for name, array in arrays.items():
            np.save(f"{folder}/{name}.npy", array)
        del vectors, arrays
        starts, columns, values, ones = (
            np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("starts", "columns", "values", "ones")
        )
        mapping = PoolVectors(SparseRows(starts, columns, values, COLUMNS), SparseRows(starts, columns, ones, COLUMNS))
        exact, state = MatrixTable(mapping), make_state("saturating", 1.0, FADE)
        lists = ColumnTable(mapping)

        def picked(table: MatrixTable, question: int = 0) -> float:
            at = slice(question, question + 1)
            return float(InThisThread().run(select(queries[at], state, Options(K), table.opened())).logits.sum())

        sides = {"ours, structures": exact, "ours, structures, in inverted lists": lists}
        for table in sides.values():  # as many as lay out its columns
            for question in range(TRIALS + 1):
                picked(table, question)
        figures = timed({name: partial(picked, table) for name, table in sides.items()})
        exactly, nearly = (sum(picked(table, n) for n in range(QUESTIONS)) for table in (exact, lists))
        figures["ours, structures, in inverted lists"]["lost"] = 1 - nearly / exactly
        return figures


def logits(of: SequentialCompositionalRetriever) -> float:
    """The sum of the picks' logits over all questions, each asked alone."""
    return sum(pick.metadata["logit"] for n in range(QUESTIONS) for pick in of.invoke(f"{n}"))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="100000", help="comma-separated pool sizes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    limit_threads(1)
    logging.disable(logging.WARNING)
    cells = [(size, partial(searching, int(size))) for size in options.sizes.split(",")]
    print(markdown(sweep(cells, options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
