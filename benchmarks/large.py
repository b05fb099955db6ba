"""One question to a large pool, exactly and by inverted lists, against one exact FAISS scan of its dense vectors.

    python benchmarks/large.py --sizes 100000,1000000 --out large.json

Pools and timing are serving.py's; a million examples take some ten minutes and 11 GB. "lost" is the share by which the
logits of picks by inverted lists (`FaissIndex("ivf")`) fall short of the exact ones, summed over 64 questions. The scan
is timed beside both kinds of vectors; the table shows the one beside the sparse ones.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import limit_threads, sweep
from pools import QUESTIONS, dense, structures
from serving import markdown, retriever, scanned, timed

if TYPE_CHECKING:
    import numpy as np

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.index.base import PoolVectors

Figures = dict[str, dict[str, float]]


def searching(size: int) -> Figures:
    """Both kinds of vectors, one after the other."""
    import numpy as np

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
