"""How a language model is had: from settings, or from any LangChain object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.answers import default_stop, question_of
from rcr_trainer.llm.backend import LangChainBackend
from rcr_trainer.llm.budget import Budget, Prices
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.caller import Patience
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.settings import LLMSettings

CHAT_INSTRUCTION = (
    "The text shows questions, each after 'Source:', and their programs, each after 'Target:'. "
    "Answer with the program of the last question alone, in the same form, without explanation."
)
"""What a chat model is told, since it doesn't go on with a text by itself."""


def open_llm(
    settings: LLMSettings,
    cache_path: str | os.PathLike[str] | None,
    *,
    language: str = "functional",
    account: str | None = None,
    guesses: Mapping[str, str] | None = None,
) -> LanguageModel:
    """A model by settings. Nothing is asked yet.

    Args:
        settings: which model, and how it is asked.
        cache_path: the file with the answers, kept over runs; None: in memory.
        language: of the programs; it decides where an answer ends if the settings don't.
        account: under which the file keeps what is spent; see `LanguageModel`.
        guesses: question → program. A local model answers faster where it would write just that; no answer changes.

    Raises:
        ConfigError: settings that can't be; no model name; no API key for OpenAI's own server; no such folder.
        MissingExtraError: langchain-openai is not installed.
        DataError: the cache file can't be used.
    """
    if not settings.given:
        msg = (
            "llm.model is required: the name of a model that the server has, or of a local folder (there is no "
            "default, since models come and go: OpenAI has shut down those that older programs name)"
        )
        raise ConfigError(msg)
    name = settings.model or ""
    chat = settings.kind == "chat"
    stop = default_stop(language, chat=chat) if settings.stop is None else list(settings.stop)
    options: dict[str, Any] = {
        "cache_path": cache_path,
        "account": account,
        "budget": Budget(settings.budget_calls, settings.budget_tokens, settings.budget_money),
        "prices": None
        if settings.price_prompt is None or settings.price_completion is None
        else Prices(settings.price_prompt, settings.price_completion),
        "max_tokens": settings.max_tokens,
        "attempts": settings.attempts,
        "backoff": settings.backoff,
        "name": name,
    }
    if settings.kind == "local":
        from rcr_trainer.llm.local import LocalLM

        local = LocalLM(
            model=name,
            max_new_tokens=settings.max_tokens,
            stop=stop,
            batch_size=settings.batch_size,
            device=settings.device,
            dtype=settings.dtype,
            draft=None if guesses is None else lambda prompt: guesses.get(question_of(prompt)),
        )
        return wrap(
            local,
            stop=stop,
            instruction=settings.instruction or "",
            batch_size=settings.batch_size,
            concurrency=1,
            timeout=None,
            count_tokens=local.count_tokens,
            **options,
        )
    from rcr_trainer.llm.openai_ import make

    made = make(
        settings.kind,
        name,
        base_url=settings.base_url,
        api_key_env=settings.api_key_env,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        timeout=settings.timeout,
        extra_body=settings.extra_body,
    )
    instruction = settings.instruction if settings.instruction is not None else CHAT_INSTRUCTION if chat else ""
    return wrap(
        made,
        stop=stop,
        instruction=instruction,
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        **options,
    )


def wrap(
    model: Any,
    *,
    cache_path: str | os.PathLike[str] | None = None,
    stop: Sequence[str] = (),
    instruction: str = "",
    identity: str | None = None,
    account: str | None = None,
    budget: Budget | None = None,
    prices: Prices | None = None,
    concurrency: int = 16,
    attempts: int = 6,
    timeout: float | None = 60.0,
    backoff: float = 1.0,
    batch_size: int = 1,
    max_tokens: int | None = None,
    count_tokens: Callable[[str], int] | None = None,
    name: str | None = None,
) -> LanguageModel:
    """Any LangChain completion or chat model, given as an object.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, also `model.bind(…)`.
        cache_path: the file with the answers, kept over runs; None: in memory.
        stop: stop sequences; sent along, and applied to what comes back.
        instruction: a system message, or a paragraph before the prompt of a completion model.
        identity: what the cache knows the model by; needed only for a model with parts that have no text.
        account: under which the file keeps what is spent; see `LanguageModel`.
        budget: what may be spent; tokens and money need `max_tokens` if the model doesn't have it.
        prices: dollars for a million tokens.
        concurrency: calls that run at the same time.
        attempts: calls for a prompt before the run stops.
        timeout: seconds for an attempt; None: no limit. A model that knows no async runs on in its thread.
        backoff: seconds before the second attempt, doubled for each further one.
        batch_size: prompts in a call; more than 1 for models that compute on this machine.
        max_tokens: tokens that an answer has at most. Not sent: the model is as it is.
        count_tokens: the model's tokenizer, text → number of tokens; None: bytes, an upper bound.
        name: the model's name in messages.

    Raises:
        ConfigError: no LangChain model; one that a cache file can't tell from others; a budget without what it needs.
        DataError: the cache file can't be used.
    """
    for field_name, value in (("concurrency", concurrency), ("attempts", attempts), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{field_name} must be at least 1, got {value}")
    backend = LangChainBackend(
        model,
        stop=stop,
        instruction=instruction,
        batch_size=batch_size,
        max_tokens=max_tokens,
        count_tokens=count_tokens,
        name=name,
        named=identity,
        strict=cache_path is not None,
    )
    cache = AnswerCache(cache_path)
    try:
        return LanguageModel(
            backend,
            cache,
            patience=Patience(concurrency, attempts, timeout, backoff),
            budget=budget,
            prices=prices,
            account=account,
        )
    except BaseException:
        cache.close()
        raise
