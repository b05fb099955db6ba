"""Which candidates a query may not get, so that training and evaluation use questions new to the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from langchain_rcr.basics.items import Item, readable
from langchain_rcr.basics.rows import BoolArray, IntArray
from langchain_rcr.families.encoding import Features
from langchain_rcr.families.folds import ALONE, Folds
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from rcr_trainer.data.arrays import distinct
from rcr_trainer.data.coverage import structure_matrices
from rcr_trainer.data.examples import Example
from rcr_trainer.errors import DataError

_MOST = 0.5
"""The largest share of the pool, or of a query's group, that a fold may bar; a very common program would bar more."""
_COMMON = 0.2
"""The largest share of the pool that may have a pair of labels for that pair to be barred."""


class Barred(Sequence[IntArray]):
    """For each of Q queries, the pool positions that it may not get, ascending; found anew whenever they are read.

    These are its own (by id, or `Example.plain`), those of other groups, and those of its fold. Kept, they would take
    Q × N numbers: with groups, most of the pool is barred.

    Args:
        with_program: whether candidates with the query's own program are barred, too; one for all or (Q,).
        folds: for each query, the positions of its fold, which are barred unless they are over half of its group.
    """

    def __init__(
        self,
        queries: Sequence[Example],
        pool: Sequence[Example],
        spec: ProgramSpec,
        with_program: bool | BoolArray = False,
        folds: Sequence[IntArray] | None = None,
    ) -> None:
        with_program = np.broadcast_to(with_program, len(queries))
        keyed = with_program.any()  # else no program needs to be read
        programs: list[str | None] = [spec.key(each.target) if keyed else "" for each in pool]
        programs += [spec.key(each.target) if own else None for each, own in zip(queries, with_program, strict=True)]
        every = [*pool, *queries]
        ids, texts, groups = ([getattr(each, trait) for each in every] for trait in ("id", "plain", "group"))
        # Equal traits have equal numbers.
        numbers = np.array([distinct(each)[1] for each in (ids, texts, programs, groups)], dtype=np.int32)
        self._pool, self._queries = numbers[:, : len(pool)], numbers[:, len(pool) :].T  # (4, N), (Q, 4)
        self._folds = folds

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[row] for row in range(len(self))[at]]
        same = self._pool == self._queries[at][:, None]
        barred: BoolArray = same[0] | same[1] | same[2] | ~same[3]
        if self._folds is not None:
            mates = self._folds[at][same[3, self._folds[at]]]
            if len(mates) <= _MOST * np.count_nonzero(same[3]):
                barred[mates] = True
        return np.flatnonzero(barred)


def check_pool_size(stage: str, forbidden: Sequence[IntArray], size: int, k: int, *, own_program: bool) -> int:
    """The fewest candidates that the pool leaves a training query; refuses fewer than k.

    `own_program`: whether candidates with a query's own program may be forbidden, too.
    """
    left = size - max((len(row) for row in forbidden), default=0)
    if left < k:
        allowing = f", or set {stage}.exclude_own_program: false" if own_program else ""
        raise DataError(
            f"the pool of {size} examples leaves a training query only {left} to pick from, fewer than "
            f"k = {k}: give more examples, or lower {stage}.k{allowing}"
        )
    return left


class HeldOut:
    """Training questions treated as new: neither the fit nor the pool has seen their folds.

    These are those of the pool and `queries`; a share `new` of them is held out together with their programs.
    """

    def __init__(
        self, pool: Sequence[Example], queries: Sequence[Example], spec: ProgramSpec, *, new: float = 1.0, seed: int = 0
    ) -> None:
        self.pool, self.spec = pool, spec
        self.folds = Folds.of(_items([*pool, *queries]), spec, new=new, seed=seed)
        self._numbers = self.folds.numbers(_items(pool))

    def barred(self, queries: Sequence[Example]) -> Barred:
        """For each training question, the pool positions that it may not get: itself and its fold."""
        items = _items(queries)
        ways = self.folds.ways(items)
        numbers = self.folds.numbers(items)[np.arange(len(ways)), ways]

        @cache
        def mates(way: int, number: int) -> IntArray:
            return np.flatnonzero((number >= 0) & (self._numbers[:, way] == number))

        folds = [mates(way, number) for way, number in zip(ways.tolist(), numbers.tolist(), strict=True)]
        return Barred(queries, self.pool, self.spec, ways != ALONE, folds)

    def judging(self, queries: Sequence[Example]) -> Barred:
        """`barred` for development questions taken out of training; for others, only themselves."""
        return self.barred(queries) if taken_from(queries, self.pool) else Barred(queries, self.pool, self.spec)

    def with_program(self, queries: Sequence[Example]) -> BoolArray:
        """(Q,) whether each question is held out with its program, not alone."""
        return np.asarray(self.folds.ways(_items(queries)) != ALONE)

    def without_combination(self, queries: Sequence[Example]) -> list[IntArray]:
        """`barred`, and for each question the candidates that have both labels of a certain pair in its program.

        So it combines what no remaining candidate does. The pair is the one that most candidates have, among pairs that
        at most a share of `_COMMON` have.
        """
        spec = replace(self.spec, max_size=1)
        pool, needed = structure_matrices(spec, [e.target for e in self.pool], [q.target for q in queries])
        columns, barred = pool.tocsc(), [*self.barred(queries)]
        for at in range(len(queries)):
            own = columns[:, needed[[at]].indices]
            together = np.triu((own.T @ own).toarray(), 1)
            together[together > _COMMON * len(self.pool)] = 0
            if together.any():
                pair = own[:, [*np.unravel_index(together.argmax(), together.shape)]]
                barred[at] = np.union1d(barred[at], np.flatnonzero(pair.sum(axis=1) == 2))
        return barred

    def features(self, model: TriEncoder, queries: Sequence[Example]) -> Features:
        """Features of training questions, as if E_x had not been fitted to their folds."""
        items = _items(queries)
        return model.family.held_out(model.query, items, self.folds, self.folds.ways(items))


def share_held_out(
    given: bool | None, queries: Sequence[Example], dev: Sequence[Example], pool: Sequence[Example], spec: ProgramSpec
) -> float:
    """The share of training questions to hold out with their programs, so that they are as new as future questions.

    `given` is `exclude_own_program`: true for all, false for none, None to estimate it.

    A question is new if no example of the pool has its program. The expected share is that of the development questions
    or, if those were taken from training, that of the training questions, each not counting itself.
    """
    if given is not None:
        return float(given)
    known = Counter(spec.key(example.target) for example in pool)
    inside = {example.id for example in pool}

    def new(examples: Sequence[Example]) -> float:
        return sum(known[spec.key(e.target)] <= (e.id in inside) for e in examples) / max(1, len(examples))

    own, dev = new(queries), [] if taken_from(dev, pool) else dev
    coming = new(dev) if dev else own
    return max(0.0, coming - own) / (1 - own) if own < 1 else 1.0


def _items(examples: Sequence[Example]) -> list[Item]:
    return readable(example.item for example in examples)


def taken_from(queries: Sequence[Example], pool: Sequence[Example]) -> bool:
    """Whether all queries, if any, are in the pool (by id), so that the fit has seen their programs."""
    return {query.id for query in queries} <= {example.id for example in pool}
