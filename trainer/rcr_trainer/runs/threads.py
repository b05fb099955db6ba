"""The CPU threads of a run. Imports nothing heavy before they are limited."""

from __future__ import annotations

import os


def set_threads(threads: int | None) -> None:
    """Limit the CPU threads of torch and, if numpy is not loaded yet, of its linear algebra; None: no limit.

    Either way, waiting threads sleep: on a busy machine, spinning slows training several-fold.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is None:
        return
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    import torch

    torch.set_num_threads(threads)
