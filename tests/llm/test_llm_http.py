"""Against a real HTTP server on loopback that speaks the OpenAI protocol, with every fault it can have."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer, Request, each, prompts_of
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.faults import AccessError, LLMError, RequestError, TooLongError
from rcr_trainer.llm.model import LanguageModel, open_llm
from rcr_trainer.llm.server import LONGEST_BODY
from rcr_trainer.llm.settings import LLMSettings

pytestmark = pytest.mark.slow

KINDS = ["completion", "chat"]
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def program(prompt: str) -> str:
    return f" f ( {prompt.split()[2]} )"


def expected(count: int, start: int = 0) -> list[str]:
    return [f"f ( {n} )" for n in range(start, start + count)]


def model(server: OpenAIServer, kind: str, cache: Path | None = None, **options: Any) -> LanguageModel:
    settings = {"kind": kind, "model": "m", "base_url": server.base_url, "timeout": 20, "backoff": 0.02, **options}
    return open_llm(LLMSettings(**settings), cache)


def texts(answers: list[Answer]) -> list[str | None]:
    return [answer.text for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_concurrency_reaches_the_cap_and_not_more(kind: str) -> None:
    with OpenAIServer(program, delay=0.5) as server, model(server, kind, concurrency=12, timeout=20) as llm:
        assert texts(llm.generate(prompts_of(24))) == expected(24)
        assert server.peak == llm.stats.peak == 12


def test_a_server_that_answers_one_prompt_after_the_other_is_asked_fewer_at_a_time(caplog) -> None:
    turn = threading.Lock()

    def one_after_the_other(prompt: str) -> str:
        with turn:
            time.sleep(0.1)
        return program(prompt)

    with OpenAIServer(one_after_the_other) as server, model(server, "chat", concurrency=16, timeout=1) as llm:
        assert texts(llm.generate(prompts_of(40))) == expected(40)
        assert 0 < llm.stats.retries["timeout"] < 32
    assert "m: too slow for so many calls at a time (llm.concurrency), now 8" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_ends_with_the_right_answers_and_none_is_paid_twice(kind: str, tmp_path: Path) -> None:
    passing = ["429:0.2", "429:date:1", "503:ms:50", "429", "500", "502", "hang", "drop", "cut"]
    passing += ["truncated", "html", "no_choices", "null_choices", "error_body", "error_choice", "slow", "no_usage"]
    final = {"empty": "empty", "null_text": "empty", "filter": "refused", "azure_filter": "refused"}
    final |= {"length": "truncated", "refusal": "refused" if kind == "chat" else "empty"}
    count = len(passing) + len(final)
    prompts = prompts_of(count)
    with OpenAIServer(program) as server:
        server.fault_of = each([*passing, *final])
        with model(server, kind, tmp_path / "a.sqlite", concurrency=1, timeout=3) as llm:
            answers = llm.generate(prompts + prompts)
            assert texts(answers[: len(passing)]) == expected(len(passing))
            assert [answer.reason for answer in answers[len(passing) : count]] == list(final.values())
            assert [answer.program for answer in answers[len(passing) : count]] == [None] * len(final)
            assert answers[count:] == answers[:count]
            assert len(set(server.paid)) == len(server.paid)
            assert llm.stats.retries == {
                "429": 3, "500": 1, "502": 3, "503": 1, "timeout": 1, "connection": 2, "malformed": 4
            }  # fmt: skip
            assert llm.stats.figures()["distinct_share"] == 0.5
            assert sum(llm.stats.failures.values()) == 2 * len(final)
        asked = len(server.requests)
        with model(server, kind, tmp_path / "a.sqlite") as llm:
            assert [(a.text, a.reason) for a in llm.generate(prompts)] == [(a.text, a.reason) for a in answers[:count]]
        assert len(server.requests) == asked


@pytest.mark.parametrize("kind", KINDS)
def test_faults_at_random_with_many_calls_at_once(kind: str) -> None:
    faults = itertools.cycle(
        ["429:0.05", None, "500", None, "drop", None, "truncated", "cut", None, "slow", "no_choices"]
    )
    with OpenAIServer(program, delay=0.01) as server:
        server.fault_of = each(itertools.islice(faults, 80))
        with model(server, kind, concurrency=16, timeout=30) as llm:
            assert texts(llm.generate(prompts_of(80))) == expected(80)
        assert sorted(server.paid) == sorted(prompts_of(80))


@pytest.mark.parametrize("header", ["0.7", "ms:700"])
def test_a_limit_holds_for_all_calls(header: str) -> None:
    with OpenAIServer(program, delay=0.3) as server:
        server.fail(f"429:{header}")
        with model(server, "completion", concurrency=4) as llm:
            assert texts(llm.generate(prompts_of(12))) == expected(12)
        begin = server.requests[0].time
        assert len(server.requests) == 13
        assert all(request.time >= begin + 0.69 for request in server.requests[4:])


@pytest.mark.parametrize("header", ["0", "date:-60"])
def test_a_limit_that_ended_already_by_this_clock_is_waited_for_longer_each_time(header: str) -> None:
    with OpenAIServer(program) as server:
        server.fail(*[f"429:{header}"] * 3)
        with model(server, "completion", attempts=4, backoff=0.2) as llm:
            assert texts(llm.generate(prompts_of(1))) == expected(1)
        assert server.requests[-1].time - server.requests[0].time > 0.7


def test_a_rate_limit_stops_no_run_while_others_are_answered() -> None:
    passed: dict[int, int] = {}

    def two_at_a_time(request: Request) -> str | None:
        window = int(2 * request.time)
        passed[window] = passed.get(window, 0) + 1
        return "429:0.5" if passed[window] > 2 else None

    with OpenAIServer(program) as server, model(server, "chat", concurrency=12, attempts=3) as llm:
        server.fault_of = two_at_a_time
        assert texts(llm.generate(prompts_of(16))) == expected(16)
        server.fault_of = lambda request: "429:0.05"
        with pytest.raises(LLMError, match=r"status 429.*in 3 attempts"):
            llm.generate(prompts_of(16, 16))


def test_an_error_in_a_good_response_is_as_its_own_status_and_costs_no_prompt_its_answer(tmp_path: Path) -> None:
    with OpenAIServer(program) as server, model(server, "chat", tmp_path / "a.sqlite", attempts=4) as llm:
        server.fail(None, *["error_body"] * 4)
        assert texts(llm.generate(prompts_of(1))) == expected(1)
        with pytest.raises(LLMError, match=r"status 502.*upstream failed.*in 4 attempts"):
            llm.generate(prompts_of(1, 1))
        assert llm.stats.used.calls == 1
        server.fail("error_choice")
        assert texts(llm.generate(prompts_of(1, 1))) == expected(1, 1)
        assert llm.stats.used.calls == 3  # what it wrote until it failed may cost something


def test_a_server_that_wants_an_hour_stops_the_run() -> None:
    with OpenAIServer(program) as server, model(server, "chat") as llm:
        server.fail("429:3600")
        with pytest.raises(LLMError, match="asks to wait 3,600 s"):
            llm.generate(prompts_of(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "error", "advice"),
    [
        ("quota", AccessError, "add credit"),
        ("401", AccessError, "llm.api_key_env"),
        ("403", AccessError, "may not use"),
        ("404", AccessError, "llm.model"),
        ("400", RequestError, "status 400"),
    ],
)
def test_hopeless_errors_stop_at_once(kind: str, fault: str, error: type[LLMError], advice: str) -> None:
    with OpenAIServer(program, delay=0.05) as server, model(server, kind, concurrency=3) as llm:
        server.fail(None, fault)
        begin = time.monotonic()
        with pytest.raises(error, match=advice):
            llm.generate(prompts_of(40))
        assert time.monotonic() - begin < 10
        assert len(server.requests) <= 6
        # What ran beside it was finished and kept.
        done = list(server.paid)
        llm.generate(done)
        assert server.paid == done


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_too_long_for_the_server_has_no_answer(kind: str, tmp_path: Path, caplog) -> None:
    with OpenAIServer(program) as server, model(server, kind, tmp_path / "a.sqlite", budget_calls=3) as llm:
        server.fault_of = lambda request: "context" if request.prompt == prompts_of(3)[1] else None
        answers = llm.generate(prompts_of(3))
        assert [(answer.text, answer.reason) for answer in answers] == [
            ("f ( 0 )", ""),
            (None, "too_long"),
            ("f ( 2 )", ""),
        ]
        assert [record.message for record in caplog.records if "like that have no answer" in record.message] != []
        for _ in range(2):
            with pytest.raises(TooLongError, match="fewer or shorter examples"):
                llm.generate(prompts_of(3)[1:2])
        assert llm.stats.used.calls == 2
        server.fault_of = None  # started again with a larger context
        assert texts(llm.generate(prompts_of(3))) == expected(3)
        assert llm.stats.used.calls == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_in_all_attempts_stops_the_run(kind: str) -> None:
    with OpenAIServer(program) as server, model(server, kind, attempts=3) as llm:
        server.fault_of = lambda request: "500" if request.prompt == prompts_of(3)[2] else None
        with pytest.raises(LLMError, match=r"status 500.*in 3 attempts"):
            llm.generate(prompts_of(3))
        assert len([r for r in server.requests if r.fault == "500"]) == 3
        server.fault_of = None
        assert texts(llm.generate(prompts_of(3))) == expected(3)
        assert sorted(server.paid) == prompts_of(3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_always_malformed_has_no_program(kind: str, tmp_path: Path) -> None:
    with OpenAIServer(program) as server:
        bad = prompts_of(2)[1]
        server.fault_of = lambda request: "no_choices" if request.prompt == bad else None
        with model(server, kind, tmp_path / "a.sqlite") as llm:
            assert [(a.text, a.reason) for a in llm.generate(prompts_of(2))] == [("f ( 0 )", ""), (None, "malformed")]
            assert len(server.requests) == 1 + 3
        server.fault_of = None
        # It was paid for three times: a resumed run doesn't ask again.
        with model(server, kind, tmp_path / "a.sqlite") as llm:
            assert [(a.text, a.reason) for a in llm.generate(prompts_of(2))] == [("f ( 0 )", ""), (None, "malformed")]
            assert len(server.requests) == 1 + 3


def test_a_tool_called_in_place_of_an_answer_is_said_once_and_not_asked_again(tmp_path: Path, caplog) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "run_sql", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with OpenAIServer(lambda prompt: message) as server, model(server, "chat", tmp_path / "llm.sqlite") as llm:
        for _ in range(2):
            assert [(each.program, each.reason) for each in llm.generate(prompts_of(3))] == [(None, "tool_call")] * 3
        assert len(server.requests) == 3
        assert llm.stats.failures == {"tool_call": 6}
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["m called a tool in place of answering: such an answer holds no program"]


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_costs_no_other_answer_and_is_not_asked_again(kind: str, tmp_path: Path) -> None:
    with OpenAIServer(lambda prompt: f"f ( \ud800{program(prompt)}") as server:
        for _ in range(2):
            with model(server, kind, tmp_path / "a.sqlite") as llm:
                answers = llm.generate([*prompts_of(20), "Source: a \udfff"])
                assert texts(answers)[:20] == [f"f ( \ufffd {each}" for each in expected(20)]
        assert len(server.requests) == 21


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fault", ["truncated", "deep", "endless", "gzip_cut", "gzip_junk", "gzip_tail", "gzip, gzip", "zstd"]
)
def test_a_response_that_nothing_can_read_is_malformed_and_stops_no_run(kind: str, fault: str, tmp_path: Path) -> None:
    with OpenAIServer(program) as server:
        bad = prompts_of(2)[1]
        server.fault_of = lambda request: fault if request.prompt == bad else None
        for _ in range(2):
            with model(server, kind, tmp_path / "a.sqlite", concurrency=1, max_tokens=9) as llm:
                assert [(a.text, a.reason) for a in llm.generate(prompts_of(2))] == [
                    ("f ( 0 )", ""),
                    (None, "malformed"),
                ]
        assert len(server.requests) == 1 + 3
        # What the server goes on to send is in buffers, if anywhere.
        assert server.sent < 3 * 4 * LONGEST_BODY


def test_an_answer_of_many_megabytes_is_cut_off() -> None:
    with OpenAIServer(lambda prompt: "x" * (1 << 21)) as server, model(server, "chat") as llm:
        answer = llm.generate(prompts_of(1))[0]
        assert (len(answer.text or ""), answer.reason) == (1 << 20, "truncated")


def test_a_server_of_another_kind_is_told_from_a_bad_answer() -> None:
    with OpenAIServer(program) as server, model(server, "chat") as llm:
        server.fault_of = lambda request: "html"
        with pytest.raises(LLMError, match=r"check llm\.base_url"):
            llm.generate(prompts_of(30))


def test_a_server_that_is_down_behind_a_proxy_loses_no_prompt(tmp_path: Path) -> None:
    with OpenAIServer(program) as server:
        with model(server, "chat", tmp_path / "a.sqlite") as llm:
            llm.generate(prompts_of(5))
            server.fault_of = lambda request: "html"
            with pytest.raises(LLMError, match="nor was any of the last 10 prompts answered"):
                llm.generate(prompts_of(40))
        server.fault_of = None
        with model(server, "chat", tmp_path / "a.sqlite") as llm:
            assert texts(llm.generate(prompts_of(40))) == expected(40)


def test_no_server_at_all() -> None:
    with OpenAIServer() as server:
        url = server.base_url
    settings = {"kind": "completion", "model": "m", "base_url": url, "attempts": 2, "backoff": 0.01}
    with open_llm(LLMSettings(**settings), None) as llm, pytest.raises(LLMError, match="connection failed") as caught:
        llm.generate(["a"])
    assert "Connect call failed" in str(caught.value)
    assert llm.stats.used.calls == 0
