"""The settings that SFT and GRPO have in common; loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from langchain_rcr.basics.section import Section

Share = Annotated[float, Field(ge=0, le=1)]


class StageSettings(Section):
    """Each stage gives the fields that lack a default its own."""

    k: int = Field(4, ge=1)
    """Picks a query (paper 4, section 4 "Model setup")."""
    epochs: int
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps (GRPO: batches), for a trial; null: by epochs."""
    batch_size: int
    lr: float
    weight_decay: float
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; null: never."""
    warmup: Share
    schedule: Literal["linear", "constant"] = "linear"
    """The learning rate after the warm-up: linear falls to 0 at the last step (paper: linear), constant stays. With
    constant and warmup 0, a run whose epochs --resume raised ends like one of that length."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: the best by a development figure, which patience counts by, too, or the last (paper:
    names no choice)."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs between two evaluations on development queries."""
    patience: int | None
