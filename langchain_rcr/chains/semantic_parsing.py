"""A chain from a question to a program: pick examples, call the model, parse its answer, retry if that fails."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import BaseLLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSerializable
from langchain_core.runnables.base import coerce_to_runnable
from pydantic import ConfigDict, Field

from langchain_rcr.chains.answers import Reading, candidates, read_answer
from langchain_rcr.chains.few_shot import (
    PICKED,
    PickedExamples,
    chat_few_shot_prompt,
    completes,
    few_shot_prompt,
    innermost,
    prompt_for,
    prompt_keys,
    with_picks,
)
from langchain_rcr.errors import InputError, ProgramError
from langchain_rcr.index.base import InThisThread
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from langchain_rcr.pool.batching import resolved
from langchain_rcr.programs import ProgramParser, get_parser
from langchain_rcr.retriever import SequentialCompositionalRetriever

_LONGEST_QUOTE = 2000
"""Characters of a bad answer that are quoted to the model: the user has paid for a rambling answer once already."""


@dataclass(frozen=True, slots=True)
class ParsedProgram:
    """The result for a question.

    Attributes:
        program: the program, as the model wrote it; None if no answer could be parsed.
        tree: the parser's result: a `Tree`, or whatever your own parser returns.
        picks: the examples in the prompt, in its order: documents of a retriever, dicts of another selector.
        answers: the model's answers, verbatim, one for each attempt, those that were taken for drafts first.
        error: why the last answer is not a program, or can't be run; None if it is one.
        result: what `execute` gave for the program: rows, for a database.
    """

    program: str | None
    tree: Any
    picks: tuple[Document | dict[str, Any], ...]
    answers: tuple[str, ...]
    error: str | None
    result: Any = None

    @property
    def ok(self) -> bool:
        """Whether there is a program."""
        return self.program is not None


def semantic_parsing_chain(
    llm: Runnable[Any, Any],
    retriever: BaseExampleSelector | Runnable[str, list[Document]],
    parser: str | ProgramParser | Callable[[str], Any],
    *,
    prompt: Prompt | BasePromptTemplate[Any] | None = None,
    execute: Callable[[str], Any] | None = None,
    retries: int = 1,
    drafts: int = 0,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
) -> SemanticParsingChain:
    """A chain that answers a question with a program that parses, or says why there is none.

    Call it with a question, `chain.invoke("how many rivers are there")`, or with all variables of the prompt,
    `chain.invoke({"source": …})`. It picks the examples once per question, not at each attempt. Bad answers raise no
    exception (see `ParsedProgram`); exceptions of the model (a lost server, say) and of the retriever propagate, for
    `with_retry` and `with_fallbacks`. `batch` and `abatch` call the retriever once for all questions, and the model
    once per attempt. Further keyword arguments of `invoke`, such as `k`, go to the retriever.

    Args:
        llm: a chat or completion model, bare or wrapped (`bind`, `with_retry`, `with_fallbacks`, a chain to a string).
        retriever: our retriever; any other example selector; or any runnable from a question to documents with the
            examples as metadata, such as our retriever after `configurable_fields` or `with_fallbacks`.
        parser: a language (see `langchain_rcr.programs.get_parser`; note that "functional" and "sexpr" accept nearly
            any words, and "tokens" any text), an object with `parse`, or a function. If it raises, or returns None or
            False, the text is not a program.
        prompt: a `Prompt`, or a LangChain prompt with a place for selected examples: `few_shot_prompt`,
            `chat_few_shot_prompt`, or one made of LangChain's classes; the picks replace those of its selector. None:
            the one that the retriever's checkpoint was trained with; without one, that of the paper's appendix D, or
            two messages an example for a chat model.
        execute: runs a program, such as `open_database("books.sqlite")`; what it gives is the answer's `result`. If it
            raises a `ProgramError`, the model is asked again with the message; any other exception propagates.
        retries: how many times to ask again, at most, after an answer that is not a program: a chat model gets the
            reason in a further message, a completion model in a note before the prompt.
        drafts: how many times to take a program that the model gave for a draft (`retriever.invoke(…, draft=…)`), pick
            examples again and ask again, where they are others. Each costs one more call; needs our retriever, with a
            family that predicts structures.
        source_key: see `few_shot_prompt`; also used with your own `prompt`.
        target_key: see `few_shot_prompt`.
        query_key: the prompt variable with the question; None: as in `few_shot_prompt`, or the only variable of
            `prompt`.

    Raises:
        InputError: an argument is of the wrong kind or out of range; the message names it.
        MissingExtraError: the language needs a package that is not installed.
    """
    if not isinstance(retriever, (BaseExampleSelector, Runnable)):
        raise InputError(f"retriever must be a retriever or an example selector, not {type(retriever).__name__}")
    for name, number in (("retries", retries), ("drafts", drafts)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InputError(f"{name} must be a whole number from 0 on, not {number!r}")
    if drafts:  # before any call is paid for
        inner = innermost(retriever)
        if not isinstance(inner, SequentialCompositionalRetriever):
            raise InputError(f"drafts need a SequentialCompositionalRetriever, not {type(inner).__name__}")
        inner.store.encoder.check_drafts()
    if not isinstance(llm, Runnable) and not callable(llm):
        raise InputError(f"llm must be a model or another runnable, not {type(llm).__name__}")
    model = coerce_to_runnable(llm)
    variables = getattr(prompt, "input_variables", [])
    if query_key is None and len(variables) == 1:
        query_key = variables[0]
    keys = prompt_keys(innermost(retriever), source_key, target_key, query_key)
    labels = APPENDIX_D.labels
    if prompt is None or isinstance(prompt, Prompt):
        picked, names = PickedExamples(), {f"{name}_key": key for name, key in keys._asdict().items()}
        own = prompt or prompt_for(llm, retriever, "appendix_d", "chat")
        as_text = completes(llm) and own.form == "text"
        written = few_shot_prompt if as_text else chat_few_shot_prompt
        prompt = written(picked, prompt=own, **names)
        labels = own.labels if own.form == "text" else labels
        if isinstance(model, BaseLLM) and not getattr(model, "stop", None):
            model = model.bind(stop=list(own.stop))
    language = parser if isinstance(parser, str) else None
    fed = with_picks(prompt)
    if fed is None:
        advice = "give one with an example_selector, as few_shot_prompt makes it"
        raise InputError(f"prompt has no place for the picks: {advice}")
    return SemanticParsingChain(
        llm=model,
        retriever=retriever,
        prompt=fed,
        parse=_parse_function(parser),
        language=language,
        execute=execute,
        retries=retries,
        drafts=drafts,
        query_key=keys.query,
        labels=labels,
    )


class SemanticParsingChain(RunnableSerializable[str | dict[str, Any], ParsedProgram]):
    """The chain; create it with `semantic_parsing_chain`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    llm: Runnable[Any, Any]
    retriever: Any
    prompt: Runnable[dict[str, Any], PromptValue]
    parse: Callable[[str], Any]
    language: str | None = None
    execute: Callable[[str], Any] | None = None
    retries: int = Field(default=1, ge=0)
    drafts: int = Field(default=0, ge=0)
    query_key: str = "source"
    labels: tuple[str, str] = APPENDIX_D.labels

    def invoke(self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> ParsedProgram:
        """Answer one question; see `semantic_parsing_chain`."""
        return self.batch([input], config, **kwargs)[0]

    async def ainvoke(
        self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> ParsedProgram:
        """`invoke`, awaited."""
        return (await self.abatch([input], config, **kwargs))[0]

    def batch(
        self,
        inputs: list[str | dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[ParsedProgram]:
        """Answer several questions; see `semantic_parsing_chain`."""
        return self._batch_with_config(
            self._batch,  # type: ignore[arg-type]
            inputs,
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    async def abatch(
        self,
        inputs: list[str | dict[str, Any]],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[ParsedProgram]:
        """`batch`, awaited."""
        return await self._abatch_with_config(
            self._abatch,  # type: ignore[arg-type]
            inputs,
            config,
            return_exceptions=return_exceptions,
            **kwargs,
        )

    def _batch(self, inputs: list[Any], config: list[RunnableConfig], **options: Any) -> list[Any]:
        return InThisThread().run(self._together(inputs, config, options, lambda runnable: runnable.batch))

    async def _abatch(self, inputs: list[Any], config: list[RunnableConfig], **options: Any) -> list[Any]:
        return await self._together(inputs, config, options, lambda runnable: runnable.abatch)

    async def _together(
        self,
        inputs: list[Any],
        configs: list[RunnableConfig],
        options: dict[str, Any],
        batch_of: Callable[[Runnable[Any, Any]], Callable[..., Any]],
    ) -> list[Any]:
        """Answer questions in step: those that wait for the same runnable go through it as one batch.

        Args:
            inputs: the questions.
            configs: one for each.
            options: for the retriever.
            batch_of: a runnable's `batch`, and then nothing here waits, or its `abatch`.

        Returns:
            For each question its `ParsedProgram`, or the exception that ended it.
        """
        picker, reader = self.retriever, RunnableLambda(self._read, name="parse_program")
        if not isinstance(picker, Runnable):
            picker = RunnableLambda(picker.select_examples, picker.aselect_examples, type(picker).__name__)
        going = [self._question(given, options, picker, reader) for given in inputs]
        results: list[Any] = [None] * len(inputs)
        waiting: dict[int, _Call] = {}

        def go_on(at: int, output: Any) -> None:
            try:
                failed = isinstance(output, Exception)
                waiting[at] = going[at].throw(output) if failed else going[at].send(output)
            except StopIteration as end:
                results[at] = end.value
            except Exception as error:
                results[at] = error

        for at in range(len(inputs)):
            go_on(at, None)
        while waiting:
            turn = min(call.turn for call in waiting.values())
            batches: dict[str, list[int]] = {}
            drafts_of: dict[Any, list[str]] = {}
            for at, call in waiting.items():
                if call.turn == turn:
                    key = f"{id(call.runnable)} {call.options!r}"
                    if call.draft is not None:
                        # A question that is asked twice has a draft each: the second goes into another batch.
                        others = drafts_of.setdefault(call.given, [])
                        others += [] if call.draft in others else [call.draft]
                        key += f" {others.index(call.draft)}"
                    batches.setdefault(key, []).append(at)
            for members in batches.values():
                calls = [waiting.pop(at) for at in members]
                drafts = {call.given: call.draft for call in calls if call.draft is not None}
                arguments = {**calls[0].options, **({"drafts": drafts} if drafts else {})}
                batch = batch_of(calls[0].runnable)
                given, where = [call.given for call in calls], [configs[at] for at in members]
                outputs = await resolved(batch(given, where, return_exceptions=True, **arguments))
                for at, output in zip(members, outputs, strict=True):
                    go_on(at, output)
        return results

    def _question(
        self, given: Any, options: dict[str, Any], picker: Runnable[Any, Any], reader: Runnable[Any, Any]
    ) -> Generator[_Call, Any, ParsedProgram]:
        """One question from beginning to end: yields what has to be called, and is sent what that returned."""
        variables = self._variables(given)
        asked_for: Any = variables
        if picker is self.retriever:
            asked_for = " ".join(variables[key] for key in self._input_keys())
        ours = innermost(self.retriever)
        # Beside what the call, `bind` and the retriever as configured say: it replaces nothing.
        if isinstance(ours, SequentialCompositionalRetriever) and ours.picks_within in variables:
            options = {**options, **ours.options_for(variables)}
        answers: tuple[str, ...] = ()
        draft: ParsedProgram | None = None
        turn = 0
        while True:
            picks = _checked((yield _Call(turn, picker, asked_for, options, draft.program if draft else None)))
            if draft is not None and _ids(picks) == _ids(draft.picks):
                return draft
            shown = [pick.metadata if isinstance(pick, Document) else pick for pick in picks]
            prompt = asked = yield _Call(turn, self.prompt, {**variables, PICKED: shown})
            for left in range(self.retries, -1, -1):
                output = yield _Call(turn, self.llm, asked)
                answer, reading, result = yield _Call(turn, reader, output)
                answers += (answer,)
                if reading.program is not None:
                    break
                if left:
                    asked = _asked_again(prompt, asked, answer, reading.complaint)
            if reading.program is None and draft is not None:
                return replace(draft, answers=answers)
            draft = ParsedProgram(reading.program, reading.tree, picks, answers, reading.complaint, result)
            if not draft.ok or turn == self.drafts:
                return draft
            turn += 1

    def _variables(self, given: Any) -> dict[str, Any]:
        """The prompt's variables in a question or a mapping.

        Raises:
            InputError: there is no question.
        """
        variables = {self.query_key: given} if isinstance(given, str) else given
        if not isinstance(variables, Mapping):
            raise InputError(
                f"the input must be a question or a mapping with {self.query_key!r}, not {type(given).__name__}"
            )
        for key in (self.query_key, *self._input_keys()):
            if not isinstance(variables.get(key), str):
                has = ", ".join(repr(name) for name in variables) or "nothing"
                raise InputError(f"the input must have a string under {key!r}: it has {has}")
        return dict(variables)

    def _input_keys(self) -> list[str]:
        """The variables that make up the retriever's query, as LangChain's selectors order them."""
        selector = innermost(self.retriever)
        own = getattr(selector, "source_keys", ())
        named = getattr(selector, "input_keys", None) or (own if self.query_key in own else [self.query_key])
        return sorted({*named})

    def _read(self, output: Any) -> tuple[str, Reading, Any]:
        """The answer, the program in it, and what running that gave."""
        answer = _text(output)
        reading = read_answer(answer, self.parse, self.language, self.labels)
        if self.execute is None:
            return answer, reading, None
        # The database may accept what the parser doesn't.
        program = reading.program or next(iter(candidates(answer, self.language, self.labels)), None)
        if program is None:
            return answer, reading, None
        try:
            return answer, Reading(program, reading.tree, None), self.execute(program)
        except ProgramError as error:
            return answer, Reading(None, None, f"it can't be run: {error}"), None


class _Call(NamedTuple):
    """What one question waits for.

    Attributes:
        turn: calls of a later turn, with another draft, wait for all calls of this one.
        runnable: what to call.
        given: its input.
        options: its keyword arguments.
        draft: a program that the question may have, for a retriever.
    """

    turn: int
    runnable: Runnable[Any, Any]
    given: Any
    options: Mapping[str, Any] = MappingProxyType({})
    draft: str | None = None


def _checked(picks: Any) -> tuple[Document | dict[str, Any], ...]:
    """A retriever's picks, if they are any."""
    if not isinstance(picks, Sequence) or not all(isinstance(pick, Document | Mapping) for pick in picks):
        raise InputError(f"the retriever must return a list of documents or examples, not {type(picks).__name__}")
    return tuple(pick if isinstance(pick, Document) else dict(pick) for pick in picks)


def _ids(picks: Sequence[Any]) -> list[str | None]:
    return [pick.id for pick in picks]


def _asked_again(prompt: PromptValue, asked: PromptValue, answer: str, complaint: str) -> PromptValue:
    """The prompt of the next attempt, after an answer that is not a program."""
    said, complaint = _quoted(answer), _quoted(complaint)
    if isinstance(prompt, StringPromptValue):
        # In front: the model continues the end of the prompt.
        note = f"The last question below was answered with this, which is not a program ({complaint}):\n{said}\n"
        return StringPromptValue(text=f"{note}Answer with a program alone.\n\n{prompt.text}")
    turn: list[BaseMessage] = [AIMessage(said)] if said else []  # servers refuse blank messages
    turn.append(HumanMessage(f"That is not a program: {complaint}. Answer with the program alone."))
    return ChatPromptValue(messages=[*asked.to_messages(), *turn])


def _quoted(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def _parse_function(parser: object) -> Callable[[str], Any]:
    if isinstance(parser, str):
        return get_parser(parser).parse
    if not isinstance(parser, type):
        if isinstance(parser, ProgramParser):
            return parser.parse
        if callable(parser):
            return parser
    raise InputError(f"parser must be a language, an object with parse(text), or a function, not {parser!r}")


def _text(output: object) -> str:
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, str):
        return output
    raise InputError(f"the model must answer with text or a message, not {type(output).__name__}")
