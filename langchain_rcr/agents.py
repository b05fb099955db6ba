"""Few-shot examples in LangChain agents, as middleware of `create_agent`."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

from langchain_rcr.chains.few_shot import asked_by, checked, prompt_keys
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.programs.json_ import tool_calls

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest
    from langchain.agents.middleware.types import ModelCallResult, ModelResponse
except ImportError as error:
    raise MissingExtraError("langchain", "agents") from error

_NO_RESULT = "You have correctly called this tool."
"""As in LangChain's own `tool_example_to_messages`."""


class FewShotMiddleware(AgentMiddleware[Any, Any, Any]):
    """Shows an agent's model picked examples: `create_agent(model, tools, middleware=[FewShotMiddleware(retriever)])`.

    Each model call sees the picks as messages between the system message and the conversation. They are in no state,
    checkpoint or stream, and are written the same way each time, so that a provider's prompt cache is used again as
    long as the picks are the same: in all calls for one question, by default.

    A program that is a tool call in JSON, or a list of calls, becomes an AI message with `tool_calls` and a tool
    message for each; any other program becomes the text of an AI message.

    Args:
        selector: any LangChain example selector, such as `SequentialCompositionalRetriever`.
        variables: what the selector is asked, by a model request; None, or an empty result: no examples are shown. By
            default the text of the last human message is the question. It is the place for the value of a retriever's
            `group`, from `request.runtime.context`, or for the first message instead of the last, by which the examples
            stay the same for a whole conversation.
        source_key: the key of an example's question; None: the retriever's own, "source" for other selectors.
        target_key: the key of its program; None: the retriever's own, "target" for other selectors.
        result_key: the key of what its tool gave: a text, or one for each call. Where an example has none, the tool
            message says that the call was right.

    Raises:
        InputError: the selector is not an example selector, or the question has several keys, none of which was named.
    """

    def __init__(
        self,
        selector: BaseExampleSelector,
        *,
        variables: Callable[[ModelRequest[Any]], Mapping[str, Any] | None] | None = None,
        source_key: str | None = None,
        target_key: str | None = None,
        result_key: str = "result",
    ) -> None:
        super().__init__()
        self.keys = prompt_keys(selector, source_key, target_key)
        self.selector = asked_by(selector, self.keys.query)
        self.variables = variables or self._last_question
        self.result_key = result_key

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        """Call the model with the picks before the conversation."""
        asked = self.variables(request)
        return handler(self._with(request, self.selector.select_examples(dict(asked)) if asked else []))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelCallResult[Any]:
        """`wrap_model_call`, awaited."""
        asked = self.variables(request)
        examples = await self.selector.aselect_examples(dict(asked)) if asked else []
        return await handler(self._with(request, examples))

    def _last_question(self, request: ModelRequest[Any]) -> dict[str, str]:
        question = last_question(request.messages)
        return {self.keys.query: question} if question else {}

    def _with(self, request: ModelRequest[Any], examples: Sequence[Mapping[str, Any]]) -> ModelRequest[Any]:
        rows = checked(examples, [self.keys.source, self.keys.target])
        shown = [message for step, row in enumerate(rows) for message in self._messages(step, row)]
        return request.override(messages=[*shown, *request.messages])

    def _messages(self, step: int, example: Mapping[str, Any]) -> list[AnyMessage]:
        question, program = example[self.keys.source], example[self.keys.target]
        calls = [
            {"name": name, "args": arguments, "id": _call_id(step, at, program), "type": "tool_call"}
            for at, (name, arguments) in enumerate(tool_calls(program))
        ]
        if not calls:
            return [HumanMessage(question), AIMessage(program)]
        given = example.get(self.result_key, _NO_RESULT)
        results = [given] * len(calls) if isinstance(given, str) else given
        if len(results) != len(calls):
            raise InputError(f"an example has {len(calls)} calls and {len(results)} results: {program:.80}")
        both = zip(results, calls, strict=True)
        told = [ToolMessage(result, tool_call_id=call["id"], name=call["name"]) for result, call in both]
        return [HumanMessage(question), AIMessage("", tool_calls=calls), *told]


def last_question(messages: Sequence[AnyMessage]) -> str:
    """The text of the last human message; empty if there is none."""
    return next((message.text.strip() for message in reversed(messages) if isinstance(message, HumanMessage)), "")


def _call_id(step: int, at: int, program: str) -> str:
    """The same for the same call: nine letters and digits, a form that all providers take."""
    return hashlib.blake2b(f"{step} {at} {program}".encode(), digest_size=5).hexdigest()[:9]
