"""Servers with OpenAI's protocol: the model of langchain-openai that calls one, its checked responses, a text's score.

A local model computes how probable a text is (`LocalLM.log_likelihoods`). A server can tell if it repeats the prompt
(`echo`) with each token's log-probability, as vLLM does, or if it can be constrained to a text (`grammar`) and reports
each token's probability, as llama.cpp does. Ollama does neither, nor do OpenAI's newer models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from langchain_core.language_models import BaseLanguageModel

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import FailedResponseError, MalformedResponseError, UnscoredError
from rcr_trainer.llm.redaction import HIDDEN, remember, remember_key, without_secrets
from rcr_trainer.llm.settings import ONE_ANSWER, LLMSettings

LONGEST_BODY = 16 << 20
"""Most bytes of a response, decompressed; log-probabilities of a prompt of 100,000 tokens take some 10 MB."""

COUNTS = ("prompt_tokens", "completion_tokens")
"""Fields of a response's `usage`: what was read, and written."""
_MOST_TOKENS = 10_000_000
"""No model reads or writes more tokens in one call; the longest contexts have up to this many."""
_CONNECT_S = 10.0
"""Seconds to connect; later an unreachable server couldn't be told from one whose answer may have to be paid for."""
_OPENAI = "https://api.openai.com/v1"
_NO_ASCII = re.compile(r"[^!-~]*")
"""Blanks and other scripts, of which tokens may show too little."""


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
    read, written, total = (token_count(told.get(name)) for name in (*COUNTS, "total_tokens"))
    if read >= 0:  # xAI and Gemini count what a model thinks, and charge for, in the total alone
        written = max(written, total - read)
    body["usage"] = {name: count for name, count in zip(COUNTS, (read, written), strict=True) if count >= 0}
    return json.dumps(body).encode()


def token_count(value: object) -> int:
    """A reported number of tokens; −1 if missing or implausible."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return -1
    return int(value)


def canonical(value: object) -> str:
    """A text that is equal for exactly those values that are the same JSON when sent."""
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except TypeError:  # names of several types can't be sorted until they are text
        return json.dumps(json.loads(json.dumps(value, default=repr)), sort_keys=True)


# ---------------------------------------------------------------- how probable a text is


class Scorer(Protocol):
    """Computes how probable continuations are."""

    def log_likelihoods(self, prompts: Sequence[str], continuations: Sequence[str]) -> list[float]:
        """Log-probabilities (natural, −∞ … 0) of continuations after prompts, summed over tokens.

        A continuation includes the space before it. A token that spans the boundary belongs to the continuation.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A text to score; a plain string asks for an answer instead."""

    prompt: str
    continuation: str

    def __str__(self) -> str:
        return self.prompt + self.continuation


class Way(NamedTuple):
    """A way to have a server score: the parameters of a request, and the log-likelihood in its response.

    Reading raises `UnscoredError` if the server ignored these parameters, `MalformedResponseError` if it didn't but its
    figures are unusable.
    """

    asked: Callable[[Scored], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Scored], float]


def _ask_for_echo(request: Scored) -> dict[str, Any]:
    # `max_tokens: 0` would be enough, but vLLM refuses it.
    return {"prompt": str(request), "max_tokens": 1, "extra_body": {"echo": True}}


def _read_echo(response: Mapping[str, Any], request: Scored) -> float:
    choice = response["choices"][0]
    text, given = choice.get("text") or "", choice.get("logprobs") or {}
    tokens, values = (given.get(name) or [] for name in ("tokens", "token_logprobs"))
    if not text.startswith(str(request)) or len(tokens) < 2:
        raise UnscoredError(f"{response.get('model')!r} can't score: its server ignores echo")
    first, last = len(request.prompt), len(str(request))
    spans = list(zip(values, _spans(str(request), tokens), strict=True))
    if spans[-1][1][1] < last:
        raise MalformedResponseError(f"its tokens {tokens[-8:]!r:.200} don't end with the text that was sent")
    return _sum(value for value, (start, end) in spans if start < last and (start >= first or end > first))


def _spans(text: str, tokens: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where the tokens of a text, and what a server adds before and after it, begin and end.

    Servers' own offsets drift: a token shown alone may be part of a character ("\ufffd"), or lack its first blank.
    """
    at = 0
    for token in tokens:
        start = at
        if text.startswith(token, at):
            at += len(token)
        elif known := token.strip("\ufffd \t\r\n"):
            unsure = _NO_ASCII.match(text, at)
            found = text.find(known, at, (unsure.end() if unsure else at) + len(known))
            at = at if found < 0 else found + len(known)
        yield start, at


def _ask_for_grammar(request: Scored) -> dict[str, Any]:
    only = f"root ::= {json.dumps(request.continuation, ensure_ascii=False)}"
    # A token has at least one byte, and one more token ends the answer.
    longest = len(request.continuation.encode()) + 1
    return {"prompt": request.prompt, "max_tokens": longest, "extra_body": {"grammar": only}}


def _read_grammar(response: Mapping[str, Any], request: Scored) -> float:
    """The probability of the text in the tokens that the model itself writes it with."""
    text, given = request.continuation.encode(), (response["choices"][0].get("logprobs") or {}).get("content") or []
    written, values = b"", []
    for token in given:
        if len(written) >= len(text):
            break  # the end of the answer
        written += bytes(token.get("bytes") or [])
        values.append(token.get("logprob"))
    if written != text:
        raise UnscoredError(
            f"{response.get('model')!r} can't score: its server heeds neither echo, as vLLM does, nor grammar, as "
            "llama.cpp does, and so gives no log-probabilities of a text; use such a server, or llm.kind: local"
        )
    return _sum(values)


def _sum(values: Iterable[Any]) -> float:
    given = list(values)
    if not all(isinstance(value, int | float) and value < math.inf for value in given):
        raise MalformedResponseError("a token without log-probability")
    return math.fsum(given)


WAYS = (Way(_ask_for_echo, _read_echo), Way(_ask_for_grammar, _read_grammar))
"""In the order they are tried."""
