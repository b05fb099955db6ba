"""Stage 1 (section 3.1): supervised fine-tuning of a TriEncoder, top to bottom.

Departures from the paper, each with the setting that undoes it:
- the default loss is listwise over soft gains, not InfoNCE against one positive (`loss: infonce`);
- later in training, a share of the states comes from the policy's own picks, not Algorithm 1's (`on_policy: 0`);
- steps at which no candidate covers anything new are skipped (`zero_gain_steps: true` trains on their ties);
- candidates that add as much as the positive are masked from InfoNCE's negatives (`mask_equals: false`);
- a query never gets itself, nor, by default, its own program (`exclude_own_program: false`);
- gradients are clipped to a norm (`max_grad_norm: null`);
- training stops early on development coverage (`patience: null`) and keeps the best weights (`keep: last`).

If the family has a closed-form fit of E_x (`Family.fit`), that runs first, and gradient descent continues from it.

With several processes, each has its own batches for the listwise loss, as in gradient accumulation. InfoNCE draws its
candidates from the batch, so its batch grows with the number of processes; each takes a share of rows and candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.basics.items import readable
from langchain_rcr.basics.rows import IntArray
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.encoding import Features
from langchain_rcr.index.base import PoolVectors
from rcr_trainer.data.held_out import Barred, HeldOut, check_pool_size
from rcr_trainer.errors import DataError
from rcr_trainer.training.actor import states
from rcr_trainer.training.environment import Development, greedy_picks
from rcr_trainer.training.losses import Targets
from rcr_trainer.training.registry import LOSSES, SFTSettings
from rcr_trainer.training.runner import Figures, Job, Result, Runner
from rcr_trainer.training.supervision import Batch, Supervision, hard_negatives, info_nce_batches, listwise_batches

logger = logging.getLogger(__name__)

_PROBES = 200
"""Most held-out training questions that measure a fit's coverage, if no development questions come from training."""


def train(job: Job, config: SFTSettings) -> Result:
    """Fine-tune a policy on coverage; the model ends with the weights of the best development coverage.

    The result is the same in all processes; a round is an epoch.

    Raises:
        DataError: no query has a program that parses, or the pool leaves some query fewer than k candidates.
        ConfigError: training diverges.
        CheckpointError: the state in `job.state_folder` can't be resumed from.
    """
    stage = _SFT(job, config)
    stage.fit()
    return stage.descend()


