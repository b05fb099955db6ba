"""What a failed call means: repeat it (and when), continue without an answer, or stop and say why.

Each message is one line that says what to do; none holds a key.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from langchain_rcr.errors import RCRError
from rcr_trainer.llm.redaction import redact

_LONGEST_MESSAGE = 300


class LLMError(RCRError):
    """The model can't be called, or no attempt gave an answer. Earlier answers are in the cache."""


class AccessError(LLMError):
    """No key, no money or no such model (401, 402, 403, 404, `insufficient_quota`): repeating the call can't help."""


class UnscoredError(AccessError):
    """The model doesn't give a text's probability."""


class RequestError(LLMError):
    """The model rejects the request (a server: status 400, 413, 422 and the like)."""


class TooLongError(RequestError):
    """A prompt, or most prompts, are longer than the model reads."""


class BudgetExceeded(LLMError):  # noqa: N818 — a limit, not a mistake
    """The next call could exceed the budget. It was not made; everything paid for is in the cache."""


class MalformedResponseError(Exception):
    """The server's response is no answer: no JSON, or no choices."""


class FailedResponseError(MalformedResponseError):
    """An error in a response of status 200, taken as the status that it names, else as 500."""

    def __init__(self, error: Any, *, charged: bool) -> None:
        super().__init__(str(error))
        code = str(error.get("code") if isinstance(error, dict) else "")
        self.status_code = int(code) if re.fullmatch("[45][0-9]{2}", code) else 500
        self.charged = charged


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed attempt."""

    kind: str  # "again", "unusable" (there is no answer, for `reason`) or "stop"
    reason: str  # a word or two, for logs and counts
    error: RCRError  # to raise after the last attempt, or at once for "stop"
    wait: float | None = None  # seconds that the server asks to wait; None if it doesn't say
    charged: bool = False  # the provider may have charged for it


_STOPS: dict[int | str, str] = {
    "no_money": "the account has no quota or credit left: add credit or raise its limit, then resume the run",
    "redirect": "it redirects to {place}, where no key or prompt is sent: if that is right, set llm.base_url to it",
    401: "the key is missing or wrong: check the environment variable that llm.api_key_env names",
    403: "the key may not use this model: check the account's rights",
    404: "no such model, or not at this address: check llm.model (its exact name), llm.base_url (most end in /v1) and "
    "llm.kind (a chat model is not served as a completion model)",
    "too_long": "a prompt is longer than the model reads: fewer or shorter examples, or another model",
    "other": "the server refuses the request with status {status}: check the parameters under llm",
}
"""What another attempt can't fix, by status or other sign, and what to do about it."""

# Codes and words of OpenAI, Azure, Anthropic and LiteLLM; the last also of vLLM, llama.cpp (which says 500 to what it
# doesn't support), TGI and Gemini.
_NO_MONEY = re.compile("insufficient_(quota|balance)|billing_(hard_limit_reached|not_active)|credit balance is too low")
_FILTERED = re.compile(
    "content.?(filter|policy.?violation|management policy)|invalid_prompt|responsibleaipolicyviolation"
)
_TOO_LONG = re.compile(
    "context.?(length|size|window)|(prompt|input) is too long|maximum model length|input token count|"
    "tokens` must be <=|must have less than"
)
_TRANSIENT = {408, 409, 425, 429}
# By class name, so that the client needn't be imported.
_TIMEOUTS = {"TimeoutError", "APITimeoutError"}
_CONNECTIONS = {"ConnectionError", "APIConnectionError"}
_NEVER_ARRIVED = {"ConnectError", "ConnectTimeout", "ConnectionRefusedError", "gaierror", "PoolTimeout", "ProxyError"}
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What langchain-openai raises on a response that is no answer."""


def diagnose(error: Exception, who: str, *, openai: bool = False) -> Fault:
    """What to do about an exception that the model `who` raised; `openai`: a model of langchain-openai."""
    if isinstance(error, RCRError):
        return Fault("stop", "error", error, charged=isinstance(error, UnscoredError))
    # openai 2 wraps whatever its HTTP client raises in a connection error.
    error = next((cause for cause in _causes(error) if isinstance(cause, MalformedResponseError)), error)
    said = str(getattr(error, "message", None) or error) or type(error).__name__
    if re.fullmatch(r"Error code: \d+", said) and (body := getattr(error, "body", None)):
        said += f" - {body}"  # openai quotes only a body of OpenAI's own form
    said = _shown(said)
    status = getattr(error, "status_code", None)  # errors in reading a response carry its status 200
    if isinstance(status, int) and status >= 300:
        return _by_status(error, status, who, said)
    names = {cls.__name__ for cls in type(error).__mro__}
    arrived = not any(type(cause).__name__ in _NEVER_ARRIVED for cause in _causes(error))
    if names & _TIMEOUTS and arrived:
        return _again("timeout", who, "none arrived within llm.timeout", charged=True)
    if names & _CONNECTIONS:
        # openai says no more than "Connection error."; the innermost cause knows which.
        why = next(filter(None, map(str, reversed([*_causes(error)]))), said)
        why = said if names & _TIMEOUTS else _shown(why)
        return _again("connection", who, f"the connection failed ({why})", charged=arrived)
    if isinstance(error, MalformedResponseError) or (openai and isinstance(error, _UNREADABLE)):
        return _again("malformed", who, f"the response is not an answer ({said})", charged=True)
    stopped = LLMError(f"{who} failed: {type(error).__name__}: {said}")
    # The cause helps find a bug in the user's own model; leave it out if a message holds a key.
    if all(redact(str(cause)) == str(cause) for cause in _causes(error)):
        stopped.__cause__ = error
    return Fault("stop", "error", stopped)


def _by_status(error: Exception, status: int, who: str, said: str) -> Fault:
    headers = getattr(getattr(error, "response", None), "headers", {})
    told = " ".join(str(getattr(error, name, "")) for name in ("message", "args", "code", "type", "body")).lower()
    if status in (400, 422) and _FILTERED.search(told):  # a company's web filter says 403
        return Fault("unusable", "refused", RequestError(f"{who} refused a prompt ({said})"))
    which: int | str = status if status in _STOPS else "other"
    if status == 402 or _NO_MONEY.search(told):
        which = "no_money"
    elif which == "other" and status != 429 and _TOO_LONG.search(told):
        which = "too_long"
    elif status in _TRANSIENT or (status >= 500 and not (status < 502 and "supported" in told)):
        wait = retry_after(headers) if status in (429, 503) else None
        charged = isinstance(error, FailedResponseError) and error.charged
        return _again(str(status), who, f"status {status}: {said}", wait=wait, charged=charged)
    elif status < 400:
        which = "redirect"
    place = _shown(headers.get("location", "another address").split("?")[0])
    advice = _STOPS[which].format(place=place, status=status)
    # The request's fault, or the account's and the address's.
    kind = TooLongError if which == "too_long" else RequestError if which == "other" else AccessError
    return Fault("stop", str(which), kind(f"{who}: {advice} (the server says: {said})"))


def _again(reason: str, who: str, what: str, wait: float | None = None, charged: bool = False) -> Fault:
    return Fault("again", reason, LLMError(f"{who} gave no answer: {what}"), wait, charged)


def _shown(text: str) -> str:
    """A text on one line, shortened and without secrets."""
    text = " ".join(redact(text).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait according to `retry-after-ms` or `Retry-After` (seconds or a date); None if neither is usable."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = str(headers.get(name) or "").strip()
        with suppress(ValueError):
            if not math.isnan(seconds := float(value) / scale):
                return max(0.0, seconds)
        with suppress(ValueError, TypeError, OverflowError):
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
