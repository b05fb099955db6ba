"""What is sent to a server that speaks the OpenAI protocol, where it goes, and what is booked for it."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer, prompts_of
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import AccessError
from test_llm_http import KEY, KINDS, expected, model, program, texts

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent(kind: str) -> None:
    with OpenAIServer(program) as server, model(server, kind, max_tokens=9) as llm:
        assert texts(llm.generate(prompts_of(1))) == expected(1)
    body = server.requests[0].body
    assert server.requests[0].authorization == f"Bearer {KEY}"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 9)
    if kind == "chat":
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["messages"][1]["content"] == prompts_of(1)[0]
        assert "stop" not in body
        assert "max_completion_tokens" not in body
    else:
        assert body["prompt"] == prompts_of(1)
        assert body["stop"] == ["\nSource:"]


def test_a_key_that_no_header_can_hold_is_refused_before_anything_is_booked(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\n")
    with OpenAIServer(program) as server, model(server, "chat") as llm:
        assert texts(llm.generate(prompts_of(1))) == expected(1)
        assert server.requests[0].authorization == f"Bearer {KEY}"
    monkeypatch.setenv("OPENAI_API_KEY", "“sk-copied-from-a-page”")
    with pytest.raises(ConfigError, match="the API key in OPENAI_API_KEY can't be sent"):
        model(server, "chat")


@pytest.mark.parametrize("kind", KINDS)
def test_token_counts_that_cannot_be_true_are_estimated_and_booked(kind: str, tmp_path: Path) -> None:
    untrue = [
        '{"prompt_tokens": 1e30, "completion_tokens": 1e30, "total_tokens": 1e30}',
        '{"prompt_tokens": -5, "completion_tokens": -7, "total_tokens": null}',
        '{"prompt_tokens": null, "completion_tokens": null, "total_tokens": null}',
        '{"prompt_tokens": Infinity, "completion_tokens": NaN}',
        '{"prompt_tokens": "5", "completion_tokens": [5], "prompt_tokens_details": 5}',
        '{"prompt_tokens": 0, "completion_tokens": 0}',
        "[]",
        "5",
    ]
    count = len(untrue)
    with OpenAIServer(program) as server, model(server, kind, tmp_path / "a.sqlite") as llm:
        server.fail(*[f"usage:{usage}" for usage in untrue])
        assert texts(llm.generate(prompts_of(count))) == expected(count)
        assert len(server.requests) == llm.stats.used.calls == llm.stats.counted == count
        most = sum(map(llm.count_tokens, prompts_of(count)))
        assert 3 * count <= llm.stats.used.prompt_tokens <= most
        assert count <= llm.stats.used.completion_tokens <= most


def test_what_a_model_thinks_is_booked_though_only_the_total_counts_it() -> None:
    with OpenAIServer(program) as server, model(server, "chat") as llm:
        server.fail(
            'usage:{"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135}',  # xAI
            'usage:{"prompt_tokens": 21, "total_tokens": 81}',  # Gemini, of a model that only thought
        )
        llm.generate(prompts_of(2))
        assert (llm.stats.used.prompt_tokens, llm.stats.used.completion_tokens) == (53, 103 + 60)


def test_an_answer_without_counts_is_estimated_by_its_own_bytes() -> None:
    with OpenAIServer(lambda prompt: "größe ( all )") as server, model(server, "chat") as llm:
        server.fail("no_usage")
        llm.generate(prompts_of(1))
        assert llm.stats.used.completion_tokens == len("größe ( all )".encode())


def test_one_count_that_is_told_counts() -> None:
    with OpenAIServer(program) as server, model(server, "chat") as llm:
        server.fail('usage:{"prompt_tokens": 77, "completion_tokens": null}')
        llm.generate(prompts_of(1))
        assert llm.stats.used.prompt_tokens == 77
        assert llm.stats.used.completion_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_address_asks_for_goes_behind_the_path(kind: str) -> None:
    with OpenAIServer(program) as server:
        with model(server, kind, base_url=f"{server.base_url}?api-version=2024-10-21&key=ab") as llm:
            llm.generate(prompts_of(1))
        assert server.requests[0].path.endswith("completions?api-version=2024-10-21&key=ab")


@pytest.mark.parametrize("kind", KINDS)
def test_no_encoding_is_asked_for_that_the_http_client_would_unpack_without_limit(kind: str) -> None:
    with OpenAIServer(program) as server, model(server, kind) as llm:
        server.fail("gzip")
        assert texts(llm.generate(prompts_of(1))) == expected(1)
        assert server.requests[0].encodings == "gzip"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_temperature_the_servers_own_holds(kind: str) -> None:
    with OpenAIServer(program) as server, model(server, kind, temperature=None) as llm:
        llm.generate(prompts_of(1))
        assert server.requests[0].body.get("temperature") is None


def test_two_models_of_one_server_and_one_after_the_other(tmp_path: Path) -> None:
    """Connections are shared between models and outlive a call; with a loop for each call that would fail."""
    with OpenAIServer(program) as server:
        for start in range(3):
            with model(server, "chat") as one, model(server, "chat", temperature=None) as other:
                for llm in (one, other, one):
                    assert texts(llm.generate(prompts_of(2, 2 * start))) == expected(2, 2 * start)
        assert {"temperature" in request.body for request in server.requests} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_server_model_and_parameters_part_the_cache(kind: str, tmp_path: Path) -> None:
    cache = tmp_path / "a.sqlite"

    def asked(server: OpenAIServer, **options: Any) -> int:
        before = len(server.requests)
        with model(server, kind, cache, **options) as llm:
            llm.generate(prompts_of(1))
        return len(server.requests) - before

    with OpenAIServer(program) as server, OpenAIServer(program) as other:
        assert asked(server) == 1
        assert asked(server, timeout=3, concurrency=2, attempts=9, price_prompt=1, price_completion=1) == 0
        assert asked(other) == 1
        assert asked(server, model="n") == 1
        assert asked(server, temperature=0.5) == 1
        assert asked(server, max_tokens=3) == 1
        assert asked(server, stop=["x"]) == 1
        assert asked(server, extra_body={"top_k": 1}) == 1
        assert asked(server, extra_body={"eos_token": "</s>"}) == 1
        assert asked(server, extra_body={"eos_token": "<end>"}) == 1
        os.environ["OPENAI_API_KEY"] = "sk-another-key"
        assert asked(server) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_redirect_is_followed_since_prompt_and_keys_would_go_along(kind: str) -> None:
    with OpenAIServer(program) as server, OpenAIServer(program) as other, model(server, kind) as llm:
        server.fail(f"redirect:{other.base_url}/chat/completions?key=x")
        with pytest.raises(AccessError, match=rf"redirects to {other.base_url}.*set llm\.base_url") as caught:
            llm.generate(prompts_of(1))
        assert "key=x" not in str(caught.value)
        assert not other.requests
        assert llm.stats.used.calls == 0


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_nowhere(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with OpenAIServer(program) as server, model(server, kind, tmp_path / "a.sqlite") as llm:
        server.fail("500")
        llm.generate(prompts_of(3))
        server.fail("echo_key")
        with pytest.raises(AccessError) as caught:
            llm.generate(prompts_of(1, 9))
        said = "".join(traceback.format_exception(caught.value))
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert "***" in str(caught.value)
    assert KEY not in said
    assert KEY not in caplog.text
    assert KEY.encode() not in files
    # Prompts aren't kept either.
    assert b"question 1" not in files
