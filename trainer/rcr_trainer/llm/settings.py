"""The settings of the language model: section `llm` of a run, used throughout this package."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from langchain_rcr.basics.section import Section, contradiction, matching

ONE_ANSWER = ("max_tokens", "max_completion_tokens", "n_predict", "n", "best_of", "stream")
"""Server parameters that ask for longer answers, more of them, or an answer in parts."""


Device: TypeAlias = Annotated[str, matching(r"auto|cpu|mps|cuda(:\d+)?", "auto, cpu, cuda, cuda:N or mps")]
"""Where torch computes. It knows twenty kinds of device; these are tested."""


class LLMSettings(Section, use_attribute_docstrings=True):
    """The language model that answers prompts, in GRPO and in the comparison."""

    kind: Literal["completion", "chat", "local"] = "completion"
    """completion or chat: a server that speaks OpenAI's protocol; local: a model run here by transformers."""
    model: str | None = None
    """Name of the model on the server; for a local model, its folder or hub name. There is no default."""
    base_url: str | None = None
    """Address of the server (vLLM, Ollama, llama.cpp, …); null: OpenAI's own."""
    api_key_env: Annotated[str, matching(r"\w+", "the name of an environment variable")] = "OPENAI_API_KEY"
    """Environment variable that holds the API key."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature. 0: the likeliest answer; null: not sent."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens per answer, including the model's reasoning."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts at which an answer ends. null: a line break and what precedes a question in the prompt (Source:); for chat
    none, since reasoning models refuse such texts, or stop inside their reasoning. An empty list: none."""
    timeout: float = Field(60.0, gt=0)
    """Time limit per attempt in seconds."""
    concurrency: int = Field(16, ge=1)
    """Maximum calls at the same time."""
    attempts: int = Field(6, ge=1)
    """Attempts per prompt before the run stops."""
    backoff: float = Field(1.0, ge=0)
    """Seconds before the second attempt, doubled before each further one; fourfold if a rate limit names no time."""
    batch_size: int = Field(16, ge=1)
    """kind local: prompts decoded together."""
    device: Device = "auto"
    """kind local: auto (a GPU if there is one), cpu, cuda, cuda:N, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """kind local: data type it computes with; auto: the one its folder names."""
    extra_body: dict[str, Any] = Field({})
    """Further JSON parameters that this server takes."""
    cache: Path | None = None
    """SQLite file of answers, shared by runs; null: answers.sqlite beside the run folder."""
    price_prompt: float | None = Field(None, ge=0)
    """Dollars per million prompt tokens."""
    price_completion: float | None = Field(None, ge=0)
    """Dollars per million completion tokens."""
    budget_calls: int | None = Field(None, ge=0)
    """Maximum calls; null: no limit."""
    budget_tokens: int | None = Field(None, ge=0)
    """Maximum tokens, read and written together; null: no limit."""
    budget_money: float | None = Field(None, ge=0)
    """Maximum dollars; needs the prices. null: no limit."""

    @property
    def given(self) -> bool:
        """Whether the settings name a model."""
        return bool((self.model or "").strip())

    @property
    def scores(self) -> bool:
        """Whether such a model may give a text's probability (a server only if it heeds `echo` or `grammar`)."""
        return self.kind in ("local", "completion")

    def money(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Dollars for these tokens; None without prices."""
        if self.price_prompt is None or self.price_completion is None:
            return None
        return (prompt_tokens * self.price_prompt + completion_tokens * self.price_completion) / 1e6

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        with suppress(ValueError):
            parts = urlsplit("http://localhost" if address is None else address)
            if parts.scheme in ("http", "https") and parts.hostname:
                return address
        raise PydanticCustomError("address", "Input should be an address such as http://localhost:8000/v1")

    @field_validator("extra_body")
    @classmethod
    def _is_json(cls, body: dict[str, Any]) -> dict[str, Any]:
        with suppress(TypeError, ValueError):
            json.dumps(body, allow_nan=False)
            return body
        raise PydanticCustomError("json", "Input should be what JSON holds (dates in quotes, finite numbers)")

    @model_validator(mode="after")
    def _agree(self) -> LLMSettings:
        if self.kind == "local" and self.temperature:
            raise contradiction("llm.temperature", self.temperature, "llm.kind", "local", "it decodes greedily, set 0")
        if self.kind == "local" and self.base_url:
            raise contradiction("llm.base_url", self.base_url, "llm.kind", "local", "set kind: completion")
        if (self.price_prompt is None) != (self.price_completion is None):
            raise ValueError("llm.price_prompt and llm.price_completion: give both or neither")
        for name in ONE_ANSWER:
            value, most = self.extra_body.get(name), {"n": 1, "best_of": 1, "stream": 0}.get(name, self.max_tokens)
            if value is not None and not (isinstance(value, int) and 0 <= value <= most):
                advice = f"a call is for one whole answer of at most llm.max_tokens = {self.max_tokens}"
                raise ValueError(f"llm.extra_body: {name} must be at most {most}, or left out: {advice}")
        if self.budget_money is not None and self.price_prompt is None:
            raise ValueError(f"llm.budget_money = {self.budget_money} needs llm.price_prompt and llm.price_completion")
        return self
