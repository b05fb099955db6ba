"""What the benchmarks share: thread limits, the loop over cells, Markdown tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def limit_threads(threads: int) -> None:
    """Limit the threads of linear algebra; call it before numpy is imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))


@contextmanager
def files_of(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with one line if a file that the arguments name can't be read."""
    from langchain_rcr.errors import RCRError

    try:
        yield
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except RCRError as error:
        parser.error(str(error))


def sweep(cells: Iterable[tuple[str, Callable[[], Any]]], out: Path | None, **beside: Any) -> dict[str, Any]:
    """Measure one cell after the other, and write the results so far after each.

    Args:
        cells: names, and what measures each.
        out: a JSON file, whose `results` are by name; None: none is written.
        **beside: other entries of the file.
    """
    from langchain_rcr.basics.files import write_json

    results: dict[str, Any] = {}
    for name, measure in cells:
        results[name] = measure()
        if out is not None:
            write_json(out, {**beside, "results": results})
        print(f"{name} done", file=sys.stderr)
    return results


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    from rcr_trainer.evaluation.table import markdown_rows

    return "\n".join(markdown_rows([*head], ([*row] for row in rows)))
