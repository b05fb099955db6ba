"""Which training programs are held out together, so that training questions are as new to a fit as future ones.

For new programs there are two ways. *By program*: five random folds of whole programs. *By cluster*: programs with
similar structures together, so that a question's combination is new to what is left. In both, a held-out question finds
no program of its fold in the pool, and the fit that predicts its needs has seen none. For recurring programs, *alone*:
five folds of single questions, whose programs other questions may share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.items import Item, text_hash
from langchain_rcr.basics.rows import IntArray
from langchain_rcr.programs import ProgramSpec

FOLDS = 5
"""Number of folds, except by cluster."""
LARGEST = 0.2
"""The largest share of the programs in one fold. The linkage tree is cut so that no cluster is larger. A cut at an
absolute similarity would depend on how much boilerplate all programs of a data set share."""
MOST = 4000
"""The most programs that are clustered; of more, the first by hash. Time and memory grow with their square."""
PROGRAM, CLUSTER, ALONE = 0, 1, 2
"""The ways, as columns of `Folds.numbers`."""
_TURNS = 1000


@dataclass(frozen=True, slots=True)
class Folds:
    """The fold of each training question in each way.

    `programs` maps the hash of a program's key to its folds by program and by cluster (−1: in none), `questions` that
    of a question to its fold alone. A share `new` of the questions is held out with their programs, the others alone.
    """

    programs: Mapping[int, tuple[int, int]]
    questions: Mapping[int, int]
    spec: ProgramSpec
    new: float = 1.0

    @classmethod
    def of(cls, items: Sequence[Item], spec: ProgramSpec, *, new: float = 1.0, seed: int = 0) -> Folds:
        """The folds of training questions with their programs, whatever the questions' order."""
        programs = {text_hash(spec.key(text)): text for text in sorted({item.target for item in items})}
        hashes = sorted(programs)
        clusters = _clusters([spec.structures(programs[key]) for key in hashes[:MOST]]) if new else np.empty(0, int)
        by_cluster = dict(zip(hashes, clusters.tolist(), strict=False))
        by_program = {key: (fold, by_cluster.get(key, -1)) for key, fold in _drawn(hashes, seed)}
        return cls(by_program, dict(_drawn(sorted({text_hash(item.source) for item in items}), seed)), spec, new)

    def of_hashes(self, hashes: Iterable[Sequence[int]]) -> IntArray:
        """(N, 3) folds of examples, from the hashes of their question and their program's key; −1: none."""
        folds = [
            (*self.programs.get(program, (-1, -1)), self.questions.get(question, -1)) for question, program in hashes
        ]
        return np.array(folds, dtype=np.int64).reshape(-1, 3)

    def numbers(self, items: Sequence[Item]) -> IntArray:
        """(N, 3) folds of examples, by program, by cluster and alone; −1: none."""
        return self.of_hashes((text_hash(item.source), text_hash(self.spec.key(item.target))) for item in items)

    def ways(self, items: Sequence[Item]) -> IntArray:
        """(N,) the way in which each is held out; half of those held out with their programs go by cluster."""
        hashes = np.array([text_hash(item.source) for item in items], dtype=np.int64)
        together = np.where(self.numbers(items)[:, CLUSTER] < 0, PROGRAM, hashes % 2)
        return np.where(hashes // 2 % _TURNS < round(self.new * _TURNS), together, ALONE)


def _drawn(hashes: Sequence[int], seed: int) -> Iterable[tuple[int, int]]:
    """Pairs each with one of `FOLDS` folds of equal size."""
    order = np.random.default_rng([seed, 7]).permutation(len(hashes))
    return zip(hashes, (np.argsort(order) % FOLDS).tolist(), strict=True)


def _clusters(programs: Sequence[frozenset[str]]) -> IntArray:
    """(N,) clusters of programs by average linkage of the Jaccard distance of their structures."""
    if len(programs) < 2:
        return np.zeros(len(programs), dtype=np.int64)
    require("scipy", "train")
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.sparse import csr_array
    from scipy.spatial.distance import squareform

    column = {name: number for number, name in enumerate(frozenset[str]().union(*programs))}
    starts = np.cumsum([0, *map(len, programs)])
    places = np.fromiter((column[name] for names in programs for name in names), np.int64, count=starts[-1])
    have = csr_array((np.ones(len(places), np.float32), places, starts), shape=(len(programs), len(column)))
    shared, sizes = (have @ have.T).toarray(), np.diff(starts).astype(np.float32)
    distances = 1 - shared / np.maximum(sizes[:, None] + sizes - shared, 1)
    tree = linkage(squareform(distances, checks=False), "average")
    _, _, heights, counts = tree.T  # of each merge, and of the cluster that it makes
    lowest = heights[counts > max(1, LARGEST * len(programs))].min(initial=np.inf)
    return np.asarray(fcluster(tree, np.nextafter(lowest, -1), "distance") - 1, dtype=np.int64)
