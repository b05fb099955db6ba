"""The settings of both stages, and the losses and advantages they name, without loading torch.

To add a loss or an advantage, write a pure function beside those in `losses` or `advantages`, and name it here.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from langchain_rcr.basics.section import OneOf, Section, contradiction
from langchain_rcr.families import ModelSettings


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered function."""

    path: str
    summary: str

    @property
    def function(self) -> Any:
        """The function itself."""
        return pkgutil.resolve_name(self.path)


@dataclass(frozen=True, slots=True)
class Loss(Entry):
    """A loss of SFT: (logits, targets) → scalar, a mean over states."""

    in_batch: bool = False
    """Its candidates come from the batch, a positive and a hard negative for each single state; else whole sequences
    are trained against all candidates, and the mean is over states with something to gain."""


@dataclass(frozen=True, slots=True)
class Advantage(Entry):
    """An advantage of GRPO: rewards (B, G) → advantages (B, G)."""

    reads_greedy: bool = False  # it also takes the rewards (B,) of the greedy sequences
    kl_in_loss: bool = False  # the penalty for leaving the reference policy is a term of the loss, not of the reward


_LOSSES, _ADVANTAGES = "rcr_trainer.training.losses", "rcr_trainer.training.advantages"

LOSSES = {
    "listwise": Loss(f"{_LOSSES}:listwise", "soft targets over the pool, from how much each candidate adds"),
    "infonce": Loss(f"{_LOSSES}:info_nce", "the paper's loss, one positive against in-batch and hard negatives", True),
}
ADVANTAGES = {
    "grpo": Advantage(f"{_ADVANTAGES}:grpo", "its group's mean, in standard deviations", kl_in_loss=True),
    "rloo": Advantage(f"{_ADVANTAGES}:rloo", "the mean of the rest of its group"),
    "remax": Advantage(f"{_ADVANTAGES}:remax", "the reward of the greedy picks", reads_greedy=True),
    "nb": Advantage(f"{_ADVANTAGES}:nb", "nothing"),
}

Share = Annotated[float, Field(ge=0, le=1)]


class StageSettings(Section, use_attribute_docstrings=True):
    """Settings of both stages. Each stage gives the fields without a default its own."""

    k: int | None = Field(None, ge=1)
    """Picks per query; null: model.k."""
    epochs: int
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps (GRPO: batches), for a trial; null: after all epochs."""
    batch_size: int
    lr: float
    weight_decay: float
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip gradients to this norm; null: no clipping."""
    warmup: Share
    keep: Literal["best", "last"] = "best"
    """Which weights to keep: the last, or the best by the development figure that patience uses (the paper doesn't
    say)."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs between two evaluations on development queries."""
    patience: int | None

    def picks(self, policy: ModelSettings) -> int:
        """Picks per query of a policy with these settings."""
        return self.k or policy.k


class SFTSettings(StageSettings):
    """Stage 1, supervised fine-tuning (paper section 3.1, Algorithm 1)."""

    exclude_own_program: bool = True
    """A training query gets no candidates with its own program, since held-out queries of a compositional split have
    none either. A query never gets itself."""
    enabled: bool = True
    """Whether this stage runs; false: GRPO starts from an untrained policy ("RCR w/o SFT")."""
    checkpoint: Path | None = None
    """Use this policy, a checkpoint folder or what SFT left in a run folder, instead of training one. Its pool, family,
    lam and tau must match the run's; the rest of section model comes from the policy."""
    loss: Annotated[str, OneOf(lambda: {name: loss.summary for name, loss in LOSSES.items()})] = "listwise"
    """Loss to minimise."""
    epochs: int = Field(0, ge=0)
    """Passes over the training queries (paper 120, section 4 "Training details"); 0: only the closed-form fit, if the
    family has one."""
    batch_size: int = Field(64, ge=1)
    """Training states per forward pass of each process (paper 64, section 4 "Training details")."""
    gradient_accumulation: int = Field(1, ge=1)
    """Forward passes whose gradients are added up for each optimiser step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of AdamW, decayed linearly to 0 (paper 1e-5, section 4 "Training details")."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW."""
    warmup: Share = 0.05
    """Share of the steps over which the learning rate rises to lr."""
    temperature: float = Field(5.0, gt=0)
    """loss listwise: the targets are softmax(structures added / temperature)."""
    candidates: int = Field(512, ge=2)
    """loss listwise: candidates scored per forward pass; a larger pool is sampled."""
    on_policy: Share = 1.0
    """Share of the states that come from the policy's own picks instead of Algorithm 1's."""
    on_policy_from: Share = 0.2
    """Share of the training after which on_policy applies."""
    bm25_top: int = Field(50, ge=1)
    """loss infonce: hard negatives come from the H best candidates by BM25 (paper 50, section 4 "Training
    details")."""
    bm25_worst: int = Field(5, ge=0)
    """loss infonce: one hard negative is drawn from the B of these that cover least (paper 5, section 4 "Training
    details"); 0: no hard negatives."""
    mask_equals: bool = True
    """loss infonce: a candidate that adds at least as much as the positive is not used as a negative (paper: it is)."""
    zero_gain_steps: bool = False
    """loss infonce: also train on steps where nothing is left to cover and all candidates tie (paper: yes)."""
    patience: int | None = Field(10, ge=1)
    """Stop after this many evaluations without better dev coverage; null, or with keep: last: never."""

    @model_validator(mode="after")
    def _agree(self) -> SFTSettings:
        if self.zero_gain_steps and self.mask_equals:
            advice = "no candidate would be a negative at such steps"
            raise contradiction("sft.zero_gain_steps", True, "sft.mask_equals", True, advice)
        if self.bm25_worst > self.bm25_top:
            raise contradiction("sft.bm25_worst", self.bm25_worst, "sft.bm25_top", self.bm25_top, "B is at most H")
        return self


