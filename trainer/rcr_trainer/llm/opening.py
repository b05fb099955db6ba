"""A language model by settings, or around any LangChain model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from langchain_rcr.prompt import APPENDIX_D, Prompt
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.backend import Backend
from rcr_trainer.llm.ledger import AnswerCache
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.redaction import without_secrets


def open_llm(
    settings: LLMSettings,
    cache_path: str | os.PathLike[str] | None,
    *,
    language: str = "functional",
    prompt: Prompt = APPENDIX_D,
    account: str | None = None,
    guesses: Mapping[str, str] | None = None,
) -> LanguageModel:
    """The model that the settings name. Nothing is sent yet.

    Args:
        settings: kind completion, chat or local; for the simulator see `wrap`.
        cache_path: the file with the answers, kept over runs; None: in memory.
        language: of the programs in the answers.
        prompt: how it is asked.
        account: under which the file keeps what is spent; see `LanguageModel`.
        guesses: question → program. A local model answers faster where it would write just that; no answer changes.

    Raises:
        ConfigError: no model name; no API key for OpenAI's own server; no such folder.
        DataError: the cache file can't be used.
    """
    if not (settings.model or "").strip():
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
            guess=lambda text: (guesses or {}).get(prompt.question_of(text)),
        )
        identity |= model.identity
        options["count_tokens"] = model.count_tokens
    else:
        from rcr_trainer.llm.openai_ import address_of, make, public

        model = make(settings)
        options["place"] = public(address_of(settings))
        identity |= {
            "model": settings.model,
            "place": options["place"],
            "temperature": settings.temperature,
            "extra_body": without_secrets(settings.extra_body),  # with another key the answers are the same
        }
    options |= {"language": language, "prompt": prompt, "account": account}
    return wrap(model, settings, cache_path=cache_path, identity=identity, **options)


def wrap(
    model: Any,
    settings: LLMSettings | None = None,
    *,
    cache_path: str | os.PathLike[str] | None = None,
    identity: str | Mapping[str, Any] | None = None,
    language: str = "functional",
    prompt: Prompt = APPENDIX_D,
    account: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
    name: str | None = None,
    place: str = "",
) -> LanguageModel:
    """Any LangChain completion or chat model, given as an object.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, also `model.bind(…)`. What the settings say of temperature and longest
            answer is not sent: the model is as it is.
        settings: stop sequences, retries, concurrency, budget and prices; kind "local" for a model that
            computes on this machine: one call at a time with `batch_size` prompts. A budget of tokens or money needs
            `max_tokens` if the model doesn't have it.
        cache_path: the file with the answers, kept over runs; None: in memory. It needs `identity`.
        identity: a name, or a JSON object, that changes whenever the model or its parameters do.
        language: of the programs in the answers.
        prompt: how it is asked.
        account: under which the file keeps what is spent; see `LanguageModel`.
        count_tokens: the model's tokenizer, text → number of tokens; None: bytes, an upper bound.
        name: the model's, for messages; None: its own.
        place: where it is served, for messages.

    Raises:
        ConfigError: no LangChain model; a cache file without an identity; a budget without what it needs.
        DataError: the cache file can't be used.
    """
    if cache_path is not None and identity is None:
        raise ConfigError(
            f"the answers of {type(model).__name__} can't be kept in a file without a name to tell it from other "
            "models: pass identity='…', which changes whenever the model or its parameters do"
        )
    settings = settings or LLMSettings()
    known = identity if isinstance(identity, Mapping) else {"named": identity}
    backend = Backend(model, settings, identity=known, prompt=prompt, count_tokens=count_tokens, name=name, place=place)
    cache = AnswerCache(cache_path)
    try:
        return LanguageModel(backend, cache, settings, language=language, prompt=prompt, account=account)
    except BaseException:
        cache.close()
        raise
