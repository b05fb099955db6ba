"""What the encoders' formulas need beyond the functions that NumPy and torch have in common. Doesn't load torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from langchain_rcr.basics.rows import SparseRows


def sparse_rows(rows: Sequence[Mapping[int, float]], dim: int) -> SparseRows:
    """(N, dim) from each row's numbers, by column."""
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    columns = np.fromiter(chain.from_iterable(rows), np.int32, count=starts[-1])
    values = np.fromiter(chain.from_iterable(row.values() for row in rows), np.float32, count=starts[-1])
    return SparseRows(starts, columns, values, dim)


def sums(values: Any, owner: Any, count: int) -> Any:
    """(N, count): sums of values (N, S) with the same `owner` (S,), an ascending column number."""
    if not isinstance(values, np.ndarray):
        return values.new_zeros(len(values), count).index_add(1, owner, values)
    if len(values) == 1:  # faster
        return np.bincount(owner, values[0], minlength=count).astype(values.dtype)[None]
    out = np.zeros((len(values), count), dtype=values.dtype)
    if len(owner):
        firsts = np.flatnonzero(np.diff(owner, prepend=-1))
        out[:, owner[firsts]] = np.add.reduceat(values, firsts, axis=1)
    return out


def norms(values: Any) -> Any:
    """(N, 1): the norm of each row."""
    if not isinstance(values, np.ndarray):
        return values.norm(dim=1, keepdim=True)
    return np.sqrt(np.einsum("nd,nd->n", values, values))[:, None]


def times(values: Any, matrix: Any) -> Any:
    """(N, C): the matrix product of (N, D) and (D, C)."""
    return (values[0] @ matrix)[None] if len(values) == 1 else values @ matrix  # same result in half the time


def shifted(likely: Any, shift: Any, least: float) -> Any:
    """Likelihoods, clipped to `least` … 1 − `least`, with shifted log-odds."""
    if not isinstance(likely, np.ndarray):
        return (likely.logit(least) + shift).sigmoid()
    bounded = likely.clip(least, 1 - least)
    return 1 / (1 + np.exp(-(np.log(bounded / (1 - bounded)) + shift)))


def bag_sums(bags: SparseRows, weight: Any) -> Any:
    """(N, D): for each of N bags over V, the weighted sum of the rows of `weight` (V, D)."""
    if isinstance(weight, np.ndarray):
        return bags.times(weight)
    from torch import from_numpy
    from torch.nn.functional import embedding_bag

    columns, starts, values = (from_numpy(a).to(weight.device) for a in (bags.columns, bags.starts, bags.values))
    return embedding_bag(columns, weight, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
