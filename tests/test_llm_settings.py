"""A model by settings: what is asked for clearly, and before anything is asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rcr_trainer.errors import ConfigError
from rcr_trainer.llm import LLMSettings, Prices, open_llm
from rcr_trainer.llm.backend import LangChainBackend


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        monkeypatch.delenv(name)


def backend(**settings: Any) -> tuple[LangChainBackend, Any]:
    with open_llm({"model": "m", "base_url": "http://127.0.0.1:1/v1", **settings}, None) as llm:
        found = llm._backend
        assert isinstance(found, LangChainBackend)
        return found, found._model


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "llm.model is required"),
        ({"model": " "}, "llm.model is required"),
        ({"model": None}, "llm.model is required"),
        ({"model": "m", "kind": "complete"}, "llm.kind must be one of completion, chat, local"),
        ({"model": "m", "temprature": 1}, "llm.temprature: there is no such setting"),
        ({"model": "m"}, "set the environment variable OPENAI_API_KEY"),
        ({"model": "m", "base_url": "https://api.openai.com/v1", "api_key_env": "MINE"}, "environment variable MINE"),
        ({"model": "m", "kind": "local", "temperature": 0.7}, "greedily"),
        ({"model": "m", "kind": "local", "base_url": "http://x"}, "llm.base_url"),
        ({"model": "m", "price_prompt": 1}, "both or neither"),
        ({"model": "m", "max_tokens": 0}, "llm.max_tokens must be above 0"),
        ({"model": "m", "stop": "\n"}, "llm.stop = .* give a list of texts"),
        ({"model": "m", "stop": ["a", ""]}, "none of them empty"),
        ({"model": "m", "base_url": "http://x", "budget_calls": -1}, "negative"),
        ({"model": "m", "base_url": "http://x", "budget_money": 1.0}, "needs prices"),
        ("m", "mapping"),
    ],
)
def test_settings_that_cannot_be(settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_llm(settings, None)


def test_a_server_of_ones_own_needs_no_key_and_gets_max_tokens() -> None:
    for kind in ("completion", "chat"):
        _, model = backend(kind=kind, max_tokens=7)
        assert model.openai_api_key.get_secret_value() == "none"
    assert model.max_tokens is None
    assert model.extra_body == {"max_tokens": 7}


def test_openais_own_chat_gets_max_completion_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "sk-mine")
    found, model = backend(kind="chat", base_url=None, api_key_env="MINE", max_tokens=7)
    assert model._default_params["max_completion_tokens"] == 7
    assert model.openai_api_key.get_secret_value() == "sk-mine"
    assert found.max_completion_tokens() == 7
    assert found.identity.count("api.openai.com") == 1


def test_a_timeout_is_always_set_and_the_clients_own_retries_are_off() -> None:
    for kind in ("completion", "chat"):
        _, model = backend(kind=kind, timeout=9)
        client = getattr(model, "root_async_client", None) or model.async_client._client
        assert (client.max_retries, client.timeout) == (0, 9)
    assert LLMSettings(model="m").timeout == 60


def test_stop_and_instruction_depend_on_the_kind_unless_given() -> None:
    completion, chat = backend()[0], backend(kind="chat")[0]
    assert (completion._stop, completion._instruction) == (["\n"], "")
    assert chat._stop == ["\nSource:"]
    assert "Answer with the program" in chat._instruction
    server = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}
    for given, stop in (({}, ["\nSource:"]), ({"stop": [";"]}, [";"]), ({"stop": []}, [])):
        with open_llm({**server, **given}, None, language="sql:sqlite") as llm:
            assert isinstance(llm._backend, LangChainBackend)
            assert llm._backend._stop == stop
    own = backend(kind="chat", stop=[], instruction="")[0]
    assert (own._stop, own._instruction) == ([], "")


def test_passwords_in_an_address_stay_out_of_identity_and_messages() -> None:
    found, _ = backend(base_url="http://user:hunter2@127.0.0.1:1/v1")
    assert "hunter2" not in found.identity
    assert "hunter2" not in found.diagnose.who
    assert "127.0.0.1:1/v1" in found.diagnose.who


def test_any_pydantic_section_with_these_fields_will_do(tmp_path: Path) -> None:
    class Section(BaseModel):
        kind: str = "chat"
        model: str = "m"
        base_url: str = "http://127.0.0.1:1/v1"
        price_prompt: float = 1.0
        price_completion: float = 2.0
        budget_money: float = 3.0

    with open_llm(Section(), tmp_path / "a.sqlite") as llm:
        assert llm.stats.prices == Prices(1.0, 2.0)
        assert llm.name == "m"
        assert llm.estimate(["Source: a\nTarget:"]).calls == 1
