"""A model by settings: what is asked for clearly, and before anything is asked."""

from __future__ import annotations

import inspect
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.client import Client
from rcr_trainer.llm.model import open_llm
from rcr_trainer.llm.server import Scored
from rcr_trainer.llm.settings import LLMSettings

from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import Conversation


def backend(**settings: Any) -> tuple[Client, Any]:
    with open_llm(LLMSettings(**{"model": "m", "base_url": "http://127.0.0.1:1/v1", **settings}), None) as llm:
        found = llm._client
        assert isinstance(found, Client)
        return found, found._model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "llm.model is required"),
        ({"model": " "}, "llm.model is required"),
        ({"model": "m"}, "set the environment variable OPENAI_API_KEY"),
        ({"model": "m", "base_url": "https://api.openai.com/v1", "api_key_env": "MINE"}, "environment variable MINE"),
    ],
)
def test_models_that_cannot_be_opened(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_llm(LLMSettings(**settings), None)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kind": "complete"}, "'completion', 'chat' or 'local'"),
        ({"temprature": 1}, "temprature"),
        ({"kind": "local", "temperature": 0.7}, "greedily"),
        ({"kind": "local", "base_url": "http://x"}, "llm.base_url"),
        ({"base_url": ""}, "base_url must be an address"),
        ({"budget_calls": False}, "budget_calls must be a number, not False"),
        ({"price_prompt": 1}, "both or neither"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"stop": "\n"}, "list"),
        ({"stop": ["a", ""]}, "at least 1 character"),
        ({"budget_calls": -1}, "greater than or equal to 0"),
        ({"device": "gpu"}, "^LLMSettings: device must be auto, cpu, cuda, cuda:N or mps, not 'gpu'$"),
        ({"budget_money": 1.0}, "needs llm.price_prompt"),
        ({"extra_body": {"since": date(2024, 1, 1)}}, "what JSON holds"),
        ({"extra_body": {"top": [{"p": float("nan")}]}}, "what JSON holds"),
        *(
            (
                {"max_tokens": 7, "extra_body": body},
                f"{next(iter(body))} must be at most .*, or left out: .* llm.max_tokens = 7",
            )
            for body in (
                *({"max_tokens": most} for most in (8, -1, "7")),
                *({"max_completion_tokens": 8}, {"n_predict": -1}, {"n": 2}, {"best_of": 2}, {"stream": True}),
            )
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        LLMSettings(**settings)


def test_a_body_may_say_again_that_a_call_is_for_one_answer() -> None:
    body = {"max_tokens": None, "max_completion_tokens": 7, "n": 1, "best_of": 1, "stream": False}
    assert LLMSettings(max_tokens=7, extra_body=body).extra_body == body


@pytest.mark.slow
def test_a_local_server_needs_no_key_and_gets_max_tokens() -> None:
    for kind in ("completion", "chat"):
        _, model = backend(kind=kind, max_tokens=7)
        assert model.openai_api_key.get_secret_value() == "none"
    assert model.max_tokens is None
    assert model.extra_body == {"max_tokens": 7}
    # A limit of null would be none; of the two names, reasoning models behind proxies refuse the older one.
    assert backend(kind="chat", max_tokens=7, extra_body={"max_tokens": None})[1].extra_body == {"max_tokens": 7}
    body = {"max_tokens": None, "max_completion_tokens": 5}
    assert backend(kind="chat", max_tokens=7, extra_body=body)[1].extra_body == {"max_completion_tokens": 5}


@pytest.mark.slow
def test_openais_own_chat_gets_max_completion_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "sk-mine")
    found, model = backend(kind="chat", base_url=None, api_key_env="MINE", max_tokens=7)
    assert model._default_params["max_completion_tokens"] == 7
    assert model.openai_api_key.get_secret_value() == "sk-mine"
    assert found.longest == 7
    assert "api.openai.com" in found.who


@pytest.mark.slow
def test_a_timeout_is_always_set_and_the_clients_own_retries_are_off() -> None:
    for kind in ("completion", "chat"):
        _, model = backend(kind=kind, timeout=9)
        client = getattr(model, "root_async_client", None)
        if client is None:
            client = inspect.getclosurevars(model.async_client.create).nonlocals["completions"]._client
        assert (client.max_retries, client.timeout.read, model.cache) == (0, 9, False)
    assert LLMSettings(model="m").timeout == 60


