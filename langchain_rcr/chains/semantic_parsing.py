"""A chain from a question to a program: pick examples, call the model, parse its answer, retry if that fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import iscoroutinefunction
from itertools import count
from typing import Any, TypeGuard

from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import BaseLanguageModel, BaseLLM
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableSequence,
    RunnableSerializable,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict, Field

from langchain_rcr.basics.section import check_limits, stated
from langchain_rcr.chains.answers import read_answer
from langchain_rcr.chains.few_shot import (
    PICKED,
    asked_again,
    completes,
    innermost,
    of_variables,
    prompt_for,
    prompt_keys,
    with_picks,
)
from langchain_rcr.databases.database import Database
from langchain_rcr.databases.many import Databases
from langchain_rcr.errors import InputError, ProgramError
from langchain_rcr.index.base import InThisThread, resolved
from langchain_rcr.policy.prompt import APPENDIX_D, Prompt
from langchain_rcr.programs import ProgramParser, get_parser
from langchain_rcr.retriever import SequentialCompositionalRetriever

NO_EXAMPLES = "no example is relevant to the question"
"""The error for a question that the model wasn't asked."""
_Input = str | dict[str, Any]
"""A question, or all variables of the prompt."""
_Configs = RunnableConfig | list[RunnableConfig] | None


