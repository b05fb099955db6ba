"""Few-shot examples and tools for LangChain agents, as middleware of `create_agent`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool

from langchain_rcr.basics.items import Item, readable
from langchain_rcr.chains.few_shot import asked_by, checked, innermost, prompt_keys
from langchain_rcr.errors import InputError, MissingExtraError
from langchain_rcr.families.structure import LANDMARKS
from langchain_rcr.index.base import InThisThread, resolved
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.programs import ProgramSpec
from langchain_rcr.programs.json_ import tool_calls
from langchain_rcr.retriever import SequentialCompositionalRetriever

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest
    from langchain.agents.middleware.types import ModelCallResult, ModelResponse
except ImportError as error:
    raise MissingExtraError("langchain", "agents") from error

SETS = ProgramSpec("set", anonymize=False, max_size=1)
"""How sets of tools are read: each tool is a structure."""


class _ChangedRequests(AgentMiddleware[Any, Any, Any]):
    """Middleware that changes what a model is asked."""

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        """Call the model with the changed request."""
        return handler(InThisThread().run(self._changed(request, is_async=False)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelCallResult[Any]:
        """`wrap_model_call`, awaited."""
        return await handler(await self._changed(request, is_async=True))

    async def _changed(self, request: ModelRequest[Any], *, is_async: bool) -> ModelRequest[Any]:
        raise NotImplementedError


class FewShotMiddleware(_ChangedRequests):
    """Shows an agent's model picked examples: `create_agent(model, tools, middleware=[FewShotMiddleware(retriever)])`.

    Each model call sees the picks as messages between the system message and the conversation. They enter no state,
    checkpoint or stream. They are written the same way each time, so a provider's prompt cache is reused while the
    picks stay the same: by default, in all calls for one question.

    A program that is a tool call in JSON, or a list of calls, becomes an AI message with `tool_calls` and a tool
    message for each; any other program becomes the text of an AI message.

    Args:
        selector: any LangChain example selector, such as `SequentialCompositionalRetriever`.
        variables: maps a model request to the selector's input. If it returns None or nothing, or the question is
            blank, no examples are shown. By default the question is the text of the last human message. Use it to pass
            the value of a retriever's `group` from `request.runtime.context`, or to ask with the first message instead
            of the last, so that the examples stay the same for a whole conversation.
        source_key: the key of an example's question; None: the retriever's own, "source" for other selectors.
        target_key: the key of its program; None: the retriever's own, "target" for other selectors.
        result_key: the key of its tool's result, or, for a list of calls, of a list with each call's result. Anything
            but text is written as JSON. If an example has none, or null, the tool message says that the call was right.

    Raises:
        InputError: the selector is not an example selector, or the question has several keys and none was named.
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
        self.keys = prompt_keys(selector, source_key, target_key, in_templates=False)
        self.selector = asked_by(selector, self.keys.query)
        self.variables = variables or self._last_question
        self.result_key = result_key

    def _last_question(self, request: ModelRequest[Any]) -> dict[str, str]:
        question = last_question(request)
        return {self.keys.query: question} if question else {}

    async def _changed(self, request: ModelRequest[Any], *, is_async: bool) -> ModelRequest[Any]:
        asked = self.variables(request) or {}
        if not isinstance(asked, Mapping):
            raise InputError(f"variables must give a mapping of names to values, not {type(asked).__name__}")
        question = asked.get(self.keys.query)
        asked = {} if isinstance(question, str) and not question.strip() else asked
        select = self.selector.aselect_examples if is_async else self.selector.select_examples
        picks = await resolved(select(dict(asked))) if asked else []
        rows = checked(picks, [self.keys.source, self.keys.target])
        shown = [message for step, row in enumerate(rows) for message in self._messages(step, row)]
        system = [*takewhile(lambda message: isinstance(message, SystemMessage), request.messages)]
        return request.override(messages=[*system, *shown, *request.messages[len(system) :]])

    def _messages(self, step: int, example: Mapping[str, Any]) -> list[AnyMessage]:
        question, program = example[self.keys.source], example[self.keys.target]
        if not (isinstance(question, str) and isinstance(program, str)):
            raise InputError(f"an example's question and program must be texts, not {question!r:.80}, {program!r:.80}")
        calls = []
        for at, (name, arguments) in enumerate(tool_calls(program)):
            # The same for the same call: nine letters and digits, a form that all providers accept.
            call_id = hashlib.blake2b(f"{step} {at} {program}".encode(), digest_size=5).hexdigest()[:9]
            calls.append({"name": name, "args": arguments, "id": call_id, "type": "tool_call"})
        if not calls:
            return [HumanMessage(question), AIMessage(program)]
        given = example.get(self.result_key)
        is_list = program.lstrip().startswith("[")
        results = given if is_list and isinstance(given, list | tuple) else [given] * len(calls)
        if len(results) != len(calls):
            raise InputError(f"an example has {len(calls)} calls and {len(results)} results: {program:.80}")
        both = zip(results, calls, strict=True)
        answers = [
            ToolMessage(_result_text(result), tool_call_id=call["id"], name=call["name"]) for result, call in both
        ]
        return [HumanMessage(question), AIMessage("", tool_calls=calls), *answers]


