"""One call of a LangChain model: what is sent, and what the response says.

Models of langchain-openai are made here from settings, and called through an HTTP client that checks each response.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue

from langchain_rcr.chains.answers import cut
from langchain_rcr.policy.prompt import APPENDIX_D, Conversation, Prompt
from rcr_trainer.errors import HIDDEN, ConfigError, remember, remember_key, without_secrets
from rcr_trainer.llm.cache import Answer, Use
from rcr_trainer.llm.faults import FailedResponseError, MalformedResponseError, diagnose
from rcr_trainer.llm.scoring import WAYS, Scored
from rcr_trainer.llm.settings import ONE_ANSWER, LLMSettings

Request: TypeAlias = str | Conversation | Scored
"""A prompt to answer, or a text to score."""

LONGEST_BODY = 16 << 20
"""Most bytes of a response, decompressed; log-probabilities of a prompt of 100,000 tokens take some 10 MB."""

_FORMAT = 2
"""Part of every cache key; raise it if the text of an answer is ever stored in another form."""
_TRUNCATED = {"length", "max_tokens", "max_output_tokens", "model_length"}
_REFUSED = {"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii"}
_REFUSED |= {"guardrail_intervened"}
_LONGEST_TEXT = 1 << 20
"""Characters of an answer that are read; the rest is cut off."""
_MOST_TOKENS = 10_000_000
"""No model reads or writes more tokens in one call; the longest contexts have up to this many."""
_MESSAGE_TOKENS = 16
"""The most tokens that a chat's roles and separators add to a text."""
_CONNECT_S = 10.0
"""Seconds to connect; later an unreachable server couldn't be told from one whose answer may have to be paid for."""
_OPENAI = "https://api.openai.com/v1"
_COUNTS = ("prompt_tokens", "completion_tokens")