@dataclass(frozen=True, slots=True)
class ParsedProgram:
    """The result for a question.

    Attributes:
        program: the program, as the model wrote it; None if no answer could be parsed.
        tree: the parser's result: a `Tree`, or whatever your own parser returns.
        picks: the examples in the prompt, in its order: documents of a retriever, dicts of another selector.
        answers: the model's answers, verbatim, one per attempt, those used as drafts first.
        error: why the last answer is not a program, or can't be run; None if it is one.
        result: what `execute` returned for the program, such as a database's rows.
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
    execute: Databases | Callable[[str], Any] | None = None,
    retries: int = 1,
    drafts: int = 0,
    needs_examples: bool = False,
    schema_of: Callable[[Mapping[str, Any]], str] | None = None,
    source_key: str | None = None,
    target_key: str | None = None,
    query_key: str | None = None,
) -> SemanticParsingChain:
    """A chain that answers a question with a program that parses, or says why there is none.

    Call it with a question, `chain.invoke("how many rivers are there")`, or with all variables of the prompt,
    `chain.invoke({"source": …})`. It picks the examples once per question, not at each attempt. Bad answers raise no
    exception (see `ParsedProgram`). Exceptions of the model, such as a lost server, and of the retriever propagate, for
    `with_retry` and `with_fallbacks`. `batch` and `abatch` call the retriever once for all questions, and the model
    once per attempt. Other keyword arguments of `invoke`, such as `k`, go to the retriever.

    Args:
        llm: a chat or completion model, bare or wrapped (`bind`, `with_retry`, `with_fallbacks`, a chain to a string).
        retriever: our retriever; any other example selector; or any runnable from a question to documents with the
            examples as metadata, such as our retriever after `configurable_fields` or `with_fallbacks`.
        parser: a language (see `langchain_rcr.programs.get_parser`; note that "functional" and "sexpr" accept nearly
            any words, and "tokens" any text), an object with `parse`, or a function. If it raises, or returns None or
            False, the text is not a program.
        prompt: a `Prompt`, or a LangChain prompt with a place for selected examples, whose selector the picks replace.
            None: the one that the retriever's checkpoint was trained with, or else the one in the paper's appendix D
            or, for a chat model, two messages per example.
        execute: runs a program, such as `open_database("books.sqlite")`; what it returns is the answer's `result`. If
            it raises a `ProgramError`, the model is asked again with the message; any other exception propagates.
        retries: how many times at most to ask again after an answer that is not a program. A chat model gets the reason
            in another message, a completion model in a note before the prompt.
        drafts: how many times to use the model's program as a draft (`retriever.invoke(…, draft=…)`), pick again, and
            ask again if the picks changed. Needs our retriever, with a family that predicts structures.
        needs_examples: whether to give up on a question for which nothing is picked (see the retriever's
            `min_relevance`), without asking the model. Otherwise the model is asked without examples.
        schema_of: gives a `Prompt`'s {schema}, from a question's variables; None: its `db_schema`. A variable `schema`
            takes precedence. A schema longer than `schema_budget` is shortened.
        source_key: see `few_shot_prompt`; also used with your own `prompt`.
        target_key: see `few_shot_prompt`.
        query_key: the prompt variable with the question; None: as in `few_shot_prompt`, or the only variable of
            `prompt`.

    Raises:
        InputError: an argument is of the wrong kind or out of range; the message names it.
        MissingExtraError: the language needs a package that is not installed.
    """
    _check(llm, retriever, execute, retries, drafts)
    model = coerce_to_runnable(llm)
    variables = getattr(prompt, "input_variables", [])
    if query_key is None and len(variables) == 1:
        query_key = variables[0]
    keys = prompt_keys(innermost(retriever), source_key, target_key, query_key)
    hidden = {"step", "logit", "probability"}.intersection(keys[:2])
    if hidden and isinstance(innermost(retriever), SequentialCompositionalRetriever):
        name = hidden.pop()
        raise InputError(f"a chain can't show the field {name!r} of an example, which the pick's own hides: rename it")
    labels = APPENDIX_D.labels
    if prompt is None or isinstance(prompt, Prompt):
        own = prompt or prompt_for(llm, retriever, "appendix_d", "chat")
        as_text = completes(llm) and own.form == "text"
        fed = of_variables(own, keys, schema_of, as_text=as_text)
        labels = own.labels if own.form == "text" else labels
        if _runs_on(model):
            model = model.bind(stop=list(own.stop))
    elif (fed := with_picks(prompt)) is None:
        advice = "give one with an example_selector, as few_shot_prompt makes it"
        raise InputError(f"prompt has no place for the picks: {advice}")
    return SemanticParsingChain(
        llm=model,
        retriever=retriever,
        prompt=fed,
        parse=_parse_function(parser),
        language=parser if isinstance(parser, str) else None,
        execute=execute,
        retries=retries,
        drafts=drafts,
        needs_examples=needs_examples,
        query_key=keys.query,
        labels=labels,
    )


def _runs_on(model: object) -> bool:
    """Whether this is a completion model, bare or wrapped, that nothing tells where to stop."""
    if isinstance(model, RunnableWithFallbacks):
        return all(map(_runs_on, model.runnables))
    if isinstance(model, RunnableBindingBase):
        return "stop" not in model.kwargs and _runs_on(model.bound)
    if isinstance(model, RunnableSequence):
        return _runs_on(model.first)
    return isinstance(model, BaseLLM) and not getattr(model, "stop", None)


def _check(llm: object, retriever: object, execute: object, retries: int, drafts: int) -> None:
    if isinstance(llm, BaseRetriever | BaseExampleSelector) or isinstance(retriever, BaseLanguageModel):
        given = f"{type(llm).__name__}, {type(retriever).__name__}"
        raise InputError(f"the model comes first, then the retriever: not {given}")
    if not isinstance(retriever, (BaseExampleSelector, Runnable)):
        raise InputError(f"retriever must be a retriever or an example selector, not {type(retriever).__name__}")
    check_limits(least=0, retries=retries, drafts=drafts)
    if drafts:  # fail before any call is paid for
        inner = innermost(retriever)
        if not isinstance(inner, SequentialCompositionalRetriever):
            raise InputError(f"drafts need a SequentialCompositionalRetriever, not {type(inner).__name__}")
        inner.store.encoder.check_drafts()
    if not isinstance(llm, Runnable) and (not callable(llm) or isinstance(llm, type)):
        raise InputError(f"llm must be a model or another runnable, not {llm!r:.80}")
    if execute is not None and not _is_function(execute):
        raise InputError(f"execute must be a function that runs a program and isn't async, not {execute!r:.80}")


class SemanticParsingChain(RunnableSerializable[_Input, ParsedProgram]):
    """The chain; create it with `semantic_parsing_chain`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    llm: Runnable[Any, Any]
    retriever: Any
    prompt: Runnable[dict[str, Any], PromptValue]
    parse: Callable[[str], Any]
    language: str | None = None
    execute: Databases | Callable[[str], Any] | None = None
    retries: int = Field(default=1, ge=0)
    drafts: int = Field(default=0, ge=0)
    needs_examples: bool = False
    query_key: str = "source"
    labels: tuple[str, str] = APPENDIX_D.labels

    def __init__(self, **fields: Any) -> None:
        with stated(type(self).__name__, type(self)):
            super().__init__(**fields)

    def invoke(self, input: _Input, config: RunnableConfig | None = None, **kwargs: Any) -> ParsedProgram:
        """Answer one question; see `semantic_parsing_chain`."""
        return self.batch([input], config, **kwargs)[0]

    async def ainvoke(self, input: _Input, config: RunnableConfig | None = None, **kwargs: Any) -> ParsedProgram:
        """`invoke`, awaited."""
        return (await self.abatch([input], config, **kwargs))[0]

    def batch(self, inputs: Sequence[_Input], config: _Configs = None, **kwargs: Any) -> list[ParsedProgram]:
        """Answer several questions; see `semantic_parsing_chain`."""
        return self._batch_with_config(self._batch, [*inputs], config, **kwargs)  # type: ignore[arg-type]

    async def abatch(self, inputs: Sequence[_Input], config: _Configs = None, **kwargs: Any) -> list[ParsedProgram]:
        """`batch`, awaited."""
        return await self._abatch_with_config(partial(self._together, True), [*inputs], config, **kwargs)

    def _batch(self, inputs: list[Any], config: list[RunnableConfig], **options: Any) -> list[Any]:
        return InThisThread().run(self._together(False, inputs, config, **options))

    async def _together(
        self, is_async: bool, inputs: list[Any], config: list[RunnableConfig], **options: Any
    ) -> list[Any]:
        """For each question its `ParsedProgram`, or the exception that ended it; nothing waits unless `is_async`.

        Questions are answered in step: each runnable is called once for all that need it.
        """

        async def call(runnable: Runnable[Any, Any], pairs: _Pairs, **more: Any) -> _Pairs:
            """Call a runnable for questions, each with an input. A failure ends its question."""
            if not pairs:
                return []
            where = [question.config for question, _ in pairs]
            batch: Any = runnable.abatch if is_async else runnable.batch
            outputs = batch([given for _, given in pairs], where, return_exceptions=True, **more)
            done = [(question, output) for (question, _), output in zip(pairs, await resolved(outputs), strict=True)]
            for question, output in done:
                question.error = output if isinstance(output, Exception) else None
            return [(question, output) for question, output in done if question.error is None]

        questions = [self._question(*each) for each in zip(inputs, config, strict=True)]
        going = [question for question in questions if question.error is None]
        for _ in range(self.drafts + 1):
            going = await self._answered(await self._pick(going, call, options), call)
        return [question.error or question.parsed for question in questions]

    async def _answered(self, questions: list[_Question], call: _Call) -> list[_Question]:
        """Ask the model with the picks, again if an answer isn't a program; returns the questions that have one now."""
        shown = [[pick.metadata if isinstance(pick, Document) else pick for pick in each.picks] for each in questions]
        given = [(each, {**each.variables, PICKED: picks}) for each, picks in zip(questions, shown, strict=True)]
        asked = await call(self.prompt, given)
        for question, prompt in asked:
            question.prompt, question.failures = prompt, []
        reader = RunnableLambda(self._read, self._aread, name="parse_program")
        done = []
        for left in range(self.retries, -1, -1):
            again = []
            said = [(question, (output, question.variables)) for question, output in await call(self.llm, asked)]
            for question, found in await call(reader, said):
                question.answers += found.answers
                if not found.ok and left:
                    question.failures += [(*found.answers, found.error)]
                    again.append((question, asked_again(question.prompt, question.failures)))
                elif not found.ok and question.parsed is not None:  # the draft remains
                    question.parsed = replace(question.parsed, answers=question.answers)
                else:
                    question.parsed = replace(found, picks=question.picks, answers=question.answers)
                    done += [question] if found.ok else []
            asked = again
        return done

    def _question(self, given: Any, config: RunnableConfig) -> _Question:
        """A question, or what is wrong with it."""
        question = _Question(config)
        try:
            question.variables = question.query = self._variables(given)
            if isinstance(self.execute, Databases):
                self.execute.path(question.variables)  # fail before a call is paid for
            if isinstance(self.retriever, Runnable):
                question.query = " ".join(question.variables[key] for key in self._input_keys())
            ours = innermost(self.retriever)
            # These add to the options of the call, `bind` and the configured retriever, and replace none of them.
            if isinstance(ours, SequentialCompositionalRetriever):
                group = ours.picks_within
                if not group or group in question.variables:
                    question.options = ours.options_for(question.variables)
        except InputError as error:
            question.error = error
        return question

    async def _pick(self, questions: list[_Question], call: _Call, options: Mapping[str, Any]) -> list[_Question]:
        """Pick examples; returns the questions whose picks have changed."""
        picker = self.retriever
        if not isinstance(picker, Runnable):
            picker = RunnableLambda(picker.select_examples, picker.aselect_examples, type(picker).__name__)
        batches: dict[str, list[_Question]] = {}
        turns = defaultdict[str, Iterator[int]](count)
        for question in questions:
            # The same question twice has two drafts, so needs two batches.
            turn = 0 if question.parsed is None else next(turns[question.query])
            batches.setdefault(f"{question.options} {turn}", []).append(question)
        going = []
        for batch in batches.values():
            drafts = {question.query: question.parsed.program for question in batch if question.parsed is not None}
            told = _told(picker, {**batch[0].options, **({"drafts": drafts} if drafts else {})})
            for question, picks in await call(told, [(question, question.query) for question in batch], **options):
                if not isinstance(picks, Sequence) or not all(isinstance(pick, Document | Mapping) for pick in picks):
                    what = f"a list of documents or examples, not {type(picks).__name__}"
                    question.error = InputError(f"the retriever must return {what}")
                    continue
                question.picks = tuple(pick if isinstance(pick, Document) else dict(pick) for pick in picks)
                if self.needs_examples and not question.picks:
                    question.parsed = question.parsed or ParsedProgram(None, None, (), (), NO_EXAMPLES)
                elif question.parsed is None or _ids(question.picks) != _ids(question.parsed.picks):
                    going.append(question)
        return going

    def _variables(self, given: Any) -> dict[str, Any]:
        """The prompt's variables in a question or a mapping."""
        variables = {self.query_key: given} if isinstance(given, str) else given
        if not isinstance(variables, Mapping):
            raise InputError(
                f"the input must be a question or a mapping with {self.query_key!r}, not {type(given).__name__}"
            )
        for key in (self.query_key, *self._input_keys()):
            if not isinstance(variables.get(key), str):
                has = ", ".join(repr(name) for name in variables) or "nothing"
                said = f", not {type(variables[key]).__name__}" if key in variables else f": it has {has}"
                raise InputError(f"the input must have a string under {key!r}{said}")
        return dict(variables)

    def _input_keys(self) -> list[str]:
        """The variables that make up the retriever's query, as LangChain's selectors order them."""
        selector = innermost(self.retriever)
        own = getattr(selector, "source_keys", ())
        named = getattr(selector, "input_keys", None) or (own if self.query_key in own else [self.query_key])
        return sorted({*named})

    def _read(self, given: tuple[Any, Mapping[str, Any]]) -> ParsedProgram:
        """The program in an answer, and the result of running it, from the model's output and the variables."""
        answer, variables = _text(given[0]), given[1]
        reading = read_answer(answer, self.parse, self.language, self.labels)
        program = reading.program or reading.likeliest  # the database may accept what the parser doesn't
        if self.execute is None or program is None:
            return ParsedProgram(reading.program, reading.tree, (), (answer,), reading.complaint)
        try:
            result = self.execute(program, variables) if isinstance(self.execute, Databases) else self.execute(program)
            return ParsedProgram(program, reading.tree, (), (answer,), None, result)
        except ProgramError as error:
            return ParsedProgram(None, None, (), (answer,), f"it can't be run: {error}")

    async def _aread(self, given: tuple[Any, Mapping[str, Any]]) -> ParsedProgram:
        threads = self.execute.threads if isinstance(self.execute, Database | Databases) else None
        return await run_in_executor(threads, copy_context().run, self._read, given)


