"""What the benchmarks share: threads, the loop over cells, tables in Markdown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any


def limit_threads(threads: int) -> None:
    """Limit the threads of linear algebra; to be called before numpy is imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))


def sweep(
    cells: Iterable[tuple[str, Callable[[], Any]]], write: Callable[[dict[str, Any]], None] = lambda results: None
) -> dict[str, Any]:
    """Measure one cell after the other, and write what there is after each."""
    results: dict[str, Any] = {}
    for name, measure in cells:
        results[name] = measure()
        write(results)
        print(f"{name} done", file=sys.stderr)
    return results


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    from rcr_trainer.evaluation.table import markdown_rows

    return "\n".join(markdown_rows([*head], ([*row] for row in rows)))
