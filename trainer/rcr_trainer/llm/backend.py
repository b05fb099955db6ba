"""A LangChain model as `LanguageModel` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableBinding

from rcr_trainer.errors import ConfigError
from rcr_trainer.llm.answers import Answer, read, usage
from rcr_trainer.llm.faults import Diagnosis, MalformedResponseError
from rcr_trainer.llm.identity import address, identity, secrets
from rcr_trainer.llm.openai_ import is_openai, tame

_MESSAGE_TOKENS = 16
"""What roles and separators of a chat add to the text, generously."""


class LangChainBackend:
    """Asks any LangChain completion or chat model, past LangChain's own cache and the client's own retries.

    Args:
        model: a `BaseLLM` or `BaseChatModel`, also one with parameters bound (`model.bind(…)`).
        stop: stop sequences, sent along and applied to what comes back.
        instruction: a system message, or a paragraph before the prompt of a completion model; "": none.
        batch_size: prompts in a call; more than 1 for models that run batches on this machine.
        max_tokens: tokens that an answer has at most; None: the model's own setting.
        count_tokens: the model's tokenizer, text → number; None: an upper bound, the number of bytes.
        name: the model's, for messages; None: its own.
        named: for the cache, see `identity`.
        strict: the cache outlives the process.

    Raises:
        ConfigError: that is no LangChain model, or it can't be told from others.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop: Sequence[str] = (),
        instruction: str = "",
        batch_size: int = 1,
        max_tokens: int | None = None,
        count_tokens: Callable[[str], int] | None = None,
        name: str | None = None,
        named: str | None = None,
        strict: bool = False,
    ) -> None:
        bound: dict[str, Any] = {}
        while isinstance(model, RunnableBinding):
            bound = {**model.kwargs, **bound}
            model = model.bound
        if not isinstance(model, BaseLanguageModel) or not callable(getattr(model, "agenerate_prompt", None)):
            msg = f"the model must be a LangChain LLM or chat model, not {type(model).__name__}"
            raise ConfigError(msg)
        self._stop = list(stop or bound.pop("stop", None) or ())
        bound.pop("stop", None)
        self._bound, self._instruction = bound, instruction
        self.batch_size = batch_size
        extra = {"stop": self._stop, "instruction": instruction, "bound": bound}
        self.identity = identity(model, extra, named=named, strict=strict)
        self.name = name or _name(model)
        openai = is_openai(model)
        self.diagnose = Diagnosis(self.name, address(model), secrets(model), openai)
        self._max_tokens = max_tokens if max_tokens is not None else _longest(model, bound)
        count = count_tokens
        if count is None and model.custom_get_token_ids is not None:
            count = model.get_num_tokens
        self.exact_tokens = count is not None
        self._count = count or _bytes
        self._owned: Any = None
        if openai:
            model, self._owned = tame(model)
        elif model.cache is not False and (isinstance(model.cache, BaseCache) or get_llm_cache() is not None):
            # LangChain's cache leaves out the server's address, and would make old answers look paid for.
            model = model.model_copy(update={"cache": False})
        self._model: BaseLanguageModel[Any] = model
        self._chat = isinstance(model, BaseChatModel)

    async def ask(self, prompts: Sequence[str]) -> list[Answer]:
        """Answer some prompts in one call of the model."""
        values = [self._prompt(prompt) for prompt in prompts]
        result = await self._model.agenerate_prompt(values, stop=self._stop or None, **self._bound)
        if len(result.generations) != len(prompts) or not all(result.generations):
            raise MalformedResponseError("no choices")
        return [self._answer(result, row) for row in range(len(prompts))]

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt with all that is sent along, at least as many as there are."""
        around = _MESSAGE_TOKENS if self._chat else 0
        if self._instruction:
            around += self._count(self._instruction) + _MESSAGE_TOKENS
        return self._count(text) + around

    def max_completion_tokens(self) -> int | None:
        """Tokens of an answer, at most; None if that isn't known."""
        return self._max_tokens

    async def close(self) -> None:
        """Close the connections that were opened for this object."""
        if self._owned is not None:
            await self._owned.aclose()

    def _prompt(self, prompt: str) -> PromptValue:
        if not self._instruction:
            return StringPromptValue(text=prompt)
        if self._chat:
            return ChatPromptValue(messages=[SystemMessage(self._instruction), HumanMessage(prompt)])
        return StringPromptValue(text=f"{self._instruction}\n\n{prompt}")

    def _answer(self, result: LLMResult, row: int) -> Answer:
        generation = result.generations[row][0]
        text, reason = read(generation, self._stop)
        counts = usage(generation, result.llm_output if len(result.generations) == 1 else None)
        return Answer(text, reason, *(counts or (-1, -1)))


def _name(model: BaseLanguageModel[Any]) -> str:
    for field in ("model_name", "model", "model_id"):
        value = getattr(model, field, None)
        if isinstance(value, str) and value:
            return value
    return type(model).__name__


def _longest(model: BaseLanguageModel[Any], bound: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_output_tokens", "num_predict")
    extra = getattr(model, "extra_body", None) or {}
    for value in [*map(bound.get, names), *(getattr(model, name, None) for name in names), *map(extra.get, names)]:
        if isinstance(value, int) and value > 0:
            return value
    return None


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
