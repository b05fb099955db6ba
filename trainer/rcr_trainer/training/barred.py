"""Which candidates a query may not get while it trains: itself and, as an option, its own program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rcr_trainer.data import Example
from rcr_trainer.programs import ProgramSpec


def own_positions(
    queries: Sequence[Example], pool: Sequence[Example], spec: ProgramSpec, *, same_program: bool
) -> list[NDArray[np.int64]]:
    """For each query the pool positions that are the query itself or, as an option, have its own program.

    Args:
        queries: examples; one that is also in the pool shares its id with it.
        pool: the candidates.
        spec: decides what the same program is.
        same_program: also bar candidates with the query's own program.
    """
    by_identity: dict[object, list[int]] = {}
    for position, example in enumerate(pool):
        program = spec.key(example.target) if same_program else None
        for identity in (("id", example.id), ("pair", example.source, example.target), ("program", program)):
            by_identity.setdefault(identity, []).append(position)
    out = []
    for query in queries:
        barred = [*by_identity.get(("id", query.id), ()), *by_identity.get(("pair", query.source, query.target), ())]
        if same_program:
            barred += by_identity.get(("program", spec.key(query.target)), ())
        out.append(np.unique(np.asarray(barred, dtype=np.int64)))
    return out
