"""What the benchmarks share."""

from __future__ import annotations

import os


def limit_threads(threads: int) -> None:
    """Limit the threads of linear algebra; to be called before numpy is imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
