"""One call of a model: what is sent, and what the response says.

A model is `Server`, which speaks OpenAI's protocol, or `rcr_trainer.llm.local.LocalLM`.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from langchain_rcr.chains.answers import cut
from langchain_rcr.policy.prompt import Conversation
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import MalformedResponseError, StatusError
from rcr_trainer.llm.redaction import HIDDEN, remember, remember_key, without_secrets
from rcr_trainer.llm.scoring import Scored, Way
from rcr_trainer.llm.settings import LLMSettings

LONGEST_BODY = 16 << 20
"""Bytes of a response, decompressed; the log-probabilities of a prompt of 100,000 tokens take some 10 MB."""

_TRUNCATED = {"length", "max_tokens", "max_output_tokens", "model_length"}
_REFUSED = {"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii"}
_REFUSED |= {"guardrail_intervened"}
_LONGEST_TEXT = 1 << 20
"""Characters of an answer that are read; the rest is cut off."""
_MOST_TOKENS = 10_000_000
"""Tokens that no model reads or writes in one call; the longest contexts have up to this many."""
_OPENAI = "https://api.openai.com/v1"
_PAYERS = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
"""Who pays, of those that a key may name: header and environment variable."""
_COUNTS = ("prompt_tokens", "completion_tokens")


class Model:
    """What answers: a base class.

    Attributes:
        name: for messages.
        place: where it is served, for messages; "" on this machine.
        identity: what tells the model from others in the cache, without what is sent with each prompt.
        exact_tokens: `count_tokens` is the model's own tokenizer; else an upper bound.
    """

    name, place, exact_tokens = "", "", False
    identity: Mapping[str, Any]

    async def answers(self, prompts: Sequence[Conversation], stop: Sequence[str]) -> list[Answer]:
        """Answer prompts; token counts are −1 where none is reported that can be true."""
        raise NotImplementedError

    async def scores(self, texts: Sequence[Scored], way: Way) -> list[Answer]:
        """The log-likelihoods of texts, as texts.

        Raises:
            UnscoredError: the server doesn't score in this way.
            ConfigError: this kind of model can't.
        """
        raise ConfigError(
            f"{self.name!r} tells no probabilities: scoring needs llm.kind: local, or completion with echo"
        )

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; the number of bytes is an upper bound."""
        return len(text.encode("utf-8", "surrogatepass"))

    async def close(self) -> None:
        """Close its connections."""


