"""The `transformer` family: a whole pretrained model per encoder, fine-tuned (the paper: three `bert-base-uncased`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import model_validator

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.section import contradiction
from langchain_rcr.errors import InputError
from langchain_rcr.families.base import Encoders, Family, ModelSettings


class TransformerSettings(ModelSettings):
    """The tri-encoder of three transformers."""

    base: str | None = ModelSettings.field("base", "bert-base-uncased")
    lam: float = ModelSettings.field("lam", 0.1)

    @model_validator(mode="after")
    def _agree(self) -> TransformerSettings:
        if self.base == "none":
            raise contradiction("model.base", self.base, "model.family", self.family, "it trains a pretrained model")
        return self


class TransformerFamily(Family):
    """See the module."""

    name = "transformer"
    summary = "three fully trained transformers, the paper's set-up"
    Settings = TransformerSettings
    encoders = ("langchain_rcr.families.pooled:TransformerEncoder",) * 3
    training: ClassVar = {
        "sft": {"epochs": 120, "lr": 1e-5, "temperature": 5.0},
        "grpo": {"lr": 1e-6, "train_candidates": True, "chunk": 32},
    }

    def build(self, items: Sequence[Item], settings: TransformerSettings, **_: Any) -> Encoders:
        """See `Family.build`."""
        base = settings.pretrained
        if base is None:
            raise InputError(
                "the transformer family needs a model: set base to a hub name, a local folder or package:NAME"
            )
        encoder = partial(self.kinds(numpy=False)[0], base, pooling=settings.pooling, max_length=settings.max_length)
        query = encoder()
        query.text.check_storable()
        return query, encoder(), encoder()