class _SFT:
    def __init__(self, job: Job, config: SFTSettings) -> None:
        self.job, self.config, self.model, self.processes = job, config, job.model, job.processes
        self.k = config.picks(job.model.config)
        self.loss, self.device = LOSSES[config.loss], job.model.query.device
        self._tensor = job.model.query.given
        self.queries, pool, spec, own = list(job.queries), job.pool, job.spec, config.exclude_own_program

        self.held_out = HeldOut(pool, self.queries, spec, new=float(own), seed=job.seed)
        self.dev = Development(job, self.held_out)
        self.rows: IntArray = np.empty(0, dtype=np.int64)
        """What an epoch goes through: (n,) queries to learn from or, in batch, (n, 2) query and step of each state."""
        if config.epochs:  # takes time for each query and candidate, and descent alone reads it
            self._supervise(Barred(self.queries, pool, spec, own))
        self.candidates, self.contexts = self.model.featurize_pool([e.item for e in pool])
        self.pool_vectors: PoolVectors | None = None

    def _supervise(self, forbidden: Sequence[IntArray]) -> None:
        """Find what descent learns from: Algorithm 1's picks for every query, and hard negatives."""
        config, pool, spec = self.config, self.job.pool, self.job.spec
        self.supervision = Supervision(self.queries, pool, spec, forbidden)
        check_pool_size("sft", forbidden, len(pool), self.k, own_program=config.exclude_own_program)
        self.sequences, gains = self.supervision.sequences(self.k)
        gaining = gains > 0
        if not gaining.any():
            raise DataError(
                f"none of the {len(self.queries)} training queries has a program that parses as '{spec.language}' and "
                "shares a structure with another example: set program.language (tokens reads any text), or check the "
                "programs"
            )
        taught = np.broadcast_to(gaining[:, :1], gaining.shape) if config.zero_gain_steps else gaining
        self.rows = np.argwhere(taught) if self.loss.in_batch else np.flatnonzero(gaining[:, 0])
        self.negatives = None
        if self.loss.in_batch and config.bm25_worst:
            sources = [e.source for e in self.queries], [e.source for e in pool]
            picked, top, worst = self.sequences[:, :-1], config.bm25_top, config.bm25_worst
            self.negatives = hard_negatives(self.supervision, picked, *sources, top=top, worst=worst)

    def fit(self) -> None:
        """Fit E_x if its family can, also to development queries if those were taken from training."""
        family = self.model.family
        questions = [*self.queries, *(self.dev.queries if self.dev.are_training else ())]
        held_out = self.dev
        if family.fits:
            if not (held_out.queries and held_out.are_training):  # separate development questions are logged anyway
                probes = self.queries[:: -(-len(self.queries) // _PROBES)]
                held_out = Development(replace(self.job, dev=probes), self.held_out)
            barred, own = held_out.supervision.forbidden, self.config.exclude_own_program
            check_pool_size("sft", barred, len(self.job.pool), self.k, own_program=own)
            logger.info("fitting to %d training questions …", len(questions))
        family.fit(self.model.query, readable(query.item for query in questions), seed=self.job.seed)
        self.processes.broadcast(self.model)
        if not family.fits:
            return
        covered = held_out.supervision.coverage(held_out.picks(self._pool_vectors(), self.k))
        count = len(held_out.queries)
        if math.isnan(covered):
            logger.info("fitted: no other program has anything that one of %d held-out training questions needs", count)
        else:
            logger.info("fitted: %.1f %% of what %d held-out training questions need is covered", covered, count)
        self.pool_vectors = None  # a resumed stage loads other weights next

    @cached_property
    def query_features(self) -> Features:
        """Features of the training queries, as if held out."""
        return self.held_out.features(self.model, self.queries)

    def descend(self) -> Result:
        """Continue from the fit by gradient descent; a round is an epoch."""
        config = self.config
        if self.loss.in_batch:  # single states, in batches of all processes together
            self.batch_size, self.accumulation = config.batch_size * self.processes.size, config.gradient_accumulation
        else:  # whole sequences of k states, in batches of one process each
            self.batch_size = max(1, config.batch_size // self.k)
            self.accumulation = config.gradient_accumulation * self.processes.size
        self.runner = Runner(
            "sft",
            self.job,
            config,
            {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad},
            per_epoch=math.ceil(math.ceil(len(self.rows) / self.batch_size) / self.accumulation),
            every=config.evaluate_every,
            best_by="dev_coverage",
        )
        return self.runner.run(self.collect, self.learn, self.evaluate)

    def collect(self, epoch: int) -> tuple[int, Iterator[Batch]]:
        """The seed of an epoch's dropout, and its batches."""
        rng = np.random.default_rng([self.job.seed, epoch])
        sequences = self._sequences(rng, epoch)
        dropout, order = int(rng.integers(2**31)), rng.permutation(self.rows)
        best, size, most = self.sequences, self.batch_size, self.config.candidates
        if self.loss.in_batch:
            return dropout, info_nce_batches(order, best, best, size, self.negatives, rng)
        return dropout, listwise_batches(order, sequences, best, size, len(self.candidates), most, rng)

    def _sequences(self, rng: np.random.Generator, epoch: int) -> IntArray:
        """(Q, k) picks whose prefixes are the epoch's states: Algorithm 1's, a share replaced by the policy's own."""
        config = self.config
        if self.loss.in_batch or not config.on_policy or epoch < config.on_policy_from * config.epochs:
            return self.sequences
        rows = self.rows[rng.random(len(self.rows)) < config.on_policy]
        sequences = self.sequences.copy()
        if len(rows):
            barred, pool = self.supervision.forbidden, self._pool_vectors()
            sequences[rows] = greedy_picks(self.job, self.query_features, barred, rows, pool, self.k)
        return sequences

    def learn(self, epoch: tuple[int, Iterator[Batch]]) -> Figures:
        """Take an optimiser step on every `accumulation` batches."""
        dropout, batches = epoch
        losses: list[Tensor] = []
        self.model.train()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(dropout + self.processes.rank)
            while not self.runner.at_end and (group := list(islice(batches, self.accumulation))):
                losses.append(self._step(group))
                self.runner.advance()
        self.pool_vectors = None
        done = float(self.runner.result.rounds + 1)
        every = torch.stack(losses).cpu().double().numpy()  # in one go: each read makes the GPU wait
        return {"epoch": done, "loss": float(np.mean(self.processes.sum(every)))}

    def _step(self, group: Sequence[Batch]) -> Tensor:
        """One optimiser step on the mean loss over some batches' states; returns this process's part of that loss."""
        processes = self.processes
        if self.loss.in_batch:
            share = [batch.rows(processes.part(len(batch.queries))) for batch in group]
        else:
            share = list(group[processes.rank :: processes.size])
        taught = [(batch, *self._targets(batch)) for batch in share]
        total = max(1, int(processes.sum(np.array([sum(count for *_, count in taught)]))[0]))
        losses = [self._backward(batch, targets, count / total) for batch, targets, count in taught]
        self.runner.step()
        return torch.stack([torch.zeros((), device=self.device), *losses]).sum()

    def _targets(self, batch: Batch) -> tuple[Targets, int]:
        """Targets of the batch's S states over its C candidates, and how many states the loss is a mean over.

        That is all states or, if listwise, those where some candidate gains something.
        """
        allowed = batch.allowed(self.supervision.forbidden, len(self.candidates))[batch.steps]
        gains = self.supervision.gains(batch.queries, batch.picked, batch.candidates)[batch.steps]
        count = len(gains) if self.loss.in_batch else int((gains * allowed).any(axis=1).sum())
        positive = None if batch.positive is None else self._tensor(batch.positive)
        tensors = self._tensor(gains), self._tensor(allowed)
        return Targets(*tensors, self.config.temperature, positive, self.config.mask_equals), count

    def _backward(self, batch: Batch, targets: Targets, weight: float) -> Tensor:
        """Add the gradient of the weighted loss on a batch; returns that loss, a scalar."""
        states, count = self._states(batch), len(batch.candidates)

        def encoded(part: slice) -> Tensor:
            return self._once(self.model.candidate, self.candidates, batch.candidates[part])

        candidates = self.processes.share(encoded, count) if self.loss.in_batch else encoded(slice(count))
        # Even without states here, other processes' losses send gradients to what is encoded here.
        none = 0.0 * candidates.sum()
        loss: Tensor = weight * self.loss.function(states @ candidates.T, targets) if len(states) else none
        torch.autograd.backward(loss)
        return loss.detach()

    def _states(self, batch: Batch) -> Tensor:
        """State vectors (S, D) of those prefixes of the batch's sequences that take part (Eq. 4)."""
        start = self.model.state().start(self._once(self.model.query, self.query_features, batch.queries))
        contexts, of = torch.zeros(*batch.picked.shape, self.model.dim, device=self.device), batch.before.nonzero()
        contexts[*map(self._tensor, of)] = self._once(self.model.context, self.contexts, batch.picked[of])
        return states(start, contexts)[*map(self._tensor, batch.steps.nonzero())]

    def _once(self, encoder: Encoder, features: Features, rows: IntArray) -> Tensor:
        """Vectors (n, D) of rows (n,), each distinct row encoded once: many queries share their first picks, say."""
        if not len(rows):
            return torch.zeros(0, self.model.dim, device=self.device)
        different, at = np.unique(rows, return_inverse=True)
        vectors: Tensor = encoder(features.select(different))
        return vectors[self._tensor(at)]

    def evaluate(self) -> Figures:
        """The current policy's coverage on the development queries."""
        figures = {"epoch": float(self.runner.result.rounds)}
        if self.dev.queries:
            figures["dev_coverage"] = self.dev.supervision.coverage(self.dev.picks(self._pool_vectors(), self.k))
        return {**figures, "lr": self.runner.lr}

    def _pool_vectors(self) -> PoolVectors:
        """E_c and E_z of the pool under the current weights; encoded at most once an epoch."""
        if self.pool_vectors is None:
            self.pool_vectors = self.model.pool_vectors(self.candidates, self.contexts)
        return self.pool_vectors
