"""π over sequences of k distinct picks, for a fixed pool and fixed training queries: draws, and log-probabilities.

At each step π is the softmax of logit / τ over the candidates that are neither barred nor already picked, so the
probability of a sequence is the product over its steps of renormalised probabilities. Texts are featurised once, then
everything is arrays. Blocks of logits and gradient caching (`Leaf`) bound the memory, whatever the sizes of batch,
group and pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from langchain_rcr.basics.rows import DoubleArray, IntArray
from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.encoding import Features
from langchain_rcr.families.state import State
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.data.arrays import row_blocks
from rcr_trainer.data.examples import Example
from rcr_trainer.training.registry import GRPOSettings

Loss = Callable[[Tensor, slice], Tensor]
"""(log π_θ(o) of some of the R sequences, which of them) → a scalar to minimise; the R sequences' losses add up."""

_PROBES = 64
"""Most queries whose greedy paths set τ."""
_BLOCK = 1 << 25
"""Logits held at once (128 MiB of float32)."""


class Sequences(NamedTuple):
    """R drawn sequences."""

    picks: Tensor  # (R, k) int64 pool positions, in order
    log_probs: Tensor  # (R,) float32 log π(o) of the policy that drew them
    entropies: Tensor  # (R, k) of the policy at each step, in nats


