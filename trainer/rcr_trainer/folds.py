"""Which queries and candidates belong together, so that training and evaluation look at what is new to the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data import Example


def own_positions(
    queries: Sequence[Example], pool: Sequence[Example], spec: ProgramSpec, *, same_program: bool
) -> list[NDArray[np.int64]]:
    """For each query the pool positions that are the query itself or, as an option, have its own program.

    Args:
        queries: examples; one that is also in the pool shares its id, or its question and program, with it.
        pool: the candidates.
        spec: decides what the same program is.
        same_program: also bar candidates with the query's own program.
    """

    def identities(example: Example) -> list[object]:
        own: list[object] = [("id", example.id), ("pair", example.source, example.target)]
        return [*own, ("program", spec.key(example.target))] if same_program else own

    positions: dict[object, list[int]] = {}
    for position, example in enumerate(pool):
        for identity in identities(example):
            positions.setdefault(identity, []).append(position)
    barred = ([n for identity in identities(query) for n in positions.get(identity, ())] for query in queries)
    return [np.unique(np.array(row, dtype=np.int64)) for row in barred]


def taken_from(queries: Sequence[Example], pool: Sequence[Example]) -> bool:
    """Whether queries were taken out of the training questions, so that they are in the pool (by their ids).

    What holds for training queries then holds for them: a closed-form fit has seen their programs, and they get no
    candidate with their own. True where there are no queries.
    """
    return {query.id for query in queries} <= {example.id for example in pool}
