"""From scores to ranks, purely on arrays: the best candidates with ties resolved, log partitions, blocks of scores."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.errors import InputError
from langchain_rcr.index.base import TIE

_BLOCK = 1 << 26
"""Scores held at once (256 MiB of float32): queries are searched in blocks of this many scores."""

Near: TypeAlias = tuple[IntArray, FloatArray]
"""Keys and logits: of one state's candidates, (W,) each, or as in `Hits`, (B, t)."""

Ranked: TypeAlias = tuple[IntArray, FloatArray, DoubleArray | None]
"""Keys and logits (B, t) as in `Hits`, and, if there is a τ, log partitions (B,)."""

MORE = 8
"""Candidates fetched beyond those needed: for ties, and for the next step."""


def best(scores: FloatArray, slack: FloatArray, t: int) -> Near:
    """The t best columns (B, t) of each row of scores (B, N ≥ 1), and their scores (B, t), best first.

    Scores of what may not be found are −inf, and so are those of columns −1, where nothing is left. A score up to
    `slack` (B,) below the row's best that is left counts as a tie with it; the lowest column wins.
    """
    if t > 1:
        return best_of(near_best(scores, slack, t), slack, t)
    if len(scores) == 1:  # faster without arrays of one
        line = scores[0]
        top = line[line.argmax()]
        key = (line >= top - slack[0]).argmax() if top > -np.inf else -1
        return np.array([[key]]), np.array([[line[key]]])
    floor = scores.max(axis=1) - slack
    first = (scores >= floor[:, None]).argmax(axis=1)
    logits = scores[np.arange(len(first)), first]
    first[logits == -np.inf] = -1
    return first[:, None], logits[:, None]


def best_of(candidates: Iterable[Near], slack: FloatArray, t: int) -> Near:
    """The result of `best`, from the columns that can be among the t best of each row, and their scores."""
    keys, logits = nothing(len(slack), t)
    for row, (near, values) in enumerate(candidates):
        found, value = in_order(near, values, float(slack[row]), t)
        keys[row, : len(found)], logits[row, : len(found)] = found, value
    return keys, logits


def near_best(scores: FloatArray, slack: FloatArray, t: int) -> Iterator[Near]:
    """For each row the columns that can be among its t best, and their scores: the rest is lower by over the slack."""
    if t == 1:
        floor = scores.max(axis=1) - slack
    else:
        at = max(0, scores.shape[1] - t)
        floor = np.partition(scores, at, axis=1)[:, at] - slack
    floor = np.maximum(floor, np.finfo(np.float32).min)  # excludes what may not be found
    for values, least in zip(scores, floor, strict=True):
        near = np.flatnonzero(values >= least)
        yield near, values[near]


def in_order(keys: IntArray, scores: FloatArray, slack: float, t: int) -> Near:
    """The t best of one row's distinct candidates (W,), whose scores are finite, as `best` orders them."""
    order = np.lexsort((keys, -scores))
    keys, scores = keys[order], scores[order]
    apart = scores[:-1] - scores[1:] > slack
    if apart[:t].all():
        return keys[:t], scores[:t]
    starts = np.append(True, apart)[: len(keys)]
    run = np.cumsum(starts)
    if (scores[starts][run - 1] - scores <= slack).all():  # runs of ties
        order = np.lexsort((keys, run))[:t]
        return keys[order], scores[order]
    order = np.argsort(keys)
    keys, left = keys[order], scores[order].copy()
    scores = scores[:t].copy()
    at = np.empty(len(scores), dtype=np.int64)
    for step in range(len(scores)):
        at[step] = (left >= left.max() - slack).argmax()
        scores[step] = left[at[step]]
        left[at[step]] = -np.inf
    return keys[at], scores