TIMES = (2, 4)
"""Factors on k that the race tries where prompts may grow (`GRPOSettings.prompt_tokens`)."""


class GRPOSettings(StageSettings):
    """Stage 2, reinforcement learning from a language model's answers (paper section 3.2)."""

    enabled: bool = False
    """Whether this stage runs, between SFT and evaluation."""
    advantage: Annotated[str, OneOf(lambda: {name: each.summary for name, each in ADVANTAGES.items()})] = "grpo"
    """What each reward is compared with (section 4, "RL variations")."""
    queries: int | None = Field(None, ge=1)
    """Number of training queries reserved for this stage, drawn at random; they leave the pool and SFT (paper 110,
    appendix A). null: all training queries, which stay in the pool."""
    batch_size: int = Field(16, ge=1)
    """Queries per batch of each process (paper 16, section 4 "Training details")."""
    group_size: int = Field(32, ge=1)
    """Sequences drawn per query, G (paper 32, section 4 "Training details")."""
    epochs: int = Field(8, ge=0)
    """Passes over the queries (paper 8, section 4 "Training details")."""
    exclude_own_program: bool | None = None
    """A training query gets no candidates with its own program (the paper doesn't say). null: for just enough queries
    to be as new as future ones, judged by separate development queries or else by training queries."""
    race: int = Field(600, ge=0)
    """Maximum number of different prompts for the race: GRPO first chooses by their answers among changes of the policy
    that need no gradient (structure: p, ω, α, the order of the picks, the weights of labels and unneeded structures).
    0: no race."""
    prompt_tokens: int | None = Field(None, ge=1)
    """Mean tokens that prompts may have: within this limit, the race also tries twice and four times model.k picks.
    Without the model's tokenizer, as with a server, four bytes count as a token. null: model.k stays."""
    perplexity: float | None = Field(4.0, gt=1)
    """Effective number of candidates that each step draws from at the start. It sets τ step by step, so that none is
    deterministic or random. null: model.tau at every step (paper)."""
    updates: int = Field(1, ge=1)
    """Optimiser steps per batch of sequences; clipping takes effect from the second on."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate of AdamW, decayed linearly to 0 (paper 1e-6, section 4 "Training details")."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    warmup: Share = 0.0
    """Share of the batches over which the learning rate rises to lr."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """ε, how far the probability ratio may move before it is clipped (paper 0.2, "Model setup")."""
    beta: float = Field(0.04, ge=0)
    """β, the weight of the KL penalty for leaving SFT's policy (paper 0.04, "Model setup")."""
    train_candidates: bool = False
    """Whether to train E_c, too; if not, the pool is encoded once."""
    chunk: int = Field(128, ge=1)
    """Texts encoded at once with gradients; fewer need less memory and give the same result."""
    best_by: Literal["reward", "coverage"] = "reward"
    """Development figure that decides which weights are kept; coverage asks no language model."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without a better development figure; null, or with keep: last: never."""

    @model_validator(mode="after")
    def _compares(self) -> GRPOSettings:
        if self.group_size == 1 and self.advantage in ("grpo", "rloo"):
            advice = "it compares a query's sequences with each other"
            raise contradiction("grpo.group_size", 1, "grpo.advantage", self.advantage, advice)
        return self
