"""A `Prompt` as a LangChain prompt, of one text or of chat messages, with a place for examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, Self

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import BaseLLM
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
)
from langchain_core.prompts.message import BaseMessagePromptTemplate
from langchain_core.prompts.string import DEFAULT_FORMATTER_MAPPING
from langchain_core.runnables import Runnable, RunnableLambda, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable

from langchain_rcr.basics.items import escaped
from langchain_rcr.errors import InputError
from langchain_rcr.policy.prompt import Conversation, Prompt, renamed
from langchain_rcr.retriever import SequentialCompositionalRetriever

PICKED = "picked_examples"
"""The prompt variable that passes the picks from the retriever to the prompt."""
_LONGEST_QUOTE = 2000
"""Characters of a bad answer that are quoted to the model: a rambling answer needn't be paid for twice."""


class FewShotPrompt(FewShotPromptTemplate):
    """LangChain's `FewShotPromptTemplate`, safe with braces in examples.

    LangChain's own pastes the examples into one template and formats that, so it reads `{"a": 1}` in an example as a
    variable. This one formats only prefix and suffix; an example's text is never read as a template.
    """

    def format(self, **kwargs: Any) -> str:
        """The prompt as a string; an InputError if an example lacks a key that the prompt shows."""
        variables = self._merge_partial_and_user_variables(**kwargs)
        return self._compose(self._get_examples(**variables), variables)

    async def aformat(self, **kwargs: Any) -> str:
        """`format`, awaiting the selector."""
        variables = self._merge_partial_and_user_variables(**kwargs)
        return self._compose(await self._aget_examples(**variables), variables)

    def partial(self, **kwargs: Any) -> Self:
        """A copy with some variables set to strings, or to functions that are called at each use."""
        # LangChain's own also passes on cached attributes, which the constructor refuses.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        left = [name for name in self.input_variables if name not in kwargs]
        filled = {"input_variables": left, "partial_variables": {**self.partial_variables, **kwargs}}
        return type(self)(**fields | filled)

    def pretty_repr(self, html: bool = False) -> str:
        """The prompt with its variables by name. The selector isn't called; one example represents its picks."""
        names = {name: f"{{{name}}}" for name in self.input_variables}
        variables = self._merge_partial_and_user_variables(**names)
        if self.example_selector is None:
            return self._compose(self.examples or [], variables)
        named = {key: f"{{{key}}}" for key in self.example_prompt.input_variables}
        return self._compose([named], variables, _as_many(self.example_selector))

    def _compose(self, examples: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *more: str) -> str:
        keys, fill = self.example_prompt.input_variables, DEFAULT_FORMATTER_MAPPING[self.template_format]
        shown = [self.example_prompt.format(**{key: row[key] for key in keys}) for row in checked(examples, keys)]
        before, after = ([fill(text, **variables)] if text else [] for text in (self.prefix, self.suffix))
        return self.example_separator.join([*before, *shown, *more, *after])


class FewShotMessages(FewShotChatMessagePromptTemplate):
    """LangChain's `FewShotChatMessagePromptTemplate`, with a `pretty_repr` and an error that names a missing key."""

    def pretty_repr(self, html: bool = False) -> str:
        """The messages of an example with its keys by name. The selector isn't called."""
        note = "" if self.example_selector is None else f"\n\n{_as_many(self.example_selector)}"
        return self.example_prompt.pretty_repr(html=html) + note

    def _get_examples(self, **kwargs: Any) -> list[dict[str, Any]]:
        return checked(super()._get_examples(**kwargs), self.example_prompt.input_variables)

    async def _aget_examples(self, **kwargs: Any) -> list[dict[str, Any]]:
        return checked(await super()._aget_examples(**kwargs), self.example_prompt.input_variables)


class PromptKeys(NamedTuple):
    """Where a prompt finds its texts: `source` and `target` are keys of an example, `query` is a prompt variable."""

    source: str
    target: str
    query: str


