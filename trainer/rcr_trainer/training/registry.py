"""The settings of both stages, and the losses and advantages they name, without loading torch.

To add a loss or an advantage, write a pure function beside those in `losses` or `advantages`, and name it here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
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
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        found: Callable[..., Any] = pkgutil.resolve_name(self.path)
        return found


@dataclass(frozen=True, slots=True)
class Loss(Entry):
    """A loss of SFT: (logits, targets) → scalar, a mean over states.

    Args:
        in_batch: its candidates come from the batch, a positive and a hard negative for each single state; else whole
            sequences are trained against all candidates, and the mean is over states with something to gain.
    """

    in_batch: bool = False


@dataclass(frozen=True, slots=True)
class Advantage(Entry):
    """An advantage of GRPO: rewards (B, G) → advantages (B, G).

    Args:
        reads_greedy: it also takes the rewards (B,) of the greedy sequences.
        kl_in_loss: the penalty for leaving the reference policy is a term of the loss; else it is in the reward.
    """

    reads_greedy: bool = False
    kl_in_loss: bool = False


_LOSSES, _ADVANTAGES = "rcr_trainer.training.losses", "rcr_trainer.training.advantages"

LOSSES = {
    "listwise": Loss(f"{_LOSSES}:listwise", "soft targets over the pool, by how much each candidate adds"),
    "infonce": Loss(f"{_LOSSES}:info_nce", "the paper's, one positive against in-batch and hard negatives", True),
}
ADVANTAGES = {
    "grpo": Advantage(f"{_ADVANTAGES}:grpo", "mean and spread of its group", kl_in_loss=True),
    "rloo": Advantage(f"{_ADVANTAGES}:rloo", "the rest of its group"),
    "remax": Advantage(f"{_ADVANTAGES}:remax", "the greedy picks", reads_greedy=True),
    "nb": Advantage(f"{_ADVANTAGES}:nb", "nothing"),
}

Share = Annotated[float, Field(ge=0, le=1)]


class StageSettings(Section, use_attribute_docstrings=True):
    """Each stage gives the fields that lack a default its own."""

    k: int | None = Field(None, ge=1)
    """Picks a query; null: model.k."""
    epochs: int
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps (GRPO: batches), for a trial; null: by epochs."""
    batch_size: int
    lr: float
    weight_decay: float
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""
    warmup: Share
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: the best by a development figure, which patience counts by, too, or the last (paper:
    names no choice)."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs between two evaluations on development queries."""
    patience: int | None

    def picks(self, policy: ModelSettings) -> int:
        """Picks per query of a policy with these settings."""
        return self.k or policy.k


class SFTSettings(StageSettings):
    """Stage 1, supervised fine-tuning (paper section 3.1, Algorithm 1)."""

    exclude_own_program: bool = True
    """A training query gets no candidate with its own program, as held-out queries of a compositional split have none.
    It never gets itself."""
    enabled: bool = True
    """Whether this stage runs; false: GRPO begins with an untrained policy ("RCR w/o SFT")."""
    checkpoint: Path | None = None
    """Take this policy, a checkpoint folder or what SFT left in a run folder, instead of training one. Its pool,
    family, lam and tau must be the run's; the rest of the section model is the policy's own."""
    loss: Annotated[str, OneOf(lambda: {name: loss.summary for name, loss in LOSSES.items()})] = "listwise"
    """What is minimised."""
    epochs: int = Field(0, ge=0)
    """Passes over the training queries (paper 120, section 4 "Training details"); 0: none, where a closed-form fit is
    all."""
    batch_size: int = Field(64, ge=1)
    """Training states in a forward pass of each process (paper 64, section 4 "Training details")."""
    gradient_accumulation: int = Field(1, ge=1)
    """Forward passes whose gradients are added up before each optimiser step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of AdamW, decayed linearly to 0 (paper 1e-5, section 4 "Training details")."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW."""
    warmup: Share = 0.05
    """Share of the steps in which the learning rate climbs to lr."""
    temperature: float = Field(5.0, gt=0)
    """loss listwise: the targets are softmax(structures added / temperature)."""
    candidates: int = Field(512, ge=2)
    """loss listwise: candidates scored in a forward pass; a larger pool is sampled."""
    on_policy: Share = 1.0
    """Share of the states built from the policy's own picks instead of Algorithm 1's."""
    on_policy_from: Share = 0.2
    """Share of the training after which on_policy sets in."""
    bm25_top: int = Field(50, ge=1)
    """loss infonce: hard negatives come from the H candidates nearest by BM25 (paper 50, section 4 "Training
    details")."""
    bm25_worst: int = Field(5, ge=0)
    """loss infonce: of these, one is drawn among the B that cover least (paper 5, section 4 "Training details"); 0: no
    hard negatives."""
    mask_equals: bool = True
    """loss infonce: a candidate that adds at least as much as the positive is no negative (paper: it is one)."""
    zero_gain_steps: bool = False
    """loss infonce: also train on steps at which nothing is left to cover, where all candidates tie (paper: yes)."""
    patience: int | None = Field(10, ge=1)
    """Stop after this many evaluations without a better dev coverage; null: never."""

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
    """What a reward is compared with (section 4, "RL variations")."""
    queries: int | None = Field(None, ge=1)
    """Training queries only of this stage, drawn at random: they leave the pool and SFT (paper 110, appendix A). null:
    all training queries, which stay in the pool."""
    batch_size: int = Field(16, ge=1)
    """Queries in a batch of each process (paper 16, section 4 "Training details")."""
    group_size: int = Field(32, ge=1)
    """Sequences drawn for each query, G (paper 32, section 4 "Training details")."""
    epochs: int = Field(8, ge=0)
    """Passes over the queries (paper 8, section 4 "Training details")."""
    exclude_own_program: bool | None = None
    """A training query gets no candidate with its own program (paper: names no choice). null: as often as a question to
    come won't, which is taken from development questions of their own, or else from training questions."""
    race: int = Field(600, ge=0)
    """Different prompts, at most, by whose answers GRPO first chooses among changes of the policy that need no gradient
    (structure: p, ω, α, the order of the picks, what labels and unneeded structures weigh); 0: it doesn't."""
    prompt_tokens: int | None = Field(None, ge=1)
    """Tokens that prompts may have in the mean, for twice and four times as many picks as model.k to race, too; where
    the model's tokenizer isn't at hand, as with a server, four bytes are a token. null: model.k stays."""
    perplexity: float | None = Field(4.0, gt=1)
    """Candidates that each step draws among in effect, at the start: it sets τ by step, so that no step is
    deterministic or random. null: model.tau at every step (paper)."""
    updates: int = Field(1, ge=1)
    """Optimiser steps on each batch of sequences; from the second on the clip takes effect."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate of AdamW, decayed linearly to 0 (paper 1e-6, section 4 "Training details")."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    warmup: Share = 0.0
    """Share of the batches in which the learning rate climbs to lr."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """ε, how far the ratio may move before it is clipped (paper 0.2, "Model setup")."""
    beta: float = Field(0.04, ge=0)
    """β, the weight of staying near the policy of SFT (paper 0.04, "Model setup")."""
    train_candidates: bool = False
    """Whether E_c is trained, too; if not, the pool is encoded once."""
    chunk: int = Field(128, ge=1)
    """Texts encoded at once with gradients; fewer take less memory and give the same result."""
    best_by: Literal["reward", "coverage"] = "reward"
    """Which development figure decides the weights that are kept; coverage asks no language model."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without a better development figure; null: never."""
