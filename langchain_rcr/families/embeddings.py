"""The `embeddings` family: frozen vectors of a pretrained encoder, small trainable heads, an n-gram residual.

Trains in seconds on a CPU, because the frozen encoder reads each text once.

And the `lexical` family, n-grams alone: no downloads; the baseline for every other family.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.section import contradiction
from langchain_rcr.errors import InputError
from langchain_rcr.families.base import DEFAULT_BASE, Encoders, Family, ModelSettings

if TYPE_CHECKING:
    from langchain_rcr.families.encoding import Backbone


class EmbeddingsSettings(ModelSettings):
    """The tri-encoder over frozen vectors."""

    needs_base = "it reads a pretrained model"
    base: str | None = ModelSettings.field("base", DEFAULT_BASE)
    ngrams: int = Field(2, ge=0, le=5, description="Longest n-gram in the trained bag of n-grams; 0: no such bag.")
    ngram_init: float = Field(
        0.2, ge=0, description="Initial scale of the bag of n-grams, relative to the frozen vectors; 0: it starts at 0."
    )
    dim: int | None = Field(None, ge=1, description="Length of the vectors; null: that of the base model.")
    context_init: float = Field(
        -0.3, description="Initial E_z, as a multiple of E_c; below 0, it pushes away from what was picked."
    )
    scale: float = Field(20.0, gt=0, description="Initial factor on the cosines of normalised vectors.")


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


class EmbeddingsFamily(Family):
    """See the module."""

    name = "embeddings"
    summary = "frozen vectors with trained heads"
    Settings = EmbeddingsSettings
    encoders = ("langchain_rcr.families.encoder:LinearEncoder",) * 3
    numpy_encoders = ("langchain_rcr.families.heads:NumpyLinearEncoder",) * 3
    training: ClassVar = {
        "sft": {"epochs": 20, "lr": 3e-4, "temperature": 5.0},
        "grpo": {"lr": 1e-5, "train_candidates": False, "chunk": 512},
    }
    frozen = True

    def build(
        self,
        items: Sequence[Item],
        settings: EmbeddingsSettings,
        *,
        backbone: Backbone | None = None,
        seed: int,
        numpy: bool = False,
        **_: Any,
    ) -> Encoders:
        """See `Family.build`; the random parts of the three start out equal."""
        from langchain_rcr.families.ngrams import NgramVocabulary

        if backbone is None:
            raise InputError("the embeddings family needs a model (base) or LangChain Embeddings (backbone)")
        vocabulary = NgramVocabulary.fit(items, settings.ngrams) if settings.ngrams else None
        kind, _, _ = self.kinds(numpy=numpy)
        encoder = partial(kind, backbone, vocabulary, dim=settings.dim, ngram_init=settings.ngram_init, seed=seed)
        query = encoder(scale=settings.scale, queries=True)
        context = encoder(init=settings.context_init, scale=settings.scale)
        return query, context, encoder(scale=1)


class LexicalFamily(Family):
    """See the module."""

    name = "lexical"
    summary = "n-gram bags trained from scratch"
    Settings = LexicalSettings
    encoders, numpy_encoders = EmbeddingsFamily.encoders, EmbeddingsFamily.numpy_encoders
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