class Server(Model):
    """A model on a server that speaks OpenAI's protocol, of kind "completion" or "chat"; see `Model`.

    It follows no redirects, which would take the prompt, and keys in the user's own headers, to another host.

    Raises:
        ConfigError: there is no key in the environment, and the server is OpenAI's own.
    """

    def __init__(self, settings: LLMSettings) -> None:
        key, address = os.environ.get(settings.api_key_env, ""), address_of(settings)
        remember_key(key)
        remember([address, settings.extra_body])
        is_openais_own = urlsplit(address).hostname == urlsplit(_OPENAI).hostname
        if not key and is_openais_own:
            raise ConfigError(
                f"no API key: set the environment variable {settings.api_key_env} (llm.api_key_env), or llm.base_url "
                "for a server of your own"
            )
        self.name, self.place = settings.model or "", public(address)
        self.identity = {"kind": settings.kind, "max_tokens": settings.max_tokens, **identity_of(settings)}
        self._is_chat, self._extra = settings.kind == "chat", settings.extra_body
        # Other servers ignore the name by which OpenAI's own chats know it, and then write without end.
        longest = "max_completion_tokens" if self._is_chat and is_openais_own else "max_tokens"
        self._sent: dict[str, Any] = {"model": settings.model, longest: settings.max_tokens}
        if settings.temperature is not None:
            self._sent["temperature"] = settings.temperature
        self._url = f"{address.rstrip('/')}/{'chat/completions' if self._is_chat else 'completions'}"
        # Other servers take any key. The HTTP client would also ask for encodings that it decodes without limit.
        headers = {"Authorization": f"Bearer {key or 'none'}", "Accept-Encoding": "gzip"}
        headers |= {name: os.environ[variable] for name, variable in _PAYERS.items() if os.environ.get(variable)}
        self._http = httpx.AsyncClient(
            headers=[(name.encode(), text.encode()) for name, text in headers.items()],
            timeout=settings.timeout,
            proxy=os.environ.get("OPENAI_PROXY"),
            limits=httpx.Limits(),
        )

    async def answers(self, prompts: Sequence[Conversation], stop: Sequence[str]) -> list[Answer]:
        """See `Model`; one prompt at a time."""
        (asked,) = prompts
        sent: dict[str, Any] = {"stop": stop} if stop else {}
        if self._is_chat:
            messages = [("system", asked.system)] if asked.system else []
            messages += [(("user", "assistant")[n % 2], turn) for n, turn in enumerate(asked.turns)]
            sent["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            sent |= {"prompt": [str(asked)], "top_p": 1}  # where a server has another default
        body = await self._post(sent)
        return [_read(body["choices"][0], body["usage"], stop, is_chat=self._is_chat)]

    async def scores(self, texts: Sequence[Scored], way: Way) -> list[Answer]:
        """See `Model`; one text at a time."""
        (text,) = texts
        if self._is_chat:
            return await super().scores(texts, way)
        body = await self._post({"logprobs": 1, "temperature": 0, **way.asked(text)})
        return [Answer(repr(way.read(body, text)), "", *_counts(body["usage"]))]

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _post(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        async with self._http.stream("POST", self._url, json={**self._sent, **sent, **self._extra}) as response:
            content = await _body(response)
        if not response.is_success:
            raise StatusError(response.status_code, response.headers, content)
        return completed(content)


def _read(choice: Mapping[str, Any], usage: Mapping[str, int], stop: Sequence[str], *, is_chat: bool) -> Answer:
    """The answer in a choice; a `MalformedResponseError` if it isn't there."""
    message = choice.get("message") if is_chat else {"content": choice.get("text")}
    if not isinstance(message, Mapping):
        raise MalformedResponseError("no message")
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        raise MalformedResponseError("no text")
    ending = "refusal" if message.get("refusal") else str(choice.get("finish_reason") or "")
    return answer_of(content, ending, stop, _counts(usage))


def canonical(value: object) -> str:
    """A text that is equal for what is the same JSON when it is sent, and for nothing else."""
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except TypeError:  # names of several types can't be sorted until they are text
        return json.dumps(json.loads(json.dumps(value, default=repr)), sort_keys=True)


def plain(text: str) -> str:
    """A text that has a UTF-8 form: surrogate pairs are joined, and half a pair becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def answer_of(text: str, ending: str, stop: Sequence[str], counts: tuple[int, int]) -> Answer:
    """What a model wrote, up to the first of `stop`, by how it says that it ended."""
    ending = ending.lower()
    if ending in _REFUSED or ending == "too_long":
        return Answer(None, "too_long" if ending == "too_long" else "refused", *counts)
    written, stopped = cut(plain(text[:_LONGEST_TEXT]), stop)
    if (ending in _TRUNCATED or len(text) > _LONGEST_TEXT) and not stopped:
        return Answer(written or None, "truncated", *counts)
    return Answer(written or None, "" if written else "empty", *counts)


def _counts(usage: Mapping[str, int]) -> tuple[int, int]:
    """Prompt and completion tokens as reported; −1 for what isn't. No prompt has 0 tokens."""
    return usage.get("prompt_tokens") or -1, usage.get("completion_tokens", -1)


def _token_count(value: object) -> int:
    """A number of tokens as reported; −1 where it is missing or can't be true."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return -1
    return int(value)


def address_of(settings: LLMSettings) -> str:
    """Where a server's model is served."""
    return settings.base_url or os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL") or _OPENAI


def public(address: str) -> str:
    """An address without user name, password and keys."""
    return str(without_secrets(address)).replace(f"{HIDDEN}@", "").rstrip("/")


def identity_of(settings: LLMSettings) -> dict[str, Any]:
    """What tells a server's model from others: all that is sent except the key from the environment.

    What looks like a secret may be a parameter (`eos_token`), so it counts. A password may be short enough to guess,
    and files of answers are passed around, so it is hashed slowly.
    """
    address = address_of(settings).rstrip("/")
    sent = {"place": address, "extra_body": settings.extra_body}
    masked = {"place": public(address), "extra_body": without_secrets(settings.extra_body)}
    if canonical(masked) != canonical(sent):
        masked["hidden"] = hashlib.scrypt(canonical(sent).encode(), salt=b"langchain-rcr", n=1 << 14, r=8, p=1).hex()
    return {"model": settings.model, "temperature": settings.temperature, **masked}


async def _body(response: httpx.Response) -> bytes:
    """A response's content, decompressed no further than `LONGEST_BODY`: 48 kB may unpack to gigabytes."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise MalformedResponseError(f"encoded as {encoding[:60]!r}, where gzip was asked for")
    unpacker = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    content, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        try:
            content += unpacker.decompress(chunk, LONGEST_BODY + 1 - len(content)) if unpacker else chunk
        except zlib.error as error:
            raise MalformedResponseError(f"not gzip: {error}") from None
        if max(received, len(content)) > LONGEST_BODY:
            raise MalformedResponseError(f"over {LONGEST_BODY >> 20} MiB")
    return bytes(content)


def completed(content: bytes) -> dict[str, Any]:
    """The body of a response, checked: it has a choice, and `usage` has the token counts that can be true."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, a number of over 4,300 digits, or nested too deeply
        raise MalformedResponseError(f"not JSON: {content[:60]!r}") from None
    if not isinstance(body, dict):
        raise MalformedResponseError(f"no JSON object: {content[:60]!r}")
    if body.get("error"):
        raise MalformedResponseError(f"an error in place of an answer: {str(body['error'])[:200]}")
    choices, usage = body.get("choices"), body.get("usage")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedResponseError("no choices")
    counts = {name: _token_count(usage.get(name)) for name in _COUNTS} if isinstance(usage, dict) else {}
    body["usage"] = {name: count for name, count in counts.items() if count >= 0}
    return body
