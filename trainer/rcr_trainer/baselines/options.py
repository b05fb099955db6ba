"""How the selectors that learn are trained; loads no torch."""

from __future__ import annotations

from pydantic import Field

from langchain_rcr.basics.section import Section


class LearnedSettings(Section, use_attribute_docstrings=True):
    """Training of the selectors that learn from a scoring language model, that of the section llm."""

    queries: int | None = Field(300, ge=1)
    """Examples of the pool that are their training questions, evenly spaced; null: all, as published."""
    candidates: int = Field(50, ge=2)
    """Candidates that the language model scores for each question (se2: and step)."""
    extreme: int = Field(5, ge=1)
    """epr: positives are drawn among this many of the best; epr, se2: hard negatives among this many of the worst."""
    sets: int = Field(10, ge=2)
    """ceil: sets scored for a question; iterr: sequences drawn for it."""
    beam_width: int = Field(3, ge=1)
    """se2: sequences kept while picking."""
    epochs: int = Field(10, ge=1)
    """Passes over the training questions."""
    batch_size: int = Field(32, ge=1)
    """States (ceil, iterr: questions) in an optimiser step."""
    lr: float = Field(3e-4, gt=0)
    """Learning rate of AdamW, decayed linearly to 0."""