class Client:
    """A LangChain completion or chat model, called without the retries and caches of LangChain or the model itself.

    The other arguments are as for `LanguageModel`.

    Args:
        count_tokens: the model's tokenizer, text → number; None: an upper bound, the number of bytes.
        name: for messages; None: the model's class.
        place: where it is served, for messages; "" if unknown.
        http: the HTTP client of a langchain-openai model, to be closed at the end.
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
        http: Any = None,
    ) -> None:
        self._model, self._http, self._is_chat = model, http, isinstance(model, BaseChatModel)
        # A chat model ends by itself; reasoning models refuse stop sequences, or stop inside their thoughts.
        usual = () if self._is_chat else prompt.stop
        self.stop = list(usual if settings.stop is None else settings.stop)
        self.instruction = prompt.instruction if self._is_chat else ""
        # Earlier versions could send `bound` along, so it is in the keys of answers in files.
        self._sent: dict[str, Any] = {"format": _FORMAT, **identity, "stop": self.stop, "bound": {}}
        self.batch_size = settings.batch_size if settings.kind == "local" else 1
        self.longest = settings.max_tokens
        self.exact_tokens = count_tokens is not None
        self.count = count_tokens or (lambda text: len(text.encode("utf-8", "surrogatepass")))
        self.name = name or type(model).__name__
        self.who = f"the model {self.name!r}" + (f" at {place}" if place else "")
        self.diagnose = partial(diagnose, who=self.who, openai=http is not None)
        self.scoring = WAYS[0]  # how a server is asked for a text's probability

    async def call(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer prompts, or score texts; token counts are −1 where the model reports no plausible ones."""
        if isinstance(requests[0], Scored):
            return await self._score([each for each in requests if isinstance(each, Scored)])
        values = [self._prompt(each) for each in requests if not isinstance(each, Scored)]
        result = await self._model.agenerate_prompt(values, stop=self.stop or None)
        whole = result.llm_output if len(values) == 1 else None
        return [answer_of(row[0], self.stop, whole) for row in result.generations]

    async def _score(self, requests: Sequence[Scored]) -> list[Answer]:
        requests = [Scored(self._prompt(each.prompt).to_string(), plain(each.continuation)) for each in requests]
        model = self._model
        if hasattr(model, "log_likelihoods"):
            texts = [each.prompt for each in requests], [each.continuation for each in requests]
            found = await asyncio.to_thread(model.log_likelihoods, *texts)
            return [Answer(repr(value), "", -1, -1) for value in found]
        if self._is_chat or self._http is None:
            raise ConfigError(f"{self.name!r} gives no probabilities: scoring needs llm.kind: local, or completion")
        asked = self.scoring.asked(requests[0])
        asked["extra_body"] |= model.extra_body or {}
        body = await model.async_client.create(model=model.model_name, logprobs=1, temperature=0, **asked)
        return [Answer(repr(self.scoring.read(body, requests[0])), "", *_counts(body["usage"]))]

    def key(self, request: Request) -> bytes:
        """A request's key in the cache."""
        system, turns = self._parts(request)
        identity = canonical({**self._sent, "instruction": system})
        marked = f"{len(identity)}:{identity}"
        if isinstance(request, Scored):
            marked = f"score:{marked}{len(request.prompt)}:{request}"
        elif len(turns) == 1 and not turns[0].startswith("chat:"):
            marked += turns[0]
        else:
            marked += f"chat:{json.dumps(turns)}"
        return hashlib.sha256(marked.encode("utf-8", "surrogatepass")).digest()

    def worst(self, requests: Sequence[Request]) -> Use:
        """The most that a call uses; to score a text, a server may also have to write."""
        read = sum(map(self.count_tokens, requests))
        written = sum(
            self.scoring.asked(each)["max_tokens"] if isinstance(each, Scored) else self.longest for each in requests
        )
        return Use(len(requests), read, written)

    def count_tokens(self, request: Request) -> int:
        """Tokens of a request with all that is sent along; may be somewhat too high."""
        system, turns = self._parts(request)
        messages = len(turns) if self._is_chat else 0
        if system:
            messages, turns = messages + 1, (system, *turns)
        return sum(map(self.count, turns)) + _MESSAGE_TOKENS * messages

    async def close(self) -> None:
        """Close the connections that were opened for this object."""
        if self._http is not None:
            await self._http.aclose()

    def _parts(self, request: Request) -> tuple[str, tuple[str, ...]]:
        """The system message ("" for none) and the turns, in sendable form."""
        asked = request if isinstance(request, Conversation) else Conversation(self.instruction, (str(request),))
        return plain(asked.system), tuple(map(plain, asked.turns))

    def _prompt(self, request: str | Conversation) -> PromptValue:
        system, turns = self._parts(request)
        if not self._is_chat:
            return StringPromptValue(text=str(Conversation(system, turns)))
        messages = [kind(turn) for kind, turn in zip(cycle((HumanMessage, AIMessage)), turns, strict=False)]
        return ChatPromptValue(messages=[*([SystemMessage(system)] if system else []), *messages])


def canonical(value: object) -> str:
    """A text that is equal for exactly those values that are the same JSON when sent."""
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except TypeError:  # names of several types can't be sorted until they are text
        return json.dumps(json.loads(json.dumps(value, default=repr)), sort_keys=True)


