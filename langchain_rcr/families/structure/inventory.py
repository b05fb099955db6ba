"""The structures behind the vectors' coordinates, read from the pool's programs; the same for queries and pool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from langchain_rcr.basics.items import text_hash
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import BoolArray, FloatArray, IntArray, SparseRows
from langchain_rcr.families.encoding import Vocabulary
from langchain_rcr.programs import TOKENS, ProgramSpec, Tree, anonymize, local_structures, parse

SPARE = 64
"""Columns of every vector that are kept free for labels that come in after training."""
MARKS = 3
"""How many of them a label takes: with three, two labels hardly ever share all."""
PHRASED = 2
"""Nodes of the largest structures that a question's phrases speak for."""
_UNREAD = "~"
"""Prefix of the labels of a program that doesn't parse, which are its tokens."""
_MOST_UNREAD = 4_000
"""Characters read of such a program: enough to tell programs apart."""
_LINK = re.compile(" (->|<->) ")


class Inventory(Vocabulary):
    """Columns of local structures. Structures that no program of the pool tells apart share a column."""

    def __init__(self, spec: ProgramSpec, columns: Sequence[Sequence[str]]) -> None:
        self.spec = spec
        self.columns = [tuple(names) for names in columns]
        self._number = {name: number for number, names in enumerate(self.columns) for name in names}
        self.sizes = np.array([len(names) for names in self.columns], dtype=np.float32)
        """(D,) how many structures each column stands for."""
        self.names = list(self._number)
        """The S structures, column by column."""
        self.owner = np.array(list(self._number.values()), dtype=np.int64)
        """(S,) the column of each structure."""

    @classmethod
    def fit(cls, spec: ProgramSpec, programs: Sequence[str], limit: int) -> Inventory:
        """The structures of a pool; of more columns than `limit`, those that make up most of the programs."""
        found = Counter(_structures(spec, text) for text in programs)
        owners: dict[str, list[int]] = {}
        for number, names in enumerate(found):
            for name in names:
                owners.setdefault(name, []).append(number)
        merged: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(owners):
            merged.setdefault(tuple(owners[name]), []).append(name)
        share = [count / max(1, len(names)) for names, count in found.items()]
        worth = {owner: len(names) * sum(share[number] for number in owner) for owner, names in merged.items()}
        kept = sorted(merged, key=lambda owner: (-worth[owner], merged[owner][0]))[:limit]
        return cls(spec, sorted(merged[owner] for owner in kept))

    def __len__(self) -> int:
        return len(self.columns)

    def rows(self, programs: Sequence[str], *, spare: bool = False) -> SparseRows:
        """(N, columns) the share of each column's structures that each program has.

        With `spare`, the columns of new labels follow. Other new structures have no column.
        """
        read: dict[str, dict[int, float]] = {}
        for text in track([*dict.fromkeys(programs)], "reading programs"):
            counts = Counter(self._number[name] for name in _structures(self.spec, text) if name in self._number)
            read[text] = {column: counts[column] / float(self.sizes[column]) for column in sorted(counts)}
            if spare:
                places = sorted({place for marks in self.spare(text).values() for place in marks})
                read[text] |= {len(self) + place: 1.0 for place in places}
        return SparseRows.of([read[text] for text in programs], len(self) + (SPARE if spare else 0))

    def spare(self, program: str) -> dict[str, list[int]]:
        """The program's labels that the inventory lacks, each with its places among the `SPARE` columns.

        A program that doesn't parse and has no token in the inventory is a single label.
        """
        labels = [name for name in self.spec.structures(program) if name not in self._number and not _LINK.search(name)]
        if not labels and not any(name in self._number for name in _structures(self.spec, program)):
            labels = [f"{_UNREAD}{text_hash(self.spec.key(program))}"] if program.strip() else []
        return {label: list(marks(label, SPARE, MARKS)) for label in sorted(labels)}

    def has(self, program: str) -> BoolArray:
        """(S,) which structures a program has: none if it doesn't parse."""
        found = self.spec.structures(program)
        return np.fromiter((name in found for name in self.names), dtype=np.bool_, count=len(self.names))

    @cached_property
    def small(self) -> IntArray:
        """(C,) the columns with a structure that phrases may speak for."""
        return np.unique(self.owner[self.lengths <= PHRASED])

    @cached_property
    def lengths(self) -> FloatArray:
        """(S,) nodes of each structure."""
        return np.array([1 + len(_LINK.findall(name)) for name in self.names], np.float32)

    @cached_property
    def unread(self) -> BoolArray:
        """(S,) the structures of programs that don't parse."""
        return np.array([any(label[:1] == _UNREAD for label in _LINK.split(name)) for name in self.names], np.bool_)

    def to_json(self) -> dict[str, Any]:
        """See `Vocabulary.to_json`."""
        return {"spec": self.spec.to_json(), "columns": self.columns}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Inventory:
        """See `Vocabulary.from_json`; a `ValueError` if a structure occurs twice or is too large for the spec."""
        inventory = cls(ProgramSpec.from_json(value["spec"]), value["columns"])
        if len(inventory.names) < sum(map(len, inventory.columns)):
            raise ValueError("a structure stands in two columns")
        if inventory.lengths.max(initial=1) > inventory.spec.max_size:
            raise ValueError(f"a structure has more than {inventory.spec.max_size} nodes")
        return inventory


def _structures(spec: ProgramSpec, program: str) -> frozenset[str]:
    """A program's structures, or those of its tokens if it doesn't parse, which no parsed program shares."""
    found = spec.structures(program)
    if found or (tree := parse(program[:_MOST_UNREAD], TOKENS)) is None:
        return found
    tree = anonymize(tree, everywhere=True).fold(lambda label, below: Tree(f"{_UNREAD}{label}", tuple(below)))
    return local_structures(tree, spec.max_size)


@lru_cache(maxsize=4096)
def marks(label: str, count: int, most: int) -> tuple[int, ...]:
    """Which `most` of `count` columns a label takes, by its hash."""
    return tuple(sorted(range(count), key=lambda place: text_hash(f"{place} {label}"))[:most])
