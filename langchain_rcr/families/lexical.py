"""The `lexical` family: n-gram bags trained from scratch. No downloads; the baseline for every other family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.section import contradiction
from langchain_rcr.families.base import Encoders, Family, ModelSettings
from langchain_rcr.families.embeddings import EmbeddingsSettings


class LexicalSettings(ModelSettings):
    """The tri-encoder over n-grams."""

    ngrams: int = Field(2, ge=1, le=5, description="Longest n-gram in the trained bag of n-grams.")
    dim: int = Field(384, ge=1, description="Length of the vectors.")
    context_init: float = EmbeddingsSettings.field("context_init", -0.3)
    scale: float = EmbeddingsSettings.field("scale", 20.0)

    @model_validator(mode="after")
    def _agree(self) -> LexicalSettings:
        if self.pretrained is not None:
            raise contradiction("model.base", self.base, "model.family", self.family, "it is trained from scratch")
        if self.pooling != "mean":
            raise contradiction("model.pooling", self.pooling, "model.family", self.family, "it pools no tokens")
        return self


class LexicalFamily(Family):
    """See the module."""

    name = "lexical"
    summary = "n-gram bags trained from scratch"
    Settings = LexicalSettings
    encoders = ("langchain_rcr.families.encoder:LinearEncoder",) * 3
    numpy_encoders = ("langchain_rcr.families.heads:NumpyLinearEncoder",) * 3
    training: ClassVar = {
        "sft": {"epochs": 30, "lr": 1e-3, "temperature": 5.0},
        "grpo": {"lr": 1e-4, "train_candidates": False, "chunk": 512},
    }

    def build(
        self, items: Sequence[Item], settings: LexicalSettings, *, seed: int, numpy: bool = False, **_: Any
    ) -> Encoders:
        """See `Family.build`; the three start out with the same vectors."""
        from langchain_rcr.families.ngrams import NgramVocabulary

        vocabulary = NgramVocabulary.fit(items, settings.ngrams)
        kind, _, _ = self.kinds(numpy=numpy)
        encoder = partial(kind, None, vocabulary, dim=settings.dim, ngram_init=1.0, seed=seed)
        return encoder(scale=settings.scale), encoder(scale=settings.context_init * settings.scale), encoder()
