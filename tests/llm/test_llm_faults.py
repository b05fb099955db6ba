"""What a failed call means."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import (
    AccessError,
    Fault,
    LLMError,
    MalformedResponseError,
    RequestError,
    StatusError,
    TooLongError,
    diagnose,
    retry_after,
)

KEY = "sk-very-secret"


def refused(status: int, message: str = "no", body: Any = None, headers: dict[str, str] | None = None) -> StatusError:
    return StatusError(status, headers or {}, json.dumps(body).encode() if body is not None else message.encode())


def diagnosed(error: Exception) -> Fault:
    return diagnose(error, "the model 'm' at http://host/v1")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_as_a_date() -> None:
    wait = retry_after({"retry-after": formatdate(time.time() + 30, usegmt=True)})
    assert wait is not None
    assert 28 < wait <= 30


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_statuses_that_pass(status: int) -> None:
    fault = diagnosed(refused(status, headers={"retry-after": "7"}))
    assert (fault.kind, fault.reason, fault.charged) == ("again", str(status), False)
    assert fault.wait == (7.0 if status in (429, 503) else None)


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (refused(401), AccessError, "llm.api_key_env"),
        (refused(402), AccessError, "add credit"),
        (refused(403), AccessError, "may not use"),
        (refused(404), AccessError, "llm.model"),
        (refused(429, body={"code": "insufficient_quota"}), AccessError, "add credit"),
        (refused(429, body={"error": {"type": "insufficient_quota"}}), AccessError, "add credit"),
        (refused(400, body={"code": "context_length_exceeded"}), TooLongError, "fewer or shorter examples"),
        (refused(400, "This model's maximum context length is 9"), TooLongError, "fewer or shorter examples"),
        (refused(400, "Unsupported parameter: stop"), RequestError, "Unsupported parameter: stop"),
        (refused(422), RequestError, "422"),
    ],
)
def test_errors_that_a_retry_cannot_fix_stop_with_advice(error: Exception, kind: type[LLMError], advice: str) -> None:
    fault = diagnosed(error)
    assert fault.kind == "stop"
    assert type(fault.error) is kind
    assert advice in str(fault.error)
    assert "'m' at http://host/v1" in str(fault.error)


def test_a_filtered_prompt_is_a_refusal() -> None:
    for body in ({"code": "content_filter"}, {"innererror": {"code": "ResponsibleAIPolicyViolation"}}):
        fault = diagnosed(refused(400, body=body))
        assert (fault.kind, fault.reason) == ("unusable", "refused")


def test_connections_and_time() -> None:
    arrived, never = httpx.ReadError("reset"), httpx.ConnectError("refused")
    for late in (TimeoutError(), httpx.ReadTimeout("late")):
        assert (diagnosed(late).reason, diagnosed(late).charged) == ("timeout", True)
    assert (diagnosed(arrived).reason, diagnosed(arrived).charged) == ("connection", True)
    assert (diagnosed(never).reason, diagnosed(never).charged) == ("connection", False)
    assert diagnosed(ConnectionResetError()).kind == "again"


def test_a_response_that_is_no_answer_may_have_been_charged() -> None:
    fault = diagnosed(MalformedResponseError("over 16 MiB"))
    assert (fault.kind, fault.reason, fault.charged) == ("again", "malformed", True)
    assert "the response is no answer (over 16 MiB)" in str(fault.error)


def test_a_bug_stops_with_its_cause() -> None:
    bug = TypeError("x")
    fault = diagnosed(bug)
    assert fault.kind == "stop"
    assert "TypeError: x" in str(fault.error)
    assert fault.error.__cause__ is bug


def test_what_the_server_says_is_quoted_as_text_or_json() -> None:
    body = {"error": {"message": "no such thing", "code": 5}}
    assert str(refused(404, body=body)) == f"Error code: 404 - {body}"
    assert str(refused(404, "not here")) == "not here"
    assert str(refused(404, "")) == "Error code: 404"
    assert refused(404, body=body).codes == {"5"}
    assert refused(404, body=[1]).codes == refused(404, body={"error": "x"}).codes == set()


def test_our_own_errors_pass_unchanged() -> None:
    error = ConfigError("as it is")
    assert diagnosed(error).error is error


def test_no_message_holds_a_key_or_a_second_line() -> None:
    inner = RuntimeError(f"sent {KEY}")
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    for error in (refused(401, f"bad key\n{KEY}"), refused(400, KEY), RuntimeError(f"{KEY}\n" * 500), outer):
        fault = diagnosed(error)
        assert KEY not in str(fault.error)
        assert "\n" not in str(fault.error)
        assert len(str(fault.error)) < 700
        assert fault.error.__cause__ is None