def plain(text: str) -> str:
    """The text made encodable in UTF-8: surrogate pairs are joined, and half a pair becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def answer_of(generation: Generation, stop: Sequence[str], whole: Mapping[str, Any] | None = None) -> Answer:
    """A model's output up to the first of `stop`; `whole` is the `llm_output` of a call with only this prompt."""
    counts = _usage(generation, whole or {})
    info: dict[str, Any] = dict(generation.generation_info or {})
    called = False
    if isinstance(generation, ChatGeneration):
        info = {**generation.message.response_metadata, **info}
        message = generation.message
        if message.additional_kwargs.get("refusal"):
            return Answer(None, "refused", *counts)
        if isinstance(message, AIMessage):
            calls = message.tool_calls, message.invalid_tool_calls, message.additional_kwargs.get("function_call")
            called = any(calls)
    ending = str(info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason") or "").lower()
    if ending in _REFUSED or ending == "too_long":
        return Answer(None, "too_long" if ending == "too_long" else "refused", *counts)
    text, stopped = cut(plain(generation.text[:_LONGEST_TEXT]), stop)
    if (ending in _TRUNCATED or len(generation.text) > _LONGEST_TEXT) and not stopped:
        return Answer(text or None, "truncated", *counts)
    return Answer(text or None, "" if text else "tool_call" if called else "empty", *counts)


def _usage(generation: Generation, whole: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens as reported with a generation; −1 if missing or implausible."""
    message = getattr(generation, "message", None)
    if reported := getattr(message, "usage_metadata", None):
        return _counts(reported, ("input_tokens", "output_tokens"))
    for reported in (generation.generation_info, whole.get("token_usage"), whole.get("usage")):
        if isinstance(reported, Mapping) and "prompt_tokens" in reported:
            return _counts(reported)
    return -1, -1


def _counts(reported: Mapping[str, Any], names: tuple[str, str] = _COUNTS) -> tuple[int, int]:
    read, written = (_token_count(reported.get(name)) for name in names)
    # No prompt has 0 tokens: LangChain writes 0 if the server reports nothing.
    return read or -1, written


def _token_count(value: object) -> int:
    """A reported number of tokens; −1 if missing or implausible."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return -1
    return int(value)


def address_of(settings: LLMSettings) -> str:
    """Where a server's model is served."""
    return settings.base_url or os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL") or _OPENAI


def identity_of(settings: LLMSettings) -> dict[str, Any]:
    """What distinguishes a server's model: all that is sent except the key from the environment.

    What looks like a secret may be a parameter (`eos_token`), so it counts. A password may be short enough to guess,
    and answer files are passed around, so the hash is a slow one.
    """
    address = address_of(settings).rstrip("/")
    sent = {"place": address, "extra_body": settings.extra_body}
    public = without_secrets(address).replace(f"{HIDDEN}@", "").rstrip("/")
    masked = {"place": public, "extra_body": without_secrets(settings.extra_body)}
    if canonical(masked) != canonical(sent):
        masked["hidden"] = hashlib.scrypt(canonical(sent).encode(), salt=b"langchain-rcr", n=1 << 14, r=8, p=1).hex()
    return {"model": settings.model, "temperature": settings.temperature, **masked}


def make_model(settings: LLMSettings) -> tuple[BaseLanguageModel[Any], Any]:
    """`OpenAI` (kind "completion") or `ChatOpenAI` (kind "chat") from settings, and its HTTP client.

    langchain-openai would share one client between models, but connections belong to the event loop that opened them.
    Its retries are off, too: they would repeat `insufficient_quota` past the budget.

    Raises:
        ConfigError: the key in the environment can't be one, or there is none and the server is OpenAI's own.
    """
    from langchain_openai import ChatOpenAI, OpenAI
    from openai import Timeout

    key, address = os.environ.get(settings.api_key_env, "").strip(), address_of(settings)
    remember_key(key)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key in {settings.api_key_env} can't be sent: it has characters that no key has")
    remember([address, settings.extra_body])
    parts = urlsplit(address)
    is_openais_own = parts.hostname == urlsplit(_OPENAI).hostname
    if not key and is_openais_own:
        raise ConfigError(
            f"no API key: set the environment variable {settings.api_key_env} (llm.api_key_env), or llm.base_url for "
            "a server of your own"
        )
    timeout = Timeout(settings.timeout, connect=min(_CONNECT_S, settings.timeout / 2))
    http = _checking_client(timeout, os.environ.get("OPENAI_PROXY"))
    # Sent as null, a limit would be none.
    body = {name: value for name, value in settings.extra_body.items() if value is not None or name not in ONE_ANSWER}
    options: dict[str, Any] = {
        "model": settings.model,
        "base_url": parts._replace(query="").geturl(),
        "default_query": dict(parse_qsl(parts.query)) or None,
        "api_key": key or "none",  # other servers accept any, but the client insists on one
        "timeout": timeout,
        "max_retries": 0,
        "cache": False,
        "http_async_client": http,
        "openai_proxy": None,
    }
    if settings.kind == "completion":
        model = OpenAI(**options, max_tokens=settings.max_tokens, extra_body=body or None)
        completions = model.async_client

        async def create(**params: Any) -> Any:
            # What langchain-openai does, but without pydantic's warnings about odd fields.
            return (await completions.create(**params)).model_dump(warnings=False)

        # Its own default temperature would be 0.7.
        own = {"async_client": SimpleNamespace(create=create), "temperature": settings.temperature}
        return model.model_copy(update=own), http
    # ChatOpenAI renames it max_completion_tokens; most other servers ignore that and write without end.
    if is_openais_own or "max_completion_tokens" not in body:
        (options if is_openais_own else body).setdefault("max_tokens", settings.max_tokens)
    options |= {"temperature": settings.temperature, "extra_body": body or None}
    return ChatOpenAI(**options, use_responses_api=False), http


def _checking_client(timeout: Any, proxy: str | None) -> Any:
    """An HTTP client that accepts only answers in OpenAI's protocol, of limited size.

    It follows no redirects: they would take the prompt, and keys in the user's own headers, to another host.
    """
    import openai

    class Checking(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            # By default the client also asks for encodings that it decodes without limit.
            request.headers["Accept-Encoding"] = "gzip"
            response = await super().send(request, stream=True, **options)
            try:
                content = await _body(response)
            finally:
                await response.aclose()
            if response.is_success and not stream:
                content = completed(content)
            sent_as = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(name, value) for name, value in response.headers.multi_items() if name not in sent_as]
            return type(response)(
                response.status_code, headers=headers, content=content, request=request, extensions=response.extensions
            )

    return Checking(timeout=timeout, proxy=proxy, follow_redirects=False)


async def _body(response: Any) -> bytes:
    """A response's content, decompressed no further than `LONGEST_BODY`: 48 kB may unpack to gigabytes."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise MalformedResponseError(f"encoded as {encoding[:60]!r}, where gzip was asked for")
    unpacker = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    content, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        try:
            if unpacker is None:
                content += chunk
            elif not unpacker.eof:  # or else it would join all that comes behind, chunk by chunk
                content += unpacker.decompress(chunk, LONGEST_BODY + 1 - len(content))
        except zlib.error as error:
            raise MalformedResponseError(f"not gzip: {error}") from None
        if max(received, len(content)) > LONGEST_BODY:
            raise MalformedResponseError(f"over {LONGEST_BODY >> 20} MiB")
    return bytes(content)


def completed(content: bytes) -> bytes:
    """A response's body, checked, with the fields that langchain-openai relies on.

    Implausible token counts are left out, so that they are estimated; a null text becomes empty.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):  # not JSON, a number of over 4,300 digits, or nested too deeply
        raise MalformedResponseError(f"not JSON: {content[:60]!r}") from None
    if not isinstance(body, dict):
        raise MalformedResponseError(f"no JSON object: {content[:60]!r}")
    choices, usage = body.get("choices"), body.get("usage")
    if body.get("error"):
        raise FailedResponseError(body["error"], charged=bool(choices))
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedResponseError(f"no choices: {content[:200]!r}")
    for choice in choices:
        ending = choice.get("finish_reason")
        # What failed while the model wrote, as OpenRouter says it, or vLLM and SGLang.
        if choice.get("error") or ending in ("error", "abort"):
            raise FailedResponseError(choice.get("error") or f"finish_reason {ending}", charged=True)
        if "message" not in choice:
            choice["text"] = choice.get("text") or ""
    told = usage if isinstance(usage, dict) else {}
    read, written, total = (_token_count(told.get(name)) for name in (*_COUNTS, "total_tokens"))
    if read >= 0:  # xAI and Gemini count what a model thinks, and charge for, in the total alone
        written = max(written, total - read)
    body["usage"] = {name: count for name, count in zip(_COUNTS, (read, written), strict=True) if count >= 0}
    return json.dumps(body).encode()