@dataclass(slots=True)
class _Question:
    """A question on its way through the chain."""

    config: RunnableConfig
    variables: dict[str, Any] = field(default_factory=dict)
    query: Any = None  # for the retriever: a text, or the variables if it is a plain selector
    options: dict[str, Any] = field(default_factory=dict)  # for the retriever, besides those of the call
    picks: tuple[Document | dict[str, Any], ...] = ()
    prompt: Any = None
    failures: list[tuple[str, str]] = field(default_factory=list)  # answers that aren't programs, and why
    answers: tuple[str, ...] = ()
    parsed: ParsedProgram | None = None  # the result, which the next turn uses as a draft
    error: Exception | None = None  # what ended it


_Pairs = list[tuple[_Question, Any]]
"""Questions, each with an input or an output of a runnable."""
_Call = Callable[..., Awaitable[_Pairs]]
"""Calls a runnable for questions, each with an input."""


def _told(picker: Any, options: Mapping[str, Any]) -> Any:
    """The retriever with the options that a chain adds, also in fallbacks; only our retrievers get them."""
    if isinstance(picker, RunnableWithFallbacks):
        fallbacks = [_told(each, options) for each in picker.fallbacks]
        return picker.model_copy(update={"runnable": _told(picker.runnable, options), "fallbacks": fallbacks})
    ours = options and isinstance(innermost(picker), SequentialCompositionalRetriever)
    return picker.bind(**options) if ours else picker


def _ids(picks: Sequence[Any]) -> list[str | None]:
    return [pick.id for pick in picks]


def _parse_function(parser: object) -> Callable[[str], Any]:
    if isinstance(parser, str):
        return get_parser(parser).parse
    if isinstance(parser, ProgramParser) and not isinstance(parser, type):
        return parser.parse
    if _is_function(parser):
        return parser
    raise InputError(f"parser must be a language, an object with parse(text), or a function, not {parser!r}")


def _is_function(value: object) -> TypeGuard[Callable[[str], Any]]:
    """Whether this is a callable that isn't async."""
    return callable(value) and not isinstance(value, type) and not iscoroutinefunction(value)


def _text(output: object) -> str:
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, str):
        return output
    raise InputError(f"the model must answer with text or a message, not {type(output).__name__}")