def few_shot_prompt(
    selector: BaseExampleSelector,
    *,
    prompt: Prompt | None = None,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
    prefix: str | None = None,
) -> FewShotPrompt:
    """A prompt of selected examples and the question as one text.

    Args:
        selector: any LangChain example selector.
        prompt: how it is written. None: as the selector's checkpoint was trained, else as in the paper's appendix D:
            lines of "Source: …" and "Target: …" for each example, then "Source: " with the question, then "Target:".
        source_key: the key of an example's question; None: the retriever's own, "source" for other selectors.
        target_key: the key of its program; None: the retriever's own, "target" for other selectors.
        query_key: the prompt variable with the question; None: the selector's input key, if it has exactly one, else
            the source key.
        prefix: replaces the prompt's.

    Returns:
        A prompt whose variables are the question and what the prompt's templates name:
        `few_shot_prompt(retriever).invoke({"source": question})`.

    Raises:
        InputError: the selector is not an example selector, a key can't be the name of a template variable, the
            question has several keys and none was named, or the prompt is one of chat messages.
    """
    prompt = _written(prompt, selector, "appendix_d")
    if prompt.form != "text":
        raise InputError(f"the prompt '{prompt.name}' consists of chat messages: use chat_few_shot_prompt")
    if prefix is not None:
        prompt = Prompt(**{**prompt.model_dump(), "prefix": prefix})
    return _text(prompt, selector, prompt_keys(selector, source_key, target_key, query_key), prompt.system or "")


def chat_few_shot_prompt(
    selector: BaseExampleSelector,
    *,
    prompt: Prompt | None = None,
    system: str | None = None,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
) -> ChatPromptTemplate:
    """A prompt for a chat model: a human and an AI message for each selected example, or one text with all of them.

    Args:
        selector: any LangChain example selector.
        prompt: how it is written. None: as the selector's checkpoint was trained, else two messages for each example,
            then the question.
        system: replaces the prompt's: a template for a system message in front (literal braces doubled).
        source_key: see `few_shot_prompt`.
        target_key: see `few_shot_prompt`.
        query_key: see `few_shot_prompt`.

    Returns:
        A prompt whose variables are the question and what the prompt's templates name:
        `chat_few_shot_prompt(retriever) | model`.

    Raises:
        InputError: as for `few_shot_prompt`.
    """
    prompt = _written(prompt, selector, "chat")
    return _chat(prompt, selector, prompt_keys(selector, source_key, target_key, query_key), system)


def _chat(
    prompt: Prompt, selector: BaseExampleSelector, keys: PromptKeys, system: str | None = None
) -> ChatPromptTemplate:
    system = prompt.system if system is None else system
    if prompt.form == "text":
        system = escaped(prompt.instruction) if system is None else system
        asked: list[Any] = [HumanMessagePromptTemplate(prompt=_text(prompt, selector, keys))]
    else:
        shown = [("human", renamed(prompt.question, {"source": keys.source}))]
        shown += [("ai", renamed(prompt.answer, {"target": keys.target}))]
        shots = FewShotMessages(
            example_selector=asked_by(selector, keys.query),
            example_prompt=ChatPromptTemplate(shown),
            input_variables=[keys.query],
        )
        asked = [shots, ("human", _asked(prompt, keys))]
    front = [("system", system)] if system else []
    return ChatPromptTemplate([*front, *asked], partial_variables=_known(prompt))


def _written(prompt: Prompt | None, selector: object, name: str) -> Prompt:
    """The prompt; None: the one that a retriever's checkpoint was trained with, else the one of this name."""
    if prompt is not None and not isinstance(prompt, Prompt):
        raise InputError(f"prompt must be a Prompt, such as Prompt(name='chat'), not {type(prompt).__name__}")
    trained = selector.store.encoder.prompt if isinstance(selector, SequentialCompositionalRetriever) else None
    return prompt or trained or Prompt(name=name)


