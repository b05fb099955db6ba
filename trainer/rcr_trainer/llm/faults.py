"""What a failed call means: repeat it (and when), go on without an answer, or stop and say why.

Each message is one line that says what to do; none holds a key.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from langchain_rcr.errors import RCRError
from rcr_trainer.llm.redaction import redact

_LONGEST_MESSAGE = 300


class LLMError(RCRError):
    """The model can't be called, or gave no answer in all attempts. What was answered before is in the cache."""


class AccessError(LLMError):
    """No key, no money or no such model (401, 402, 403, 404, `insufficient_quota`): repeating the call can't help."""


class UnscoredError(AccessError):
    """The model doesn't tell how probable a text is."""


class RequestError(LLMError):
    """The model can't be asked this (of a server: status 400, 413, 422 and the like)."""


class TooLongError(RequestError):
    """A prompt is longer than the model reads, or most are."""


class BudgetExceeded(LLMError):  # noqa: N818 — a limit, not a mistake
    """The next call could exceed the budget. It was not made; all that was paid for is in the cache."""


class MalformedResponseError(Exception):
    """The server's response is no answer: no JSON, no choices, an error in place of them."""


class StatusError(Exception):
    """The server's response has a status that is no success.

    Attributes:
        codes: what the server calls the error, in lower case.
    """

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        text = content.decode(errors="replace").strip()
        self.status, self.headers, self.codes = status, headers, frozenset[str]()
        with suppress(ValueError, RecursionError):
            body = json.loads(text)
            text, self.codes = f"Error code: {status} - {body}", _codes(body)
        super().__init__(text or f"Error code: {status}")


def _codes(body: Any) -> frozenset[str]:
    found = []
    for part in (body, body.get("error")) if isinstance(body, Mapping) else ():
        if isinstance(part, Mapping):
            deeper = part.get("innererror")
            found += [part.get("code"), part.get("type"), deeper.get("code") if isinstance(deeper, Mapping) else None]
    return frozenset(str(code).lower() for code in found if code is not None)


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed attempt.

    Attributes:
        kind: "again", "unusable" (there is no answer, for `reason`) or "stop".
        reason: in a word or two, for logs and counts.
        error: what to raise after the last attempt, or at once for "stop".
        wait: seconds that the server asks to wait; None: it doesn't say.
        charged: the provider may have charged it.
    """

    kind: str
    reason: str
    error: RCRError
    wait: float | None = None
    charged: bool = False


_STOPS: dict[int | str, tuple[type[LLMError], str]] = {
    "no_money": (
        AccessError,
        "the account has no quota or credit left: add credit or raise its limit, then resume the run",
    ),
    "redirect": (
        AccessError,
        "it redirects to {place}, where no key or prompt is sent: if that is right, set llm.base_url to it",
    ),
    401: (AccessError, "the key is missing or wrong: check the environment variable that llm.api_key_env names"),
    403: (AccessError, "the key may not use this model: check the account's rights"),
    404: (
        AccessError,
        "no such model, or not at this address: check llm.model (its exact name), llm.base_url (most end in /v1) and "
        "llm.kind (a chat model is not served as a completion model)",
    ),
    "too_long": (
        TooLongError,
        "a prompt is longer than the model reads: fewer or shorter examples, or another model",
    ),
    "other": (RequestError, "the server refuses the request with status {status}: check the parameters under llm"),
}
"""What can't be mended by another attempt, by status or by what else tells it: the error, and what to do about it."""

_NO_MONEY = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "insufficient_balance"}
_FILTERED = {"content_filter", "content_policy_violation", "invalid_prompt", "responsibleaipolicyviolation"}
_TOO_LONG = ("context_length_exceeded", "maximum context length", "prompt is too long", "context window")
_TRANSIENT = {408, 409, 425, 429}


def diagnose(error: Exception, who: str) -> Fault:
    """What to do about an exception that a model raised; `who` says which."""
    said = _shown(str(error) or type(error).__name__)
    if isinstance(error, RCRError):
        return Fault("stop", "error", error)
    if isinstance(error, StatusError):
        return _by_status(error, who, said)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return _again(who, "timeout", "no answer in time", charged=True)
    if isinstance(error, ConnectionError | httpx.TransportError):
        arrived = not isinstance(error, httpx.ConnectError)
        return _again(who, "connection", f"the connection failed ({said})", charged=arrived)
    if isinstance(error, MalformedResponseError):
        return _again(who, "malformed", f"the response is no answer ({said})", charged=True)
    stopped = LLMError(f"{who} failed: {type(error).__name__}: {said}")
    # The cause helps to find a bug, unless its message holds a key.
    if all(redact(str(cause)) == str(cause) for cause in _causes(error)):
        stopped.__cause__ = error
    return Fault("stop", "error", stopped)


def _by_status(error: StatusError, who: str, said: str) -> Fault:
    status, codes = error.status, error.codes
    if not codes.isdisjoint(_FILTERED):
        return Fault("unusable", "refused", RequestError(f"{who} refused a prompt ({said})"))
    which: int | str = status if status in _STOPS else "other"
    if status == 402 or not codes.isdisjoint(_NO_MONEY):
        which = "no_money"
    elif status in _TRANSIENT or status >= 500:
        wait = retry_after(error.headers) if status in (429, 503) else None
        return _again(who, str(status), f"status {status}: {said}", wait=wait)
    elif status < 400:
        which = "redirect"
    elif which == "other" and any(sign in said.lower() or sign in codes for sign in _TOO_LONG):
        which = "too_long"
    kind, advice = _STOPS[which]
    place = _shown(error.headers.get("location", "another address").split("?")[0])
    advice = advice.format(place=place, status=status)
    return Fault("stop", str(which), kind(f"{who}: {advice} (the server says: {said})"))


def _again(who: str, reason: str, what: str, wait: float | None = None, charged: bool = False) -> Fault:
    return Fault("again", reason, LLMError(f"{who} gave no answer: {what}"), wait, charged)


def _shown(text: str) -> str:
    """A text on one line, not long, and without secrets."""
    text = " ".join(redact(text).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `retry-after-ms` or `Retry-After` (seconds or a date); None if they say nothing usable."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = str(headers.get(name) or "").strip()
        try:
            seconds = float(value) / scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                continue
        if not math.isnan(seconds):
            return max(0.0, seconds)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
