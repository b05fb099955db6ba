"""Greedy picks of a policy as it trains, and the development queries that judge it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from langchain_rcr.basics.items import readable
from langchain_rcr.families.encoder import Features
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.selection import greedy
from rcr_trainer.data.held_out import HeldOut, own_positions, taken_from
from rcr_trainer.training.runner import Job
from rcr_trainer.training.supervision import IntArray, Supervision


def greedy_picks(
    job: Job, features: Features, forbidden: Sequence[IntArray], rows: IntArray, pool: PoolVectors, k: int
) -> IntArray:
    """(n, k) picks of the policy as it is for n of the queries (`rows`); each process computes a share."""
    mine = rows[job.processes.part(len(rows))]
    picks = np.empty((0, k), dtype=np.int64)
    if len(mine):
        vectors, barred = job.model.query.vectors(features.select(mine)), [forbidden[row] for row in mine]
        picks = greedy(vectors, pool, job.model.state(), k, exclude=barred).positions
    return job.processes.gather(picks, len(rows))


class Development:
    """The development queries whose programs parse; those taken out of training are seen as held out."""

    def __init__(self, job: Job, held_out: HeldOut) -> None:
        self.job, self.held_out = job, held_out
        self.queries = [query for query in job.dev if job.spec.structures(query.target)]
        self.are_training = taken_from(job.dev, job.pool)
        own = held_out.barred(self.queries) if self.are_training else own_positions(self.queries, job.pool, job.spec)
        self.supervision = Supervision(self.queries, job.pool, job.spec, own, reachable=True)

    @cached_property
    def features(self) -> Features:
        """Computed when they are first needed: after a closed-form fit."""
        if self.are_training:
            return self.held_out.features(self.job.model, self.queries)
        return self.job.model.query.featurize(readable(query.item.asked for query in self.queries))

    def picks(self, pool: PoolVectors, k: int) -> IntArray:
        """(Q, k) greedy picks, see `greedy_picks`."""
        rows = np.arange(len(self.queries))
        return greedy_picks(self.job, self.features, self.supervision.forbidden, rows, pool, k)
