"""The `transformer` family: a whole pretrained model per encoder, fine-tuned (the paper: three `bert-base-uncased`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from langchain_rcr.basics.extras import require
from langchain_rcr.basics.items import Item
from langchain_rcr.errors import InputError
from langchain_rcr.families.base import Encoders, Family, ModelSettings


class TransformerSettings(ModelSettings):
    """The tri-encoder of three transformers."""

    needs_base = "it trains a pretrained model"
    base: str | None = ModelSettings.field("base", "bert-base-uncased")
    lam: float = ModelSettings.field("lam", 0.1)


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

    def kinds(self, *, numpy: bool) -> Any:
        """See `Family.kinds`."""
        found = super().kinds(numpy=numpy)
        require("transformers", "train")
        return found

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
