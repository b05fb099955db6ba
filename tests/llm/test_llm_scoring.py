"""Against a server that tells how probable a text is, or pretends to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAIServer
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.faults import AccessError, LLMError, TooLongError, UnscoredError
from rcr_trainer.llm.model import LanguageModel, open_llm
from rcr_trainer.llm.settings import LLMSettings

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")


def model(server: OpenAIServer, kind: str, cache: Path | None = None, **options: Any) -> LanguageModel:
    settings = {"kind": kind, "model": "m", "base_url": server.base_url, "timeout": 20, "backoff": 0.02, **options}
    return open_llm(LLMSettings(**settings), cache)


@pytest.mark.parametrize(
    ("echo", "error", "message", "calls"),
    [
        (None, AccessError, "'m' can't score: its server heeds neither echo, as vLLM does, nor grammar", 2),
        (lambda text: None, AccessError, "'m' can't score: its server heeds neither echo, as", 2),
        (lambda text: told(text, [" else"]), LLMError, "gave no probabilities of a text: the response is malformed", 3),
        (lambda text: told(text, [" b", "\n"], None), LLMError, "gave no probabilities of a text", 3),
    ],
)
def test_a_server_that_cannot_score_costs_one_text_for_each_way(
    echo: Any, error: type[LLMError], message: str, calls: int
) -> None:
    with OpenAIServer(echo=echo) as server, model(server, "completion", backoff=0) as llm:
        with pytest.raises(error, match=message) as caught:
            llm.log_likelihoods(["a", "b", "c"], [" b\n"] * 3)
        assert "\n" not in str(caught.value)
        assert len(server.requests) == calls
        with pytest.raises(UnscoredError, match=message):  # known from now on
            llm.log_likelihoods(["d"], [" b\n"])
        assert len(server.requests) == calls


def test_a_text_that_is_too_long_for_the_server_is_impossible() -> None:
    with OpenAIServer(echo=lambda text: told(text, [" b", "\n"])) as server, model(server, "completion") as llm:
        server.fault_of = lambda request: "context" if request.prompt.startswith("long") else None
        assert llm.log_likelihoods(["a", "long", "c"], [" b\n"] * 3) == [-2.0, -math.inf, -2.0]
        with pytest.raises(TooLongError, match="fewer or shorter examples"):
            llm.log_likelihoods(["long", "long too"], [" b\n"] * 2)


def test_a_server_that_refuses_to_score_is_one_that_cannot() -> None:
    with OpenAIServer() as server, model(server, "completion") as llm:
        server.fail("400", "400")
        with pytest.raises(UnscoredError, match=r"'m' can't score: .*the server refuses the request with status 400"):
            llm.log_likelihoods(["a"], [" b\n"])
        assert [sorted({"echo", "grammar"} & request.body.keys()) for request in server.requests] == [
            ["echo"],
            ["grammar"],
        ]


def told(text: str, last: list[str], value: float | None = -1.0, first: str = "") -> dict[str, Any]:
    """`logprobs` of a text that ends with some tokens; as vLLM counts where a token `first` begins each text."""
    tokens = [*([first] if first else []), text[: -len("".join(last))], *last, " more"]
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {"tokens": tokens, "text_offset": offsets, "token_logprobs": [None, *[value] * (len(tokens) - 1)]}


@pytest.mark.parametrize("first", ["", "<s>"])
def test_a_scored_text_ends_before_what_the_server_writes(first: str) -> None:
    with (
        OpenAIServer(echo=lambda text: told(text, [" b", "\n"], -1.5, first)) as server,
        model(server, "completion") as llm,
    ):
        assert llm.log_likelihoods(["Source: a\nTarget:", "x"], [" b\n"] * 2) == [-3.0, -3.0]
        assert llm.log_likelihoods([], []) == []
        sent = server.requests[0].body
        assert (sent["prompt"], sent["echo"], sent["logprobs"]) == ("Source: a\nTarget: b\n", True, 1)


BOTH = [
    ("Source: größe?\nTarget:", " ( 'Ω 🙂' )\n", ["Source", ":", " gr", "ö", "ße", "?", "\n", "Target", ":"]),
    (
        "问题：有几条河？\n答案：",
        "河流 ( 全部 )\n",
        ["问题", "：", *"\ufffd\ufffd\ufffd有几条河", "？", "\n", "答案", "\ufffd\ufffd"],
    ),
]


@pytest.mark.parametrize(
    ("prompt", "program", "before", "tokens"),
    [
        # As vLLM shows bytes of GPT-2's tokens: " 'Ω" and "🙂" in parts.
        (*BOTH[0], [" (", " '", "\ufffd", "\ufffd", " \ufffd", "\ufffd", "\ufffd", "'", " )", "\n"]),
        # As it shows Llama 2's, without the blank that begins a word.
        (
            "Source: how many\nTarget:",
            " count ( all )\n",
            ["<s>", "Source", ":", "how", "many", "\n", "Target", ":"],
            ["count", "(", "all", ")", "\n"],
        ),
        (*BOTH[1], ["河", "\ufffd", "\ufffd", " (", " \ufffd\ufffd", "\ufffd", "部", " )", "\n"]),
    ],
)
def test_tokens_that_show_parts_of_characters_or_no_blanks(
    prompt: str, program: str, before: list[str], tokens: list[str]
) -> None:
    def echo(text: str) -> dict[str, Any]:
        shown = [*before, *tokens, "\n"]
        offsets = [len("".join(shown[:at])) for at in range(len(shown))]
        values = [None, *[-100.0] * (len(before) - 1), *(-(2.0**-at) for at in range(len(tokens))), -100.0]
        return {"tokens": shown, "text_offset": offsets, "token_logprobs": values}

    with OpenAIServer(echo=echo) as server, model(server, "completion") as llm:
        assert llm.log_likelihoods([prompt], [program]) == [sum(-(2.0**-at) for at in range(len(tokens)))]


def test_what_a_server_that_cannot_score_wrote_is_booked() -> None:
    with OpenAIServer() as server, model(server, "completion") as llm:
        with pytest.raises(UnscoredError):
            llm.log_likelihoods(["a"], [" b\n"])
        assert llm.stats.used.calls == len(server.requests) == 2


def test_llama_cpp_refuses_echo_with_status_500() -> None:
    with OpenAIServer(grammar=written) as server, model(server, "completion") as llm:
        server.fail("500:Only no echo is supported")
        assert llm.log_likelihoods(["a"], [" b\n"]) == [-0.5]
        assert [request.body.get("echo") for request in server.requests] == [True, None]


def written(text: str, size: int = 3, value: float | None = -0.5) -> dict[str, Any]:
    """`logprobs` as llama.cpp writes them, of a text in tokens of some bytes; then the end of the answer."""
    raw = text.encode()
    tokens = [raw[at : at + size] for at in range(0, len(raw), size)]
    content = [{"token": part.decode(errors="replace"), "bytes": [*part], "logprob": value} for part in tokens]
    return {"content": [*content, {"token": "", "bytes": [], "logprob": -9.0}]}


@pytest.mark.parametrize("program", ["b", 'say ( "a\\b" )', "größe ( 'Ω 🙂' )"])
def test_a_server_that_ignores_echo_is_held_to_the_text_by_a_grammar(program: str, tmp_path: Path) -> None:
    text = f" {program}\n"
    with OpenAIServer(grammar=written) as server:
        for _ in range(2):
            with model(server, "completion", tmp_path / "kept.sqlite") as llm:
                found = llm.log_likelihoods(["Source: a\nTarget:", "x"], [text] * 2)
            assert found == [-0.5 * math.ceil(len(text.encode()) / 3)] * 2
        assert [request.body.get("echo") for request in server.requests] == [True, None, None]  # the rest is kept
        sent = server.requests[-1].body
        assert (sent["prompt"], sent["max_tokens"]) == ("x", len(text.encode()) + 1)
        with model(server, "completion", tmp_path / "kept.sqlite") as llm:  # what is kept doesn't tell the way
            assert llm.log_likelihoods(["x", "new"], [text] * 2) == found
        assert [request.body.get("echo") for request in server.requests[3:]] == [True, None]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (lambda text: written(text[:-1]), "heeds neither echo"),
        (lambda text: written("x" + text), "heeds neither echo"),
        (lambda text: {"content": None}, "heeds neither echo"),
        (lambda text: written(text, value=None), "gave no probabilities of a text"),
    ],
)
def test_probabilities_of_another_text_or_of_none_are_refused(told: Any, message: str) -> None:
    with (
        OpenAIServer(grammar=told) as server,
        model(server, "completion", backoff=0) as llm,
        pytest.raises(UnscoredError, match=message),
    ):
        llm.log_likelihoods(["a"], [" b\n"])


def test_a_chat_model_cannot_score() -> None:
    with OpenAIServer() as server, model(server, "chat") as llm:
        with pytest.raises(ConfigError, match="'m' gives no probabilities: scoring needs"):
            llm.log_likelihoods(["a"], ["b"])
        assert not server.requests