def _result_text(result: Any) -> str:
    """A tool's result as the content of its message, as LangChain's agents write it."""
    if result is None:
        return "You have correctly called this tool."  # as in LangChain's own `tool_example_to_messages`
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def last_question(request: ModelRequest[Any]) -> str:
    """The text of the last human message; empty if there is none."""
    messages = reversed(request.messages)
    return next((message.text.strip() for message in messages if isinstance(message, HumanMessage)), "")


class ComposedToolSelector(_ChangedRequests):
    """Shows an agent's model the tools that its request needs together, picked one after the other.

    The policy is that of `SequentialCompositionalRetriever`, over a pool of tools. A tool is a structure; what a
    request needs is learnt from past requests and the tools they used. Use it as middleware, or use `retrieve_tools`
    where a function from a request to tool names is wanted, as in langgraph-bigtool.

    Args:
        retriever: over a pool of tools, as `from_pairs` makes it: `selector.retriever.save(folder)` writes it,
            `ComposedToolSelector(SequentialCompositionalRetriever.from_pretrained(folder))` reads it.
        always_include: names of tools that the model always sees.
        question: the request, from a model request; None: the text of the last human message. Without one the model
            sees all tools.
    """

    def __init__(
        self,
        retriever: SequentialCompositionalRetriever,
        *,
        always_include: Sequence[str] = (),
        question: Callable[[ModelRequest[Any]], str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(innermost(retriever), SequentialCompositionalRetriever):
            raise InputError(f"retriever must be a SequentialCompositionalRetriever, not {type(retriever).__name__}")
        if retriever.store.encoder.spec.language != SETS.language:
            raise InputError(f"the retriever's programs are {retriever.store.encoder.spec.language!r}, not tools")
        if isinstance(always_include, str):
            raise InputError(f"always_include must be a sequence of names, not one: [{always_include!r}]")
        self.retriever, self.always_include = retriever, frozenset(always_include)
        self.question = question or last_question

    @classmethod
    def from_pairs(
        cls,
        pairs: Sequence[tuple[str, Sequence[str]]],
        tools: Sequence[BaseTool] | Mapping[str, str],
        k: int = 5,
        *,
        embeddings: Embeddings | None = None,
        always_include: Sequence[str] = (),
        question: Callable[[ModelRequest[Any]], str] | None = None,
        landmarks: int = LANDMARKS,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """A selector fitted to requests, within seconds.

        Tools are told apart by the pairs, their names and descriptions; one that no pair uses, by the latter two alone.

        Args:
            pairs: requests with the names of the tools that each needed. Names that `tools` lacks are never picked.
            tools: those to pick from; or names with their descriptions.
            k: the most tools that a request gets, besides those of `always_include`.
            embeddings: read requests and descriptions; None: the default model, from the extra `offline`.
            always_include: as the field of the class.
            question: as the field of the class.
            landmarks: the most pairs to learn from; more are sampled, evenly over the sets of tools. The time to fit
                grows with its cube.
            seed: of that sample.
            **options: fields of the retriever, such as `stop_early`.

        Raises:
            InputError: a pair or a tool can't be read; the embeddings' vectors can't be used.
        """
        pool = _tools(tools)
        taught = _evenly([_taught(number, pair) for number, pair in enumerate(pairs)], landmarks, seed)
        described = [Item(tool["source"], tool["target"]) for tool in pool]
        encoder = TriEncoder.fitted(
            [*taught, *described], embeddings=embeddings, spec=SETS, seed=seed, landmarks=landmarks + len(pool)
        )
        encoder.query.describe(readable(described))
        ids = [tool["name"] for tool in pool]
        retriever = SequentialCompositionalRetriever.from_encoder(encoder, pool, ids=ids, k=k, **options)
        return cls(retriever, always_include=always_include, question=question)

    def add_tools(self, tools: Sequence[BaseTool] | Mapping[str, str]) -> None:
        """Add tools to pick from, known by their names and descriptions; tools with the same names are replaced."""
        pool = _tools(tools)
        self.retriever.upsert(pool, [tool["name"] for tool in pool])

    def retrieve_tools(self, query: str) -> list[str]:
        """Retrieve the names of the tools that a request needs together, most needed first."""
        return _names(self.retriever.invoke(query))

    async def aretrieve_tools(self, query: str) -> list[str]:
        """`retrieve_tools`, awaited."""
        return _names(await self.retriever.ainvoke(query))

    async def _changed(self, request: ModelRequest[Any], *, is_async: bool) -> ModelRequest[Any]:
        """The request without the pool's tools that weren't picked, in its order: same picks make the same prompt."""
        query, look_up = self.question(request), self.retriever.store.index.known
        names = sorted({tool.name for tool in request.tools if isinstance(tool, BaseTool)} - self.always_include)
        if not (names and str(query or "").strip()):
            return request
        known = await asyncio.to_thread(look_up, names) if is_async else look_up(names)
        invoke = self.retriever.ainvoke if is_async else self.retriever.invoke
        picks = await resolved(invoke(query, filter={"name": {"$in": sorted(known)}})) if known else []
        out = known.difference(_names(picks))
        tools = [tool for tool in request.tools if isinstance(tool, dict) or tool.name not in out]
        return request.override(tools=tools)


def _names(picks: Sequence[Document]) -> list[str]:
    """Names in the order of picking, however the retriever orders its picks."""
    if strange := [pick.id for pick in picks if "name" not in pick.metadata]:
        raise InputError(f"the pool's example {strange[0]!r} is no tool, as it has no 'name': add tools with add_tools")
    return [pick.metadata["name"] for pick in sorted(picks, key=lambda pick: int(pick.metadata["step"]))]


def _tools(tools: Sequence[BaseTool] | Mapping[str, str]) -> list[dict[str, str]]:
    """Tools as examples: the description is the question, the set of just that tool the program."""
    if isinstance(tools, Mapping):
        about = tools
    elif odd := [tool for tool in tools if not isinstance(tool, BaseTool)]:
        raise InputError(f"tools must be LangChain tools, or a mapping of names to descriptions, not {odd[0]!r:.80}")
    else:
        about = {tool.name: tool.description for tool in tools}
    for name, text in about.items():
        if not (name and isinstance(name, str) and isinstance(text, str)):
            raise InputError(f"tools: not a name with a description: {name!r:.80}, {text!r:.80}")
    return [
        {"source": f"{name.replace('_', ' ')}: {text}", "target": json.dumps([name]), "name": name}
        for name, text in about.items()
    ]


def _taught(number: int, pair: Any) -> Item:
    try:
        request, names = pair
        is_pair = bool(request.strip()) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
    except (TypeError, ValueError, AttributeError):
        is_pair = False
    if not is_pair:
        raise InputError(f"pair {number} is not a request with a list of the names of its tools: {pair!r:.80}")
    return Item(request, json.dumps(sorted({*names})))


def _evenly(items: Sequence[Item], most: int, seed: int) -> list[Item]:
    """At most `most` examples, spread as evenly as possible over their programs, at random within each program."""
    turns = defaultdict[str, Iterator[int]](count)
    order = np.random.default_rng([seed, 6]).permutation(len(items)).tolist()
    return sorted((items[at] for at in order), key=lambda item: next(turns[item.target]))[:most]