def _text(prompt: Prompt, selector: BaseExampleSelector, keys: PromptKeys, system: str = "") -> FewShotPrompt:
    """The prompt as one text, after the system message of a completion model."""
    example = f"{renamed(prompt.question, {'source': keys.source})}\n{renamed(prompt.answer, {'target': keys.target})}"
    front = f"{system}\n\n{prompt.prefix}" if prompt.prefix else f"{system}\n"
    return FewShotPrompt(
        example_selector=asked_by(selector, keys.query),
        example_prompt=PromptTemplate.from_template(example),
        prefix=front if system else prompt.prefix,
        suffix=f"{_asked(prompt, keys)}\n{escaped(prompt.cue)}",
        example_separator="\n",
        input_variables=[keys.query, *prompt.variables],
        partial_variables=_known(prompt),
    )


def _asked(prompt: Prompt, keys: PromptKeys) -> str:
    """The template for the question to answer."""
    question = renamed(prompt.question, {"source": keys.query})
    return f"{prompt.suffix}\n{question}" if prompt.suffix else question


def _known(prompt: Prompt) -> dict[str, Any]:
    return {"schema": prompt.db_schema} if prompt.db_schema else {}


def of_variables(
    prompt: Prompt, keys: PromptKeys, schema_of: Callable[[Mapping[str, Any]], str] | None, *, as_text: bool
) -> Runnable[dict[str, Any], PromptValue]:
    """Turns a question's variables and picks into the prompt, with the right part of the schema in the right place."""
    if not prompt.shows_schema:
        picked = PickedExamples()
        return _text(prompt, picked, keys, prompt.system or "") if as_text else _chat(prompt, picked, keys)
    return RunnableLambda(partial(_with_schema, prompt, keys, schema_of, as_text), name="few_shot_prompt")


def _with_schema(
    prompt: Prompt,
    keys: PromptKeys,
    schema_of: Callable[[Mapping[str, Any]], str] | None,
    as_text: bool,
    given: dict[str, Any],
) -> PromptValue:
    known = {name: value for name, value in given.items() if name != PICKED}
    schema = known.get("schema") or (schema_of(known) if schema_of is not None else prompt.db_schema)
    known |= {"schema": schema} if schema else {}
    examples = checked(given[PICKED], keys[:2])
    picks = [_Shown(str(each[keys.source]), str(each[keys.target]), each, schema_of) for each in examples]
    request = prompt.request(picks, known[keys.query], known)
    if as_text:
        return StringPromptValue(text=str(request))
    if isinstance(request, str):
        request = Conversation(prompt.instruction, (request,))
    messages = [kind(turn) for kind, turn in zip(cycle((HumanMessage, AIMessage)), request.turns, strict=False)]
    return ChatPromptValue(messages=[*([SystemMessage(request.system)] if request.system else []), *messages])


@dataclass(frozen=True, slots=True)
class _Shown:
    """A pick as `Prompt.request` takes it; the schema of its own database is looked up if it is asked for."""

    source: str
    target: str
    example: Mapping[str, Any]
    schema_of: Callable[[Mapping[str, Any]], str] | None

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its schema; empty if the example doesn't name a known database."""
        try:
            known = self.example.get("schema") or (self.schema_of(self.example) if self.schema_of is not None else "")
        except InputError:
            known = ""
        return {"schema": known}


def prompt_keys(
    selector: object,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
    *,
    in_templates: bool = True,
) -> PromptKeys:
    """The keys of a prompt over a selector's picks, which a template may name; see `few_shot_prompt`."""
    own = getattr(selector, "source_keys", ())
    if source_key is None and len(own) > 1:
        several = ", ".join(map(repr, own))
        raise InputError(f"an example's question consists of {several}: set source_key, to say which the prompt shows")
    source_key = source_key or next(iter(own), "source")
    target_key = target_key or getattr(selector, "target_key", None) or "target"
    asked = getattr(selector, "input_keys", None) or []
    keys = PromptKeys(source_key, target_key, query_key or (asked[0] if len(asked) == 1 else source_key))
    for key in keys:
        if not isinstance(key, str) or (in_templates and not key.isidentifier()):
            raise InputError(f"{key!r} can't be the name of a template variable: letters, digits and underscores only")
        if in_templates and key in ("self", "stop"):
            raise InputError(f"{key!r} can't be the name of a template variable: LangChain keeps it for itself")
    return keys


