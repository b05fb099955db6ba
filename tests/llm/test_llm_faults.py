"""What a failed call means."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm import faults
from rcr_trainer.llm.faults import (
    AccessError,
    FailedResponseError,
    Fault,
    LLMError,
    MalformedResponseError,
    RequestError,
    TooLongError,
    retry_after,
)
from rcr_trainer.llm.server import completed

KEY = "sk-very-secret"


class StatusError(Exception):
    """As the clients of OpenAI, Anthropic and others raise it."""

    def __init__(
        self, status: int, message: str = "no", body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status_code, self.body = status, body
        self.response = type("Response", (), {"headers": headers or {}, "status_code": status})()


def diagnose(error: Exception, openai: bool = False) -> Fault:
    return faults.diagnose(error, "the model 'm' at http://host/v1", openai=openai)


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
    fault = diagnose(StatusError(status, headers={"retry-after": "7"}))
    assert (fault.kind, fault.reason, fault.charged) == ("again", str(status), False)
    assert fault.wait == (7.0 if status in (429, 503) else None)
    if status == 429:  # a limit on tokens a minute is no limit on the prompt
        assert diagnose(StatusError(429, "limit of the context window's tokens a minute")).kind == "again"


TOO_LONG = [
    (400, "request (9214 tokens) exceeds the available context size (8192 tokens), try increasing it"),  # llama.cpp
    (500, "the request exceeds the available context size. try increasing the context size"),  # as it said earlier
    (400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."),  # vLLM
    (422, "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3000 `inputs` tokens"),  # TGI
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed"),  # Gemini
]


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (StatusError(401), AccessError, "llm.api_key_env"),
        (StatusError(402), AccessError, "add credit"),
        (StatusError(403), AccessError, "may not use"),
        (StatusError(403, "Web content filter: blocked"), AccessError, "may not use"),
        (StatusError(404), AccessError, "llm.model"),
        (StatusError(429, body={"code": "insufficient_quota"}), AccessError, "add credit"),
        (StatusError(429, body={"error": {"type": "insufficient_quota"}}), AccessError, "add credit"),
        (StatusError(400, "Your credit balance is too low to access the Anthropic API"), AccessError, "add credit"),
        (StatusError(400, body={"code": "context_length_exceeded"}), TooLongError, "fewer or shorter examples"),
        (StatusError(400, "This model's maximum context length is 9"), TooLongError, "fewer or shorter examples"),
        *((StatusError(*said), TooLongError, "fewer or shorter examples") for said in TOO_LONG),
        (StatusError(500, "Only no echo is supported"), RequestError, "refuses the request with status 500"),
        (StatusError(400, "Unsupported parameter: stop"), RequestError, "Unsupported parameter: stop"),
        (StatusError(422), RequestError, "422"),
    ],
)
def test_errors_that_a_retry_cannot_fix_stop_with_advice(error: Exception, kind: type[LLMError], advice: str) -> None:
    fault = diagnose(error)
    assert fault.kind == "stop"
    assert type(fault.error) is kind
    assert advice in str(fault.error)
    assert "'m' at http://host/v1" in str(fault.error)


def test_what_a_server_says_in_a_form_of_its_own_is_quoted() -> None:
    for body in ({"detail": [{"msg": "field required"}]}, "field required"):  # FastAPI's, LM Studio's
        assert "field required" in str(diagnose(StatusError(422, "Error code: 422", body)).error)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ({"choices": [{"message": {"content": "SELECT"}, "finish_reason": "abort"}]}, FailedResponseError, "abort"),
        ({"status": {"code": 1004, "message": "invalid api key"}}, MalformedResponseError, "invalid api key"),
    ],
)
def test_what_a_server_could_not_finish_is_no_answer_and_what_it_says_instead_is_quoted(body, kind, said) -> None:
    with pytest.raises(kind, match=said):
        completed(json.dumps(body).encode())


def test_a_filtered_prompt_is_a_refusal() -> None:
    for body in ({"code": "content_filter"}, {"innererror": {"code": "ResponsibleAIPolicyViolation"}}):
        for status in (400, 422):
            fault = diagnose(StatusError(status, body=body))
            assert (fault.kind, fault.reason) == ("unusable", "refused")
    for said in (  # LiteLLM's codes are statuses
        "litellm.BadRequestError: litellm.ContentPolicyViolationError: AzureException - The response was filtered",
        f"{'a proxy names itself at length; ' * 20} Output blocked by content filtering policy",
    ):
        assert diagnose(StatusError(400, said, {"code": "400"})).reason == "refused"


class APIConnectionError(Exception):
    pass


class ConnectError(Exception):
    pass


class APITimeoutError(APIConnectionError):
    pass


class ConnectTimeout(Exception):
    pass


def test_a_server_that_cannot_be_reached_in_time_charges_nothing() -> None:
    late, unreachable = APITimeoutError("Request timed out."), APITimeoutError("Request timed out.")
    unreachable.__cause__ = ConnectTimeout()
    assert (diagnose(late).reason, diagnose(late).charged) == ("timeout", True)
    assert (diagnose(unreachable).reason, diagnose(unreachable).charged) == ("connection", False)
    assert "the connection failed (Request timed out.)" in str(diagnose(unreachable).error)


def test_connections_and_time() -> None:
    arrived, refused = APIConnectionError("Connection error."), APIConnectionError("Connection error.")
    refused.__cause__ = ConnectError("refused")
    assert (diagnose(TimeoutError()).reason, diagnose(TimeoutError()).charged) == ("timeout", True)
    assert (diagnose(arrived).reason, diagnose(arrived).charged) == ("connection", True)
    assert (diagnose(refused).reason, diagnose(refused).charged) == ("connection", False)
    assert diagnose(ConnectionResetError()).kind == "again"
    assert "the connection failed (refused)" in str(diagnose(refused).error)


def test_a_response_that_was_read_is_no_failed_connection_whatever_the_client_says() -> None:
    wrapped = APIConnectionError("Connection error.")
    wrapped.__cause__ = MalformedResponseError("over 16 MiB")
    fault = diagnose(wrapped)
    assert (fault.kind, fault.reason, fault.charged) == ("again", "malformed", True)
    assert "the response is not an answer (over 16 MiB)" in str(fault.error)


def test_only_langchain_openai_means_a_malformed_response_by_a_type_error() -> None:
    assert (diagnose(TypeError("x"), openai=True).kind, diagnose(TypeError("x"), openai=True).reason) == (
        "again",
        "malformed",
    )
    bug = TypeError("x")
    fault = diagnose(bug)
    assert fault.kind == "stop"
    assert "TypeError: x" in str(fault.error)
    assert fault.error.__cause__ is bug


def test_our_own_errors_pass_unchanged() -> None:
    error = ConfigError("as it is")
    assert diagnose(error).error is error


def test_no_message_holds_a_key_or_a_second_line() -> None:
    inner = RuntimeError(f"sent {KEY}")
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    for error in (StatusError(401, f"bad key\n{KEY}"), StatusError(400, KEY), RuntimeError(f"{KEY}\n" * 500), outer):
        fault = diagnose(error)
        assert KEY not in str(fault.error)
        assert "\n" not in str(fault.error)
        assert len(str(fault.error)) < 700
        assert fault.error.__cause__ is None
