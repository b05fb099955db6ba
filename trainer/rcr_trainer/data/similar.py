"""Questions that nearly repeat an earlier one, in time linear in their number: MinHash, then a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

LIKE = 0.9
"""Jaccard similarity of two questions' groups of letters from which on they count as nearly the same: one letter of 80
may differ."""
_GROUP = 4
_BANDS, _ROWS = 12, 6
"""Two questions are compared where all hashes of a band agree: at a similarity of 0.9 in all but 1 of 10,000 cases, at
0.5 in 17 of 100."""
_WORD = re.compile(r"\w+")
_Hashes = NDArray[np.uint64]


def near_repeats(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Find texts that nearly repeat an earlier one, up to case, punctuation and a few letters.

    Args:
        texts: the questions.

    Returns:
        Positions (earlier, later), one pair for each later text, in ascending order of the later.
    """
    plain = [" ".join(_WORD.findall(text.casefold())) for text in texts]
    first: dict[str, int] = {}
    found: dict[int, int] = {}
    for number, text in enumerate(plain):
        if (earlier := first.setdefault(text, number)) != number:
            found[number] = earlier
    known = [(number, _groups(text)) for text, number in first.items()]
    for earlier, later in _similar([groups for _, groups in known]):
        found[known[later][0]] = known[earlier][0]
    return [(earlier, later) for later, earlier in sorted(found.items())]


def _groups(text: str) -> _Hashes:
    """Hashes of the different groups of four letters in a text, which begins and ends with spaces."""
    padding = " " * (_GROUP - 1)
    letters = np.frombuffer(f"{padding}{text}{padding}".encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    count = len(letters) - _GROUP + 1
    value = np.zeros(count, dtype=np.uint64)
    for place in range(_GROUP):
        value = value * np.uint64(0x9E3779B97F4A7C15) + letters[place : place + count]
    return np.unique(value)


def _similar(sets: Sequence[_Hashes]) -> Iterator[tuple[int, int]]:
    """For each set that is like an earlier one, the two positions."""
    buckets: dict[tuple[int, bytes], tuple[int, int]] = {}
    for later, own in enumerate(sets):
        candidates: dict[int, None] = {}
        for number, band in enumerate(_signature(own).reshape(_BANDS, _ROWS)):
            bucket = (number, band.tobytes())
            # The first and the last of the bucket alone: a full one would be compared in quadratic time.
            oldest, newest = buckets.get(bucket, (later, later))
            candidates |= {oldest: None, newest: None}
            buckets[bucket] = oldest, later
        like = (earlier for earlier in candidates if earlier != later and _likeness(sets[earlier], own) >= LIKE)
        if (earlier := next(like, None)) is not None:
            yield earlier, later


def _likeness(one: _Hashes, other: _Hashes) -> float:
    """Jaccard similarity of two sets."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)


_RANDOM = np.random.default_rng(0).integers(1, 2**63, size=(2, _BANDS * _ROWS, 1), dtype=np.uint64)


def _signature(groups: _Hashes) -> _Hashes:
    """The least of the set's hashes under each of many hash functions."""
    factor, shift = _RANDOM
    least: _Hashes = (((factor | np.uint64(1)) * groups + shift) >> np.uint64(32)).min(axis=1)
    return least
