"""One attempt at an answer from any LangChain model: what is sent, and what the response says."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableBinding
from pydantic import SecretStr

from langchain_rcr.chains.answers import cut
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import Diagnosis, MalformedResponseError
from rcr_trainer.llm.ledger import Answer, Use, canonical, token_count
from rcr_trainer.llm.openai_ import detached, is_openai
from rcr_trainer.llm.scoring import WAYS, Scored
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.redaction import secrets_in

Request: TypeAlias = str | Conversation | Scored
"""A prompt to answer, or a text to score."""

_FORMAT = 2
"""Part of every key of the cache: raised when an answer's text would be kept in another form."""

_TRUNCATED = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
_REFUSED = frozenset({"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii"})
_REFUSED |= {"guardrail_intervened"}
_LONGEST = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_output_tokens", "num_predict")
_LONGEST_TEXT = 1 << 20
"""Characters of an answer that are read; the rest is cut off."""
_MESSAGE_TOKENS = 16
"""What roles and separators of a chat add to the text, generously."""


class Backend:
    """A LangChain completion or chat model, called past LangChain's own cache and the client's own retries.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, also one with parameters bound (`model.bind(…)`).
        settings: stop sequences, longest answer, batch size.
        identity: what the cache knows the model by, without what is sent along with each prompt.
        prompt: how prompts are written, which says where answers end and what a chat model is told before a text.
        count_tokens: the model's tokenizer, text → number; None: an upper bound, the number of bytes.
        name: the model's, for messages; None: its own.
        place: where it is served, for messages; "" if unknown.

    Attributes:
        batch_size: prompts in a call; more than 1 for a model that computes on this machine.
        longest: tokens that an answer has at most; None if that isn't known.
        exact_tokens: tokens are counted by the model's own tokenizer.
        diagnose: tells what an exception of the model means.
        scoring: how a server is asked how probable a text is.

    Raises:
        ConfigError: that is no LangChain model.
    """

    def __init__(
        self,
        model: Any,
        settings: LLMSettings,
        *,
        identity: Mapping[str, Any],
        prompt: Prompt = APPENDIX_D,
        count_tokens: Callable[[str], int] | None = None,
        name: str | None = None,
        place: str = "",
    ) -> None:
        bound: dict[str, Any] = {}
        while isinstance(model, RunnableBinding):
            bound = {**model.kwargs, **bound}
            model = model.bound
        if not isinstance(model, BaseLanguageModel) or not callable(getattr(model, "agenerate_prompt", None)):
            raise ConfigError(f"the model must be a LangChain LLM or chat model, not {type(model).__name__}")
        self._chat = isinstance(model, BaseChatModel)
        # A chat model ends by itself; models that think refuse stop sequences, or stop inside their thoughts.
        stop = bound.pop("stop", None) or (() if self._chat else prompt.stop)
        self.stop = list(stop if settings.stop is None else settings.stop)
        self.instruction = prompt.instruction if self._chat else ""
        self._bound, self._sent = bound, {"format": _FORMAT, **identity, "stop": self.stop, "bound": bound}
        self._identity = lru_cache(maxsize=4)(self._identity_with)
        self.batch_size = settings.batch_size if settings.kind == "local" else 1
        self.longest = settings.max_tokens if "max_tokens" in settings.model_fields_set else _longest(model, bound)
        self.exact_tokens = count_tokens is not None
        self._count = count_tokens or (lambda text: len(text.encode("utf-8", "surrogatepass")))
        self.name = name or str(getattr(model, "model_name", "") or getattr(model, "model", "") or type(model).__name__)
        self.diagnose = Diagnosis(self.name, place, _secrets(model), is_openai(model))
        self.scoring = WAYS[0]
        self._owned: Any = None
        if is_openai(model):
            model, self._owned = detached(model)
        elif model.cache is not False and (isinstance(model.cache, BaseCache) or get_llm_cache() is not None):
            # LangChain's cache leaves out the server's address, and would make old answers look paid for.
            model = model.model_copy(update={"cache": False})
        self._model: BaseLanguageModel[Any] = model

    async def call(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer some prompts, or score some texts, in one call of the model.

        Token counts are −1 where it gives none that can be true.

        Raises:
            UnscoredError: it can't score.
        """
        if isinstance(requests[0], Scored):
            return await self._score([each for each in requests if isinstance(each, Scored)])
        values = [self._prompt(each) for each in requests if not isinstance(each, Scored)]
        result = await self._model.agenerate_prompt(values, stop=self.stop or None, **self._bound)
        if len(result.generations) != len(values) or not all(result.generations):
            raise MalformedResponseError("no choices")
        whole = result.llm_output if len(values) == 1 else None
        return [answer_of(row[0], self.stop, whole) for row in result.generations]

    async def _score(self, requests: Sequence[Scored]) -> list[Answer]:
        requests = [Scored(self._prompt(each.prompt).to_string(), plain(each.continuation)) for each in requests]
        model: Any = self._model
        if hasattr(model, "log_likelihoods"):
            texts = [each.prompt for each in requests], [each.continuation for each in requests]
            found = await asyncio.to_thread(model.log_likelihoods, *texts)
            return [Answer(repr(value), "", -1, -1) for value in found]
        if self._chat or not is_openai(model):
            raise ConfigError(
                f"{self.name!r} tells no probabilities: scoring needs llm.kind: local, or completion with echo"
            )
        asked = self.scoring.asked(requests[0])
        asked["extra_body"] |= model.extra_body or {}
        body = await model.async_client.create(model=model.model_name, logprobs=1, temperature=0, **asked)
        return [Answer(repr(self.scoring.read(body, requests[0])), "", *_counts(body["usage"]))]

    def key(self, request: Request) -> bytes:
        """The cache's key of a request."""
        if isinstance(request, Scored):
            identity, text = self._identity(self.instruction), f"{len(request.prompt)}:{request}"
            marked = f"score:{len(identity)}:{identity}{text}"
        else:
            system, turns = self._parts(request)
            identity, plainly = self._identity(system), len(turns) == 1 and not turns[0].startswith("chat:")
            text = turns[0] if plainly else f"chat:{json.dumps(turns)}"
            marked = f"{len(identity)}:{identity}{text}"
        return hashlib.sha256(marked.encode("utf-8", "surrogatepass")).digest()

    def worst(self, requests: Sequence[Request]) -> Use:
        """What a call uses at most. A scored text is read, and what a server is asked to write with it."""
        read = sum(self.count_tokens(str(each) if isinstance(each, Scored) else each) for each in requests)
        written = sum(
            self.scoring.asked(each)["max_tokens"] if isinstance(each, Scored) else self.longest or 0
            for each in requests
        )
        return Use(len(requests), read, written)

    def count_tokens(self, request: str | Conversation) -> int:
        """Tokens of a prompt with all that is sent along, at least as many as there are."""
        system, turns = self._parts(request)
        texts = [*([system] if system else []), *turns]
        around = _MESSAGE_TOKENS if self._chat else 0
        return sum(map(self._count, texts)) + around * len(turns) + (_MESSAGE_TOKENS if system else 0)

    async def close(self) -> None:
        """Close the connections that were opened for this object."""
        if self._owned is not None:
            await self._owned.aclose()

    def _parts(self, request: str | Conversation) -> tuple[str, tuple[str, ...]]:
        """The system message ("": none) and the turns, without what can't be sent."""
        asked = request if isinstance(request, Conversation) else Conversation(self.instruction, (request,))
        return plain(asked.system), tuple(map(plain, asked.turns))

    def _identity_with(self, system: str) -> str:
        """What the cache knows a model by that is told this first."""
        return canonical({**self._sent, "instruction": system})

    def _prompt(self, request: str | Conversation) -> PromptValue:
        system, turns = self._parts(request)
        if not self._chat or (len(turns) == 1 and not system):
            return StringPromptValue(text=str(Conversation(system, turns)))
        kinds: list[type[BaseMessage]] = [HumanMessage, AIMessage]
        messages = [kinds[n % 2](turn) for n, turn in enumerate(turns)]
        return ChatPromptValue(messages=[*([SystemMessage(system)] if system else []), *messages])


def answer_of(generation: Generation, stop: Sequence[str], whole: Mapping[str, Any] | None = None) -> Answer:
    """What a LangChain model generated for one prompt.

    Args:
        generation: a completion model's or a chat model's.
        stop: the text ends before the first of these, whether the server heeds them or not.
        whole: what the model reports of the whole call, if the call had this prompt alone.
    """
    counts = _usage(generation, whole or {})
    info: dict[str, Any] = dict(generation.generation_info or {})
    if isinstance(generation, ChatGeneration):
        info = {**generation.message.response_metadata, **info}
        if generation.message.additional_kwargs.get("refusal"):
            return Answer(None, "refused", *counts)
    ending = str(info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason") or "").lower()
    if ending in _REFUSED or ending == "too_long":
        return Answer(None, "too_long" if ending == "too_long" else "refused", *counts)
    text, stopped = cut(plain(generation.text[:_LONGEST_TEXT]), stop)
    if (ending in _TRUNCATED or len(generation.text) > _LONGEST_TEXT) and not stopped:
        return Answer(text or None, "truncated", *counts)
    return Answer(text or None, "" if text else "empty", *counts)


def plain(text: str) -> str:
    """A text that has a UTF-8 form: surrogate pairs are joined, and half a pair is U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _usage(generation: Generation, whole: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens as reported with a generation; −1 for what isn't, or can't be true."""
    if isinstance(generation, ChatGeneration):
        reported = getattr(generation.message, "usage_metadata", None)
        if reported:
            return _counts(reported, "input_tokens", "output_tokens")
    for counts in (generation.generation_info or {}, whole.get("token_usage") or {}, whole.get("usage") or {}):
        if isinstance(counts, Mapping) and "prompt_tokens" in counts:
            return _counts(counts)
    return -1, -1


def _counts(
    reported: Mapping[str, Any], read: str = "prompt_tokens", written: str = "completion_tokens"
) -> tuple[int, int]:
    # No prompt has 0 tokens: LangChain writes 0 where the server said nothing.
    return token_count(reported.get(read)) or -1, token_count(reported.get(written))


def _secrets(model: BaseLanguageModel[Any]) -> frozenset[str]:
    """The keys that a model holds, in its address, headers and parameters, too."""
    values = {name: getattr(model, name, None) for name in type(model).model_fields}
    found = {value.get_secret_value() for value in values.values() if isinstance(value, SecretStr)}
    return frozenset({secret for secret in found if len(secret) > 3}.union(secrets_in(values)))


def _longest(model: BaseLanguageModel[Any], bound: Mapping[str, Any]) -> int | None:
    extra = getattr(model, "extra_body", None) or {}
    given = [place.get(name) for place in (bound, vars(model), extra) for name in _LONGEST]
    return next((value for value in given if isinstance(value, int) and value > 0), None)
