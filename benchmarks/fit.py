"""Seconds and memory of `from_examples`, by the number of examples (COVR's sampler).

    python benchmarks/fit.py --sizes 600,3000,20000 --out fit.json
    python benchmarks/fit.py --one 4000 --threads 1 --profile

Each size runs in its own process. "Encoding" is the time of the frozen text encoder to load and to read questions and
labels; the rest is building, fitting and filling the pool. For comparison, the table gives the one large factorisation
that the fit can't avoid: that of a kernel matrix over as many questions as it is fitted to.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import limit_threads, sweep, table


def measured(size: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Wall-clock and CPU seconds of encoding and of everything else, and this process's peak memory in GB."""
    import torch
    from rcr_trainer.data.covr import covr_split

    from langchain_rcr import SequentialCompositionalRetriever
    from langchain_rcr.families.backbone import TransformerBackbone
    from langchain_rcr.families.base import DEFAULT_BASE
    from langchain_rcr.families.structure import LANDMARKS

    examples = [{"source": e.source, "target": e.target} for e in covr_split("110", 0, size, 0).train]
    encoding = [0.0, 0.0]

    def timed(encode: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter(), time.process_time()
            result = encode(*arguments, **options)
            encoding[0] += time.perf_counter() - start[0]
            encoding[1] += time.process_time() - start[1]
            return result

        return wrapped

    loaded = TransformerBackbone(DEFAULT_BASE)  # imports its modules before the clock starts
    loaded.embed(["warm"])
    TransformerBackbone.__init__ = timed(TransformerBackbone.__init__)  # type: ignore[method-assign]
    TransformerBackbone.embed = timed(TransformerBackbone.embed)  # type: ignore[method-assign]
    TransformerBackbone.read = timed(TransformerBackbone.read)  # type: ignore[method-assign]
    start = time.perf_counter(), time.process_time()
    with profile or contextlib.nullcontext():
        SequentialCompositionalRetriever.from_examples(examples, language="functional")
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kernel = torch.eye(min(size, LANDMARKS), dtype=torch.float64) + 0.01
    factor = -time.process_time()
    torch.linalg.cholesky(kernel)
    factor += time.process_time()
    return {
        "examples": len(examples),
        "encoding_s": round(encoding[0], 1),
        "else_s": round(wall - encoding[0], 1),
        "else_cpu_s": round(cpu - encoding[1], 1),
        "cholesky_cpu_s": round(factor, 2),
        "peak_gb": round(peak / 2**20, 2),
    }


TITLES = ("examples", "encoding, s", "all else, s", "all else, CPU s", "Cholesky factor, CPU s", "peak memory, GB")
"""The table's column titles, in the order of the figures."""


def main() -> None:
    """Measure each size in its own process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="600,3000,20000", help="comma-separated (default 600,3000,20000)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--one", type=int, help="measure one size in this process, and print its figures alone")
    parser.add_argument("--profile", action="store_true", help="with --one: print where the time goes, too")
    arguments = parser.parse_args()
    limit_threads(arguments.threads)
    if arguments.one is not None:
        profile = cProfile.Profile() if arguments.profile else None
        print(json.dumps(measured(arguments.one, profile)))
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumulative").print_stats("langchain_rcr", 50)
        return

    def alone(size: str) -> Callable[[], dict[str, float]]:
        command = [sys.executable, __file__, "--one", size, "--threads", str(arguments.threads)]
        return lambda: json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    results = sweep([(size, alone(size)) for size in arguments.sizes.split(",")], arguments.out)
    rows = ([f"{row['examples']:,}", *(str(figure) for figure in list(row.values())[1:])] for row in results.values())
    print(table(TITLES, rows))


if __name__ == "__main__":
    main()