def asked_by(selector: BaseExampleSelector, variable: str) -> BaseExampleSelector:
    """The selector; ours is told which variable is the question, unless it already knows."""
    if not isinstance(selector, BaseExampleSelector):
        raise InputError(f"selector must be a LangChain example selector, not {type(selector).__name__}")
    if not isinstance(selector, SequentialCompositionalRetriever):
        return selector
    known = selector.input_keys or variable in selector.source_keys
    return selector if known else selector.model_copy(update={"input_keys": [variable]})


def checked(examples: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The examples; an InputError if one lacks a key that the prompt shows."""
    for example in examples:
        lacking = [key for key in keys if key not in example]
        if lacking:
            has = ", ".join(repr(key) for key in example) or "nothing"
            raise InputError(
                f"the prompt shows {lacking[0]!r} of each example, but one has {has}: set source_key and target_key"
            )
    return [dict(example) for example in examples]


def _as_many(selector: BaseExampleSelector) -> str:
    return f"… (as many as {type(selector).__name__} picks)"


def prompt_for(llm: Any, retriever: object, text: str, chat: str) -> Prompt:
    """The prompt that a retriever's checkpoint was trained with, else the one named `text` or `chat`."""
    return _written(None, innermost(retriever), text if completes(llm) else chat)


def completes(llm: Any) -> bool:
    """Whether this is a completion model rather than a chat model."""
    return isinstance(innermost(llm), BaseLLM)


def innermost(runnable: object) -> object:
    """The model or retriever inside its wrappers."""
    match runnable:
        case (
            RunnableBindingBase(bound=inside)
            | RunnableSequence(first=inside)
            | RunnableWithFallbacks(runnable=inside)
            | DynamicRunnable(default=inside)
        ):
            return innermost(inside)
    return runnable


class PickedExamples(BaseExampleSelector):
    """Selects what was picked before, from a prompt variable."""

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The examples under `PICKED`."""
        return list(input_variables[PICKED])

    def add_example(self, example: Mapping[str, Any]) -> None:
        """Refuse: it keeps no examples."""
        raise NotImplementedError("examples are added to the retriever of the chain")


def with_picks(part: Any) -> Any:
    """A copy of a prompt, or of part of one, whose selector is `PickedExamples`; None if it has no selector."""
    if isinstance(part, FewShotPromptTemplate | FewShotChatMessagePromptTemplate):
        fed = {"example_selector": PickedExamples()}
        return None if part.example_selector is None else part.model_copy(update=fed)
    if isinstance(part, BaseMessagePromptTemplate) and hasattr(part, "prompt"):
        within = with_picks(part.prompt)
        return None if within is None else part.model_copy(update={"prompt": within})
    if isinstance(part, ChatPromptTemplate):
        parts = [with_picks(one) for one in part.messages]
        if any(one is not None for one in parts):
            both = zip(parts, part.messages, strict=True)
            return part.model_copy(update={"messages": [old if new is None else new for new, old in both]})
    return None


def asked_again(prompt: PromptValue, failures: list[tuple[str, str]]) -> PromptValue:
    """The prompt of the next attempt, after answers that aren't programs, each with the reason."""
    if isinstance(prompt, StringPromptValue):
        # In front, as the model continues the end of the prompt.
        said, complaint = map(_quoted, failures[-1])
        note = f"The last question below was answered with this, which is not a program ({complaint}):\n{said}\n"
        return StringPromptValue(text=f"{note}Answer with a program alone.\n\n{prompt.text}")
    messages = prompt.to_messages()
    for said, complaint in (map(_quoted, failure) for failure in failures):
        messages += [AIMessage(said)] if said else []  # servers refuse blank messages
        messages += [HumanMessage(f"That is not a program: {complaint}. Answer with the program alone.")]
    return ChatPromptValue(messages=messages)


def _quoted(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"
