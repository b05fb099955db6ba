"""How a language model is had: from settings, or from any LangChain object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.answers import default_stop, question_of
from rcr_trainer.llm.backend import LangChainBackend
from rcr_trainer.llm.budget import Budget, Prices
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.caller import Patience
from rcr_trainer.llm.model import LanguageModel

Kind = Literal["completion", "chat", "local"]

CHAT_INSTRUCTION = (
    "The text shows questions, each after 'Source:', and their programs, each after 'Target:'. "
    "Answer with the program of the last question alone, in the same form, without explanation."
)
"""What a chat model is told, since it doesn't go on with a text by itself."""


@dataclass(frozen=True, kw_only=True)
class LLMSettings:
    r"""Which model, and how it is asked.

    Attributes:
        kind: "completion" (`langchain_openai.OpenAI`), "chat" (`ChatOpenAI`) or "local" (a folder for transformers).
        model: its name as the server knows it, or the folder (or hub name).
        base_url: the server; None: OpenAI's own, or what the environment says.
        api_key_env: the environment variable with the key. The key itself is never written anywhere.
        temperature: 0 for the likeliest answer; None: don't send it (some models refuse it).
        max_tokens: longest answer, thoughts of a reasoning model included.
        stop: stop sequences; None: "\n", for chat and for languages with programs of several lines "\nSource:";
            []: none (some models refuse them).
        instruction: a system message, or a paragraph before the prompt; None: CHAT_INSTRUCTION for chat, else none.
        timeout: seconds for an attempt (kind local: none).
        concurrency: calls that run at the same time (kind local: one batch).
        attempts: calls for a prompt before the run stops.
        backoff: seconds before the second attempt, doubled for each further one.
        batch_size: kind local: prompts that are decoded together.
        device: kind local: "auto", "cpu", "cuda", "mps".
        dtype: kind local: "auto" (as the folder says), "float32", "bfloat16", "float16".
        extra_body: further JSON parameters of the server's own.
        price_prompt: dollars for a million prompt tokens; with price_completion, or neither.
        price_completion: dollars for a million completion tokens.
        budget_calls: calls at most; None: no limit.
        budget_tokens: prompt and completion tokens at most.
        budget_money: dollars at most; needs the prices.
    """

    kind: Kind = "completion"
    model: str = ""
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float | None = 0.0
    max_tokens: int = 256
    stop: Sequence[str] | None = None
    instruction: str | None = None
    timeout: float = 60.0
    concurrency: int = 16
    attempts: int = 6
    backoff: float = 1.0
    batch_size: int = 16
    device: str = "auto"
    dtype: str = "auto"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    price_prompt: float | None = None
    price_completion: float | None = None
    budget_calls: int | None = None
    budget_tokens: int | None = None
    budget_money: float | None = None

    def __post_init__(self) -> None:
        if not (self.model or "").strip():
            raise ConfigError(
                "llm.model is required: the name of a model that the server has, or of a local folder (there is no "
                "default, since models come and go: OpenAI has shut down those that older programs name)"
            )
        if self.kind not in get_args(Kind):
            raise ConfigError(f"llm.kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.kind == "local" and self.temperature:
            raise ConfigError(f"llm.temperature = {self.temperature}: a local model decodes greedily, set it to 0")
        if self.kind == "local" and self.base_url:
            raise ConfigError("llm.base_url is for kind completion or chat; a local model has no server")
        if (self.price_prompt is None) != (self.price_completion is None):
            raise ConfigError("llm.price_prompt and llm.price_completion: give both or neither")
        if isinstance(self.stop, str) or "" in (self.stop or ()):
            raise ConfigError(f"llm.stop = {self.stop!r}: give a list of texts, none of them empty")
        for name in ("max_tokens", "timeout", "concurrency", "attempts", "batch_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"llm.{name} must be above 0, got {getattr(self, name)}")

    @property
    def prices(self) -> Prices | None:
        """None if there are none."""
        if self.price_prompt is None or self.price_completion is None:
            return None
        return Prices(self.price_prompt, self.price_completion)

    @property
    def budget(self) -> Budget:
        """What may be spent."""
        return Budget(self.budget_calls, self.budget_tokens, self.budget_money)


def open_llm(
    config: LLMSettings | Mapping[str, Any] | Any,
    cache_path: str | os.PathLike[str] | None,
    *,
    language: str = "functional",
    account: str | None = None,
    guesses: Mapping[str, str] | None = None,
) -> LanguageModel:
    """A model by settings. Nothing is asked yet.

    Args:
        config: `LLMSettings`, or a mapping or pydantic model with (some of) its fields.
        cache_path: the file with the answers, kept over runs; None: in memory.
        language: of the programs; it decides where an answer ends if the settings don't.
        account: under which the file keeps what is spent; see `LanguageModel`.
        guesses: question → program. A local model answers faster where it would write just that; no answer changes.

    Raises:
        ConfigError: settings that can't be; no model name; no API key for OpenAI's own server; no such folder.
        MissingExtraError: langchain-openai is not installed.
        DataError: the cache file can't be used.
    """
    settings = _settings(config)
    chat = settings.kind == "chat"
    stop = default_stop(language, chat=chat) if settings.stop is None else list(settings.stop)
    options: dict[str, Any] = {
        "cache_path": cache_path,
        "account": account,
        "budget": settings.budget,
        "prices": settings.prices,
        "max_tokens": settings.max_tokens,
        "attempts": settings.attempts,
        "backoff": settings.backoff,
        "name": settings.model,
    }
    if settings.kind == "local":
        from rcr_trainer.llm.local import LocalLM

        local = LocalLM(
            model=settings.model,
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
        settings.model,
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


def _settings(config: Any) -> LLMSettings:
    if isinstance(config, LLMSettings):
        return config
    given = config.model_dump() if hasattr(config, "model_dump") else config
    if not isinstance(given, Mapping):
        raise ConfigError(f"llm: settings must be a mapping or LLMSettings, not {type(config).__name__}")
    unknown = sorted(set(given) - {each.name for each in fields(LLMSettings)})
    if unknown:
        raise ConfigError(f"llm.{unknown[0]}: there is no such setting")
    return LLMSettings(**given)
