"""Arrays over a pool: the best positions, equal values counted once, blocks of scores that fit in memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from langchain_rcr.index.ranking import blocks

ValueT = TypeVar("ValueT", bound=Hashable)

_BLOCK_ELEMENTS = 1 << 23  # queries × candidates held dense at once: 32 MiB in float32


def row_blocks(n_rows: int, n_columns: int, most: int | None = None) -> Iterator[slice]:
    """Slices over n_rows such that dense blocks (rows, n_columns) have at most `most` elements (default 8 million)."""
    return blocks(n_rows, n_columns, most or _BLOCK_ELEMENTS)


def distinct(values: Sequence[ValueT]) -> tuple[list[ValueT], np.ndarray]:
    """The distinct values, and the place (N,) of each value among them: equal ones, computed once, tie exactly."""
    rows = {value: row for row, value in enumerate(dict.fromkeys(values))}
    return list(rows), np.array([rows[value] for value in values], dtype=np.int64)


def top_k(scores: np.ndarray, k: int, excluded: Sequence[np.ndarray] = ()) -> np.ndarray:
    """The k best positions of each row, (B, k), best first, ties to the lowest; excluded scores (B, N) become −inf."""
    for line, barred in zip(scores, excluded, strict=False):
        line[barred] = -np.inf
    threshold = np.partition(scores, scores.shape[1] - k, axis=1)[:, -k]
    picked = np.empty((len(scores), k), dtype=np.int64)
    for row, (values, least) in enumerate(zip(scores, threshold, strict=True)):
        candidates = np.flatnonzero(values >= least)
        picked[row] = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return picked
