"""A language model by settings."""

from __future__ import annotations

import os
from typing import Any

from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings


def open_llm(
    settings: LLMSettings,
    cache_path: str | os.PathLike[str] | None,
    *,
    language: str = "functional",
    prompt: Prompt = APPENDIX_D,
    account: str | None = None,
) -> LanguageModel:
    """The model that the settings name. Nothing is sent yet.

    Args:
        settings: kind completion, chat or local.
        cache_path: the file with the answers, kept over runs; None: in memory.
        language: of the programs in the answers.
        prompt: how it is asked.
        account: under which the file keeps what is spent; see `LanguageModel`.

    Raises:
        ConfigError: no model name; no API key for OpenAI's own server; no such folder.
        DataError: the cache file can't be used.
    """
    if not settings.given:
        raise ConfigError(
            "llm.model is required: the name of a model that the server has, or of a local folder (there is no "
            "default, since models come and go: OpenAI has shut down those that older programs name)"
        )
    # Written out, so that the longest answer counts as given.
    settings = settings.model_copy(update={"max_tokens": settings.max_tokens})
    identity: dict[str, Any] = {"kind": settings.kind, "max_tokens": settings.max_tokens}
    options: dict[str, Any] = {"name": settings.model}
    model: Any
    if settings.kind == "local":
        from rcr_trainer.llm.local import LocalLM

        model = LocalLM(
            model=settings.model,
            max_new_tokens=settings.max_tokens,
            batch_size=settings.batch_size,
            device=settings.device,
            dtype=settings.dtype,
        )
        identity |= model.identity
        options["count_tokens"] = model.count_tokens
    else:
        from rcr_trainer.llm.openai_ import address_of, identity_of, make, public

        model = make(settings)
        options["place"] = public(address_of(settings))
        identity |= identity_of(settings)
    options |= {"language": language, "prompt": prompt, "account": account}
    return LanguageModel(model, settings, cache_path=cache_path, identity=identity, **options)
