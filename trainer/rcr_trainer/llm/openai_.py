"""Models of langchain-openai: made from settings, and without what would get in the way of our own retries."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from typing import Any
from urllib.parse import urlsplit

from langchain_core.language_models import BaseLanguageModel

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import MalformedResponseError
from rcr_trainer.llm.ledger import canonical, token_count
from rcr_trainer.llm.settings import LLMSettings
from rcr_trainer.redaction import HIDDEN, remember_key, without_secrets

LONGEST_BODY = 16 << 20
"""Bytes of a response, decompressed; the log-probabilities of a prompt of 100,000 tokens have some 10 MB."""

_OPENAI = "https://api.openai.com/v1"
_COUNTS = ("prompt_tokens", "completion_tokens")
_OF_THE_WIRE = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that describe how a body was sent."""


def is_openai(model: BaseLanguageModel[Any]) -> bool:
    """Whether the model is langchain-openai's, or derived from one."""
    return any(cls.__module__.startswith("langchain_openai.") for cls in type(model).__mro__)


def address_of(settings: LLMSettings) -> str:
    """Where the model of some settings is served."""
    return settings.base_url or os.environ.get("OPENAI_API_BASE") or os.environ.get("OPENAI_BASE_URL") or _OPENAI


def public(address: str) -> str:
    """An address without user name, password and keys."""
    return str(without_secrets(address)).replace(f"{HIDDEN}@", "").rstrip("/")


def identity_of(settings: LLMSettings) -> dict[str, Any]:
    """What the cache knows a server's model by: all that is sent but the key that the environment holds.

    What looks like a secret may be a parameter (`eos_token`), so it counts. A password may be short enough to guess,
    and files of answers are passed around: to try one takes a while.
    """
    address = address_of(settings).rstrip("/")
    sent = {"place": address, "extra_body": settings.extra_body}
    masked = {"place": public(address), "extra_body": without_secrets(settings.extra_body)}
    if canonical(masked) != canonical(sent):
        masked["hidden"] = hashlib.scrypt(canonical(sent).encode(), salt=b"langchain-rcr", n=1 << 14, r=8, p=1).hex()
    return {"model": settings.model, "temperature": settings.temperature, **masked}


def make(settings: LLMSettings) -> BaseLanguageModel[Any]:
    """`OpenAI` (kind "completion") or `ChatOpenAI` (kind "chat") by settings.

    Raises:
        ConfigError: the environment variable with the key is not set, and the server is OpenAI's own.
    """
    from langchain_openai import ChatOpenAI, OpenAI

    key, address = os.environ.get(settings.api_key_env, ""), address_of(settings)
    remember_key(key)
    is_openais_own = urlsplit(address).hostname == urlsplit(_OPENAI).hostname
    if not key and is_openais_own:
        raise ConfigError(
            f"no API key: set the environment variable {settings.api_key_env} (llm.api_key_env), or llm.base_url for "
            "a server of your own"
        )
    body = dict(settings.extra_body)
    options: dict[str, Any] = {
        "model": settings.model,
        "base_url": address,
        "api_key": key or "none",  # servers of one's own take any, and the client insists on one
        "timeout": settings.timeout,
        "max_retries": 0,
    }
    if settings.temperature is not None:
        options["temperature"] = settings.temperature
    if settings.kind == "completion":
        return OpenAI(**options, max_tokens=settings.max_tokens, extra_body=body or None)
    if is_openais_own:
        options["max_tokens"] = settings.max_tokens
    else:
        # ChatOpenAI renames it max_completion_tokens, which other servers ignore, and then write without end.
        body.setdefault("max_tokens", settings.max_tokens)
    return ChatOpenAI(**options, extra_body=body or None, use_responses_api=False)


def detached(model: BaseLanguageModel[Any]) -> tuple[BaseLanguageModel[Any], Any]:
    """A copy of a langchain-openai model that fails at once and openly.

    The client's own retries are off: it would repeat `insufficient_quota`, unseen by the budget. Its HTTP client is a
    new one, because langchain-openai shares one between models and connections belong to the event loop that opened
    them; it follows no redirects and checks each response (`_checking_client`). An HTTP client that the user made stays
    as it is.

    Returns:
        The copy, and what to close at the end (None: the HTTP client is the user's).
    """
    model_: Any = model
    chat = getattr(model_, "root_async_client", None)
    root = chat or model_.async_client._client
    owned, proxy = None, getattr(model, "openai_proxy", None)
    if proxy or getattr(model, "http_async_client", None) is None:
        owned = _checking_client(root.timeout, proxy)
    client = root.with_options(max_retries=0, **({"http_client": owned} if owned is not None else {}))
    if chat is not None:
        update = {"root_async_client": client, "async_client": client.chat.completions}
    else:
        update = {"async_client": _Completions(client)}
    return model.model_copy(update={**update, "cache": False}), owned


def _checking_client(timeout: Any, proxy: str | None) -> Any:
    """An HTTP client whose responses are answers of OpenAI's protocol, of a limited size, and from the address itself.

    A redirect would take the prompt, and keys in headers of one's own, to another host.
    """
    import openai

    class Checking(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            # In place of what the HTTP client can decode: some of that has no limit.
            request.headers["Accept-Encoding"] = "gzip"
            response = await super().send(request, stream=True, **options)
            try:
                content = await _body(response)
            finally:
                await response.aclose()
            whole = completed(content) if response.is_success and not stream else content
            headers = [(name, value) for name, value in response.headers.multi_items() if name not in _OF_THE_WIRE]
            return type(response)(
                response.status_code, headers=headers, content=whole, request=request, extensions=response.extensions
            )

    return Checking(timeout=timeout, proxy=proxy, follow_redirects=False)


async def _body(response: Any) -> bytes:
    """What a response holds, unpacked no further than `LONGEST_BODY`: 48 kB may unpack to gigabytes."""
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


def completed(content: bytes) -> bytes:
    """The body of a response, checked and with what langchain-openai relies on.

    Token counts that can't be true are left out, so that they are estimated; a text that is null is empty.

    Raises:
        MalformedResponseError: it is no answer.
    """
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
    for choice in choices:
        if "message" not in choice:
            choice["text"] = choice.get("text") or ""
    counts = {name: token_count(usage.get(name)) for name in _COUNTS} if isinstance(usage, dict) else {}
    body["usage"] = {name: count for name, count in counts.items() if count >= 0}
    return json.dumps(body).encode()


class _Completions:
    """`client.completions` as langchain-openai calls it, without pydantic's warnings about odd fields."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def create(self, **params: Any) -> dict[str, Any]:
        body = (await self._client.completions.create(**params)).model_dump(warnings=False)
        return {**body, "usage": body.get("usage") or {}}