@pytest.mark.slow
def test_stop_and_instruction_depend_on_the_kind() -> None:
    completion, chat = backend()[0], backend(kind="chat")[0]
    assert (completion.stop, completion.instruction) == (["\nSource:"], "")
    assert chat.stop == []  # models that think refuse stop sequences, or stop inside their thoughts
    assert "Answer with the program" in chat.instruction
    assert backend(stop=[";"])[0].stop == [";"]
    assert backend(stop=[])[0].stop == []
    assert backend(kind="chat", stop=["x"])[0].stop == ["x"]


def test_passwords_in_an_address_stay_out_of_messages() -> None:
    found, _ = backend(base_url="http://user:hunter2@127.0.0.1:1/v1")
    assert "hunter2" not in found.who
    assert "127.0.0.1:1/v1" in found.who


def test_prices_and_budget_are_the_settings(tmp_path: Path) -> None:
    settings = LLMSettings(
        kind="chat",
        model="m",
        base_url="http://127.0.0.1:1/v1",
        price_prompt=1.0,
        price_completion=2.0,
        budget_money=3.0,
    )
    with open_llm(settings, tmp_path / "a.sqlite") as llm:
        assert llm.name == "m"
        estimate = llm.estimate_calls(1, "Source: a\nTarget:")
        assert estimate.money == pytest.approx((estimate.use.prompt_tokens + 2 * 256) / 1e6)


PARTED: list[dict[str, Any]] = [
    {},
    *({"temperature": number} for number in (None, 0.5)),
    *({"max_tokens": number} for number in (1, 2)),
    *({"stop": texts} for texts in (["a"], ["a", "b"])),
    *({"extra_body": {"top_k": value}} for value in (1, "1", True, None, [1])),
    *({"extra_body": {"eos_token": text}} for text in ("</s>", "<end>", "***HIDDEN***")),
    *({"extra_body": {"stop_tokens": texts}} for texts in (["a"], ["b"])),
    *({"extra_body": {"headers": {"X-Version": text}}} for text in ("1", "2")),
    *({"extra_body": {"grammar": f'root ::= "token={text}"'}} for text in ("a", "b")),
    *({"extra_body": {"nested": [{"password": text}]}} for text in ("a", "b")),
    *({"extra_body": {"bias": {1: 1, "a": number}}} for number in (1, 2)),
    *({"base_url": f"http://me:{text}@127.0.0.1:1/v1"} for text in ("one", "two")),
    *({"base_url": f"http://127.0.0.1:1/v1?key={text}"} for text in ("one", "two")),
    *({"base_url": f"http://127.0.0.1:{port}/v1"} for port in (2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_settings_that_differ_in_what_is_sent_share_no_answer(kind: str) -> None:
    prompts = ["a", 'chat:["a", "b", "c"]', Conversation("", ("a", "b", "c")), Scored("a", "b"), Scored("ab", "")]
    keys = [[found.key(prompt) for prompt in prompts] for found, _ in (backend(kind=kind, **each) for each in PARTED)]
    assert len({key for row in keys for key in row}) == len(PARTED) * len(prompts)
    one, other = ({"eos_token": "a", "top_k": 1}, {"top_k": 1, "eos_token": "a"})
    assert backend(extra_body=one)[0].key("a") == backend(extra_body=other)[0].key("a")


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("completion", ["8a7ae79adad3727a", "72260850cdd50bdb", "18d0633ca03b07e1"]),
        ("chat", ["8c80f1bc915b6aef", "d3b14713c76c6864", "f60a907ff832909b"]),
    ],
)
def test_answers_that_were_paid_for_are_found_again(kind: str, keys: list[str]) -> None:
    """Their keys stay as they are, unless `_FORMAT` is raised for a reason."""
    body = {"top_k": 1, "logit_bias": {2: 1, 10: 2}, "note": "é"}
    found, _ = backend(kind=kind, base_url="http://127.0.0.1:1/v1/", extra_body=body)
    prompts = ["Source: a\nTarget:", Conversation("sys", ("a", "b", "c")), Scored("a", " b")]
    assert [found.key(prompt).hex()[:16] for prompt in prompts] == keys