class Actor:
    """Draws sequences of picks, and gives their probabilities under the current policy and under the reference.

    The reference is the model at construction; `barred` has for each query the pool positions that it may not get.
    """

    def __init__(
        self,
        model: TriEncoder,
        queries: Features,
        pool: Sequence[Example],
        barred: Sequence[IntArray],
        config: GRPOSettings,
    ) -> None:
        self.model, self.chunk, self.train_candidates = model, config.chunk, config.train_candidates
        self.k, self._tensor = config.picks(model.config), model.query.given
        self._queries, self._size, self._all_barred = queries, len(pool), barred
        self._candidates, self._contexts = model.featurize_pool([e.item for e in pool])
        # The reference policy never changes, so its vectors suffice.
        self._reference_queries = self._vectors("query", self._queries)
        self._reference_contexts = self._vectors("context", self._contexts)
        self._reference_candidates = self._vectors("candidate", self._candidates)
        self.tau = [model.config.tau] * self.k if config.perplexity is None else self._temperatures(config.perplexity)
        """τ by step."""

    def _temperatures(self, perplexity: float) -> list[float]:
        """The τ per step that gives the start policy this (geometric) mean perplexity on its own greedy paths."""
        rows = np.arange(len(self._all_barred))[:: len(self._all_barred) // _PROBES + 1]
        taken, state = self._barred(rows), self.model.state().start(self._reference_queries[self._tensor(rows)])
        found = []
        for _ in range(self.k):
            logits = (state.vector() @ self._reference_candidates.T).masked_fill(taken, -math.inf)
            low, high = 1e-4, 1e3
            for _ in range(40):
                tau = math.sqrt(low * high)
                entropy = torch.special.entr((logits.double() / tau).softmax(-1)).sum(-1).mean()
                low, high = (tau, high) if entropy < math.log(perplexity) else (low, tau)
            found.append(tau)
            picks = logits.argmax(-1)
            taken[torch.arange(len(rows)), picks] = True
            state = state.update(self._contexts_of(picks))
        return found

    def draw(self, rows: IntArray, uniforms: DoubleArray | None) -> Sequences:
        """Draw R = B · G sequences from the current policy, query by query, for B queries; B may be 0, here and below.

        `uniforms` are (B, G, k) numbers from [0, 1); None: one greedy sequence per query, G = 1.
        """
        group = 1 if uniforms is None else uniforms.shape[1]
        queries, candidates = self._vectors("query", self._queries.select(rows)), self._pool_vectors()
        parts = [
            draw(
                self.model.state().start(queries[block].repeat_interleave(group, 0)),
                candidates,
                self._contexts_of,
                self._barred(rows[block]).repeat_interleave(group, 0),
                self.k,
                tau=self.tau,
                uniforms=None if uniforms is None else self._tensor(uniforms[block].reshape(-1, self.k)),
            )
            for block in [*row_blocks(len(rows), group * self._size, _BLOCK)] or [slice(0, 0)]
        ]
        return Sequences(*map(torch.cat, zip(*parts, strict=True)))

    def reference_log_probs(self, rows: IntArray, drawn: Sequences) -> Tensor:
        """Log π_ref(o) of the R sequences of B queries, (R,)."""
        queries, earlier = self._reference_queries[self._tensor(rows)], drawn.picks[:, :-1]
        vectors = queries, self._reference_contexts, self._reference_candidates
        with torch.no_grad():
            parts = [log_probs for _, log_probs in self._log_probs(rows, drawn.picks, earlier, *vectors)]
        return torch.cat([queries.new_empty(0), *parts])

    def backward(self, rows: IntArray, drawn: Sequences, loss: Loss) -> None:
        """Add the gradient of a loss on the R sequences of B queries to the parameters' gradients."""
        picked, earlier = torch.unique(drawn.picks[:, :-1], return_inverse=True)
        queries = Leaf(self.model.query, self._queries.select(rows), self.chunk)
        contexts = Leaf(self.model.context, self._contexts.select(picked.cpu().numpy()), self.chunk)
        candidates, leaves = self._reference_candidates, [queries, contexts]
        if self.train_candidates:
            leaves.append(Leaf(self.model.candidate, self._candidates, self.chunk))
            candidates = leaves[-1].vectors
        vectors = queries.vectors, contexts.vectors, candidates
        for of, log_probs in self._log_probs(rows, drawn.picks, earlier, *vectors):
            torch.autograd.backward(loss(log_probs, of))
        for leaf in leaves:
            leaf.backward()

    def pool_vectors(self) -> PoolVectors:
        """The pool's current E_c and E_z, for greedy decoding."""
        return PoolVectors(self._pool_vectors().cpu().numpy(), self.model.context.vectors(self._contexts))

    def _log_probs(
        self, rows: IntArray, picks: Tensor, earlier: Tensor, queries: Tensor, contexts: Tensor, candidates: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Log π(o) of the R sequences of B queries, block by block, so that the logits fit in memory.

        From E_x (B, D), E_z with its row for each pick but the last, `earlier` (R, k − 1), and E_c (N, D).
        """
        group = len(picks) // max(1, len(rows))
        for block in row_blocks(len(rows), group * self.k * self._size, _BLOCK):
            of = slice(block.start * group, block.stop * group)
            barred = self._barred(rows[block]).repeat_interleave(group, 0)
            start = self.model.state().start(queries[block].repeat_interleave(group, 0))
            yield of, sequence_log_probs(start, candidates, contexts[earlier[of]], barred, picks[of], self.tau)

    def _pool_vectors(self) -> Tensor:
        return self._vectors("candidate", self._candidates) if self.train_candidates else self._reference_candidates

    def _contexts_of(self, picks: Tensor) -> Tensor:
        picked, columns = torch.unique(picks, return_inverse=True)
        vectors = self._vectors("context", self._contexts.select(picked.cpu().numpy()))
        return vectors[columns]

    def _barred(self, rows: IntArray) -> Tensor:
        """(B, N) bool."""
        barred = np.zeros((len(rows), self._size), dtype=bool)
        for at, row in enumerate(rows):
            barred[at, self._all_barred[row]] = True
        return self._tensor(barred)

    def _vectors(self, part: str, features: Any) -> Tensor:
        return self._tensor(getattr(self.model, part).vectors(features))


class Leaf:
    """Vectors that a loss sees as given; their gradient goes through the encoder afterwards, part by part.

    Gradient caching (Gao et al., 2021): only `chunk` items' activations are held at a time, however many are encoded,
    at the price of encoding all twice. Exact as long as the encoder is deterministic (no dropout).
    """

    def __init__(self, encoder: Encoder, features: Any, chunk: int) -> None:
        self._encoder, self._features = encoder, features
        order = encoder.order(features)  # similar lengths together
        self._parts = [order[start : start + chunk] for start in range(0, len(order), chunk)]
        self.vectors: Tensor = torch.empty(len(features), encoder.dim, device=encoder.device)
        with torch.no_grad():
            for rows in self._parts:
                self.vectors[encoder.given(rows)] = encoder(features.select(rows)).float()
        self.vectors.requires_grad_(any(each.requires_grad for each in encoder.parameters()))

    def backward(self) -> None:
        """Pass the gradient accumulated at `vectors` on to the encoder's parameters."""
        if self.vectors.grad is None:
            return
        for rows in self._parts:
            gradient = self.vectors.grad[self._encoder.given(rows)]
            torch.autograd.backward(self._encoder(self._features.select(rows)), gradient)


# ---------------------------------------------------------------- on arrays alone


@torch.no_grad()
def draw(
    start: State[Any],
    candidates: Tensor,
    contexts: Callable[[Tensor], Tensor],
    barred: Tensor,
    k: int,
    *,
    tau: Sequence[float],
    uniforms: Tensor | None,
) -> Sequences:
    """Draw sequences without replacement, exactly: by inverting the cumulative distribution at each step.

    Args:
        start: the state of R rows before the first pick.
        candidates: (N, D) E_c of the pool.
        contexts: E_z of picks: (R,) positions → (R, D). Called between steps.
        barred: (R, N) bool. Every row has at least k others.
        k: picks per row.
        tau: τ of each step.
        uniforms: (R, k) numbers from [0, 1), one per draw; None: the most probable candidate at each step.
    """
    state, taken = start, barred.clone()
    rows = torch.arange(len(barred), device=candidates.device)
    picks, entropies = [], []
    log_probs = torch.zeros(len(barred), dtype=torch.float64, device=candidates.device)
    for step in range(k):
        logits = (state.vector() @ candidates.T).masked_fill(taken, -math.inf)
        log_policy = (logits.double() / tau[step]).log_softmax(-1)
        pick = log_policy.argmax(-1) if uniforms is None else _invert(log_policy.exp(), uniforms[:, step])
        log_probs += log_policy[rows, pick]
        picks.append(pick)
        entropies.append(torch.special.entr(log_policy.exp()).sum(-1))
        taken[rows, pick] = True
        if step + 1 < k:
            state = state.update(contexts(pick))
    return Sequences(torch.stack(picks, dim=1), log_probs.float(), torch.stack(entropies, dim=1).float())


def _invert(policy: Tensor, uniforms: Tensor) -> Tensor:
    """The column (R,) at which each row's cumulative probability first exceeds the uniform number."""
    cumulative = policy.cumsum(-1)
    total = cumulative[:, -1:]
    level = uniforms.to(policy).unsqueeze(-1) * total
    # Rounding may lift the product to the total, which no column exceeds.
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1)


def states(start: State[Any], contexts: Tensor) -> Tensor:
    """The state before every pick (Eq. 4), (R, k, D), from the start and E_z (R, k − 1, D) of the earlier picks."""
    every = accumulate(contexts.unbind(1), lambda state, context: state.update(context), initial=start)
    return torch.stack([state.vector() for state in every], dim=1)


def sequence_log_probs(
    start: State[Any], candidates: Tensor, contexts: Tensor, barred: Tensor, picks: Tensor, tau: Sequence[float]
) -> Tensor:
    """Log π(o) (R,) of given sequences, `picks` (R, k); gradients flow to states, candidates and contexts.

    As `draw`, but E_z (R, k − 1, D) is that of every pick but the last.
    """
    closed = barred.unsqueeze(1).repeat(1, picks.shape[1], 1)  # (R, k, N): barred, or picked at an earlier step
    rows = torch.arange(len(picks), device=picks.device)
    for step in range(picks.shape[1] - 1):
        closed[rows, step + 1 :, picks[:, step]] = True
    before = states(start, contexts)
    logits = ((before @ candidates.T) / before.new_tensor(tau)[:, None]).masked_fill(closed, -math.inf)
    return logits.log_softmax(-1).gather(2, picks.unsqueeze(-1)).squeeze(-1).sum(-1)