async def best_fetched(
    fetch: Callable[[FloatArray, int], Awaitable[Sequence[Near]]],
    states: FloatArray,
    t: int,
    exclude: IntArray,
    slack: FloatArray,
    size: int,
    *,
    rounding: float = 0.0,
    most: int = 1024,
) -> Near:
    """The result of `best` on a remote pool: fetches more until nothing left out can change it.

    Args:
        fetch: states (M, D) and a width → for each state keys and logits of its `width` nearest candidates, in any
            order; fewer if there are fewer.
        states: (B, D).
        t: how many.
        exclude: (B, E) for each state keys to leave out.
        slack: (B,) as for `best`.
        size: how many candidates there are.
        rounding: the error in the order of `fetch`, relative to |state|.
        most: the most candidates fetched to settle which of many ties comes first.
    """
    keys, logits = nothing(len(states), t)
    barred = [np.unique(row) for row in exclude]
    near = slack + np.float32(rounding) * np.sqrt(np.einsum("bd,bd->b", states, states))
    left = list(range(len(states)))
    width = t + max(map(len, barred), default=0) + MORE
    most = max(width, most)
    while left and size:
        width, unsettled = min(width, size), []
        for at, (found, scores) in zip(left, await fetch(states[left], width), strict=True):
            there = ~np.isin(found, barred[at])
            chosen, values = in_order(found[there], scores[there], float(slack[at]), t)
            keys[at, : len(chosen)], logits[at, : len(chosen)] = chosen, values
            settled = len(chosen) == t and scores.min() < values[-1] - near[at]
            if not settled and len(found) == width < min(size, most):
                unsettled.append(at)
        left, width = unsettled, min(8 * width, most)
    return keys, logits


def slack(states: FloatArray, longest: float) -> FloatArray:
    """How far apart tied logits of each state may lie (B,), given max |E_c|; an `InputError` if one is not finite."""
    lengths = [math.sqrt(state.dot(state)) for state in states]
    if not math.isfinite(longest + sum(lengths)):
        msg = "vectors of queries or examples are not finite numbers: the encoder or its embeddings are broken"
        raise InputError(msg)
    return np.array([TIE * longest * length for length in lengths], dtype=np.float32)


def log_sums(scores: FloatArray, tau: float) -> DoubleArray:
    """Log Σ exp(score / τ) of each row of (B, N ≥ 1) scores, (B,); overwrites the scores."""
    top = scores.max(axis=1)
    shift = np.where(np.isfinite(top), top, np.float32(0.0))
    scores -= shift[:, None]
    scores *= np.float32(1 / tau)
    np.exp(scores, out=scores)
    with np.errstate(divide="ignore"):
        totals: DoubleArray = np.log(scores.sum(axis=1, dtype=np.float64)) + shift.astype(np.float64) / tau
    return totals


def blocks(rows: int, columns: int, most: int | None = None) -> Iterator[slice]:
    """Slices of `rows` rows, each with at most `most` scores (None: `_BLOCK`), but at least one row."""
    height = max(1, (most or _BLOCK) // max(1, columns))
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def checked_exclude(exclude: Sequence[Collection[int]] | None, n_queries: int, n_pool: int, k: int) -> list[IntArray]:
    """The positions that each query may not pick, without repeats; an `InputError` if that leaves fewer than k."""
    if k < 1:
        raise InputError(f"k is {k}; it must be at least 1")
    exclude = [()] * n_queries if exclude is None else exclude
    if len(exclude) != n_queries:
        raise InputError(f"exclude has {len(exclude)} entries for {n_queries} queries")
    excluded = [np.unique(np.fromiter(entry, dtype=np.int64, count=len(entry))) for entry in exclude]
    for query, entry in enumerate(excluded):
        if entry.size and not (entry[0] >= 0 and entry[-1] < n_pool):
            raise InputError(f"exclude[{query}] names a position outside the pool of {n_pool}")
    left = n_pool - max((entry.size for entry in excluded), default=0)
    if k > left:
        detail = f" ({n_pool - left} of {n_pool} excluded)" if left < n_pool else ""
        raise InputError(f"k is {k}, but there are only {left} examples to pick from{detail}")
    return excluded


def nothing(rows: int, t: int) -> Near:
    """Keys and logits (B, t) for `Hits` if nothing is found: −1 and −inf."""
    return filled((rows, t), -1, np.int64), filled((rows, t), -np.inf, np.float32)


def filled(shape: tuple[int, ...], value: float, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """`np.full`, in a fifth of the time for small arrays."""
    out = np.empty(shape, dtype=dtype)
    out.fill(value)
    return out
