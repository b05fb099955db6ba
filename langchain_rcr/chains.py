"""A chain from a question to a program: pick examples, call the model, parse its answer, retry if that fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.language_models import BaseLLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
)
from langchain_core.runnables import (
    Runnable,
    RunnableConfig,
    RunnableLambda,
    RunnableSequence,
    RunnableSerializable,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.configurable import DynamicRunnable
from pydantic import ConfigDict, Field

from langchain_rcr.answers import Reading, candidates, read_answer
from langchain_rcr.errors import InputError, ProgramError
from langchain_rcr.index.base import InThisThread
from langchain_rcr.programs import ProgramParser, get_parser
from langchain_rcr.prompt import APPENDIX_D, Prompt
from langchain_rcr.prompting import chat_few_shot_prompt, few_shot_prompt, prompt_keys, prompt_of
from langchain_rcr.retriever import SequentialCompositionalRetriever

PICKED = "picked_examples"
"""The prompt variable that passes the picks from the retriever to the prompt."""

_LONGEST_QUOTE = 2000
"""Characters of a bad answer that are quoted to the model: the user has paid for a rambling answer once already."""

_Call: TypeAlias = Callable[..., Awaitable[list[Any]]]


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
    if drafts:
        _check_drafts(_innermost(retriever))
    if not isinstance(llm, Runnable) and not callable(llm):
        raise InputError(f"llm must be a model or another runnable, not {type(llm).__name__}")
    model = coerce_to_runnable(llm)
    variables = getattr(prompt, "input_variables", [])
    if query_key is None and len(variables) == 1:
        query_key = variables[0]
    keys = prompt_keys(_innermost(retriever), source_key, target_key, query_key)
    labels = APPENDIX_D.labels
    if prompt is None or isinstance(prompt, Prompt):
        picked, names = _PickedExamples(), {f"{name}_key": key for name, key in keys._asdict().items()}
        own = prompt or prompt_for(llm, retriever, "appendix_d", "chat")
        as_text = completes(llm) and own.form == "text"
        written = few_shot_prompt if as_text else chat_few_shot_prompt
        prompt = written(picked, prompt=own, **names)
        labels = own.labels if own.form == "text" else labels
        if isinstance(model, BaseLLM) and not getattr(model, "stop", None):
            model = model.bind(stop=list(own.stop))
    language = parser if isinstance(parser, str) else None
    return SemanticParsingChain(
        llm=model,
        retriever=retriever,
        prompt=_fed_with_picks(prompt),
        parse=_parse_function(parser),
        language=language,
        execute=execute,
        retries=retries,
        drafts=drafts,
        query_key=keys.query,
        labels=labels,
    )


def prompt_for(llm: Any, retriever: object, text: str, chat: str) -> Prompt:
    """The prompt that a retriever's checkpoint was trained with, else the one of the name for this kind of model."""
    return prompt_of(_innermost(retriever)) or Prompt(name=text if completes(llm) else chat)


def completes(llm: Any) -> bool:
    """Whether a model goes on with a text, unlike a chat model."""
    return isinstance(_innermost(coerce_to_runnable(llm)), BaseLLM)


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
        async def call(runnable: Runnable[Any, Any], *given: Any, **more: Any) -> list[Any]:
            return runnable.batch(*given, return_exceptions=True, **more)

        return InThisThread().run(self._steps(inputs, config, options, call))

    async def _abatch(self, inputs: list[Any], config: list[RunnableConfig], **options: Any) -> list[Any]:
        async def call(runnable: Runnable[Any, Any], *given: Any, **more: Any) -> list[Any]:
            return await runnable.abatch(*given, return_exceptions=True, **more)

        return await self._steps(inputs, config, options, call)

    async def _steps(
        self, inputs: list[Any], configs: list[RunnableConfig], options: dict[str, Any], call: _Call
    ) -> list[Any]:
        """The whole chain, sync or async: that depends on `call`, which runs a batch through a runnable."""
        tasks = [self._task(given, config) for given, config in zip(inputs, configs, strict=True)]
        await self._answer(tasks, options, call)
        for _ in range(self.drafts):
            again = [task for task in tasks if task.reopen()]
            question = self._picker()[1]
            drafts = {question(task): task.draft.program for task in again if task.draft}
            await self._answer(again, {**options, "drafts": drafts}, call)
        return [task.result for task in tasks]

    async def _answer(self, tasks: Sequence[_Task], options: Mapping[str, Any], call: _Call) -> None:
        """Pick examples and ask the model, until there is a program or no attempt left."""
        picker, question = self._picker()
        for some, where in self._by_group(tasks, options):
            for task, picks in await _stage(some, call, picker, question, {**options, **where}):
                task.take_picks(picks)
        for task, value in await _stage(tasks, call, self.prompt, _Task.prompt_input):
            task.prompt = task.asked = value
        reading = RunnableLambda(self._read, name="parse_program")
        for left in range(self.retries, -1, -1):
            for task, output in await _stage(tasks, call, self.llm, lambda task: task.asked):
                task.output = output
            for task, read in await _stage(tasks, call, reading, lambda task: task.output):
                task.take_reading(*read, last=not left)

    def _task(self, given: Any, config: RunnableConfig) -> _Task:
        variables = {self.query_key: given} if isinstance(given, str) else given
        task = _Task(config)
        if not isinstance(variables, Mapping):
            msg = f"the input must be a question or a mapping with {self.query_key!r}, not {type(given).__name__}"
            task.result = InputError(msg)
            return task
        task.variables = dict(variables)
        for key in (self.query_key, *self._input_keys()):
            if not isinstance(variables.get(key), str):
                has = ", ".join(repr(name) for name in variables) or "nothing"
                task.result = InputError(f"the input must have a string under {key!r}: it has {has}")
                break
        return task

    def _input_keys(self) -> list[str]:
        """The variables that make up the retriever's query, as LangChain's selectors order them."""
        return sorted(getattr(_innermost(self.retriever), "input_keys", None) or [self.query_key])

    def _by_group(
        self, tasks: Sequence[_Task], options: Mapping[str, Any]
    ) -> list[tuple[Sequence[_Task], dict[str, Any]]]:
        """The tasks whose examples are picked within one database, say, with the option that says so."""
        ours = _innermost(self.retriever)
        if not isinstance(ours, SequentialCompositionalRetriever) or not ours.picks_within or "filter" in options:
            return [(tasks, {})]
        parts: dict[str, tuple[list[_Task], dict[str, Any]]] = {}
        for task in tasks:
            if task.result is None:
                try:
                    where = {"filter": ours.filter_for(task.variables)}
                except InputError as error:
                    task.result = error
                else:
                    parts.setdefault(repr(where), ([], where))[0].append(task)
        return list(parts.values())

    def _picker(self) -> tuple[Runnable[Any, Any], Callable[[_Task], Any]]:
        """What picks the examples, and its input for a task."""
        retriever = self.retriever
        if isinstance(retriever, Runnable):
            keys = self._input_keys()
            return retriever, lambda task: " ".join(task.variables[key] for key in keys)
        name = type(retriever).__name__
        return RunnableLambda(retriever.select_examples, retriever.aselect_examples, name), lambda task: task.variables

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


@dataclass(slots=True)
class _Task:
    """One question in progress; finished once it has a result."""

    config: RunnableConfig
    variables: dict[str, Any] = field(default_factory=dict)
    picks: tuple[Document | dict[str, Any], ...] = ()
    prompt: PromptValue | None = None
    asked: PromptValue | None = None
    output: Any = None
    answers: tuple[str, ...] = ()
    draft: ParsedProgram | None = None
    result: ParsedProgram | Exception | None = None

    def reopen(self) -> bool:
        """Take the program that was found, if any, for a draft; whether there is one."""
        if not isinstance(self.result, ParsedProgram) or not self.result.ok:
            return False
        self.draft, self.result = self.result, None
        return True

    def take_picks(self, picks: Any) -> None:
        """Keep the retriever's picks; where a draft leads to the same ones, it is the result."""
        if not isinstance(picks, Sequence) or not all(isinstance(pick, Document | Mapping) for pick in picks):
            msg = f"the retriever must return a list of documents or examples, not {type(picks).__name__}"
            self.result = InputError(msg)
            return
        if self.draft and _ids(picks) == _ids(self.picks):
            self.result = self.draft
        self.picks = tuple(pick if isinstance(pick, Document) else dict(pick) for pick in picks)

    def prompt_input(self) -> dict[str, Any]:
        """The prompt's variables, the picks among them."""
        examples = [pick.metadata if isinstance(pick, Document) else pick for pick in self.picks]
        return {**self.variables, PICKED: examples}

    def take_reading(self, answer: str, reading: Reading, result: Any, *, last: bool) -> None:
        """Set the result if there is a program or no attempt left; otherwise write the prompt of the next attempt."""
        self.answers += (answer,)
        if reading.program is None and last and self.draft:
            self.result = replace(self.draft, answers=self.answers)
            return
        if reading.program is not None or last:
            self.result = ParsedProgram(
                reading.program, reading.tree, self.picks, self.answers, reading.complaint, result
            )
            return
        said, complaint = _quoted(answer), _quoted(str(reading.complaint))
        if isinstance(self.prompt, StringPromptValue):
            # In front: the model continues the end of the prompt.
            note = f"The last question below was answered with this, which is not a program ({complaint}):\n{said}\n"
            self.asked = StringPromptValue(text=f"{note}Answer with a program alone.\n\n{self.prompt.text}")
        elif self.asked is not None:
            turn: list[BaseMessage] = [AIMessage(said)] if said else []  # servers refuse blank messages
            turn.append(HumanMessage(f"That is not a program: {complaint}. Answer with the program alone."))
            self.asked = ChatPromptValue(messages=[*self.asked.to_messages(), *turn])


async def _stage(
    tasks: Sequence[_Task],
    call: _Call,
    runnable: Runnable[Any, Any],
    given: Callable[[_Task], Any],
    options: Mapping[str, Any] | None = None,
) -> list[tuple[_Task, Any]]:
    """Run the unfinished tasks through a runnable; a task that fails gets its exception as its result."""
    going = [task for task in tasks if task.result is None]
    if not going:
        return []
    outputs = await call(runnable, [given(task) for task in going], [task.config for task in going], **(options or {}))
    done = list(zip(going, outputs, strict=True))
    for task, output in done:
        if isinstance(output, Exception):
            task.result = output
    return [(task, output) for task, output in done if task.result is None]


def _ids(picks: Sequence[Any]) -> list[str | None]:
    return [pick.id for pick in picks]


def _check_drafts(retriever: object) -> None:
    """Refuse drafts before any call is paid for, where the retriever can't use them."""
    if not isinstance(retriever, SequentialCompositionalRetriever):
        raise InputError(f"drafts need a SequentialCompositionalRetriever, not {type(retriever).__name__}")
    retriever.store.encoder.check_drafts()


def _quoted(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


class _PickedExamples(BaseExampleSelector):
    """Passes the examples that were already picked, one of the prompt's variables, to the prompt."""

    def select_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(input_variables[PICKED])

    async def aselect_examples(self, input_variables: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.select_examples(input_variables)

    def add_example(self, example: Mapping[str, Any]) -> None:
        raise NotImplementedError("examples are added to the retriever of the chain")


def _fed_with_picks(prompt: BasePromptTemplate[Any]) -> BasePromptTemplate[Any]:
    """A copy of a prompt whose selector is `_PickedExamples`.

    Raises:
        InputError: it has no selector, and so no place for the picks.
    """
    if _selects(prompt):
        fed: BasePromptTemplate[Any] = _fed(prompt)
        return fed
    if isinstance(prompt, ChatPromptTemplate) and any(map(_selects, prompt.messages)):
        return prompt.model_copy(update={"messages": [_fed(part) for part in prompt.messages]})
    raise InputError(
        "prompt has no place for the picks: give one with an example_selector, as few_shot_prompt makes it"
    )


def _selects(part: object) -> bool:
    within = part.prompt if isinstance(part, HumanMessagePromptTemplate) else part
    kinds = FewShotPromptTemplate | FewShotChatMessagePromptTemplate
    return isinstance(within, kinds) and within.example_selector is not None


def _fed(part: Any) -> Any:
    """A part of a chat prompt, with `_PickedExamples` in the place of its selector."""
    if not _selects(part):
        return part
    if isinstance(part, HumanMessagePromptTemplate):
        return part.model_copy(update={"prompt": _fed(part.prompt)})
    return part.model_copy(update={"example_selector": _PickedExamples()})


def _parse_function(parser: object) -> Callable[[str], Any]:
    if isinstance(parser, str):
        return get_parser(parser).parse
    if not isinstance(parser, type):
        if isinstance(parser, ProgramParser):
            return parser.parse
        if callable(parser):
            return parser
    raise InputError(f"parser must be a language, an object with parse(text), or a function, not {parser!r}")


def _innermost(runnable: object) -> object:
    """The model or retriever inside its wrappings."""
    while True:
        if isinstance(runnable, RunnableBindingBase):
            runnable = runnable.bound
        elif isinstance(runnable, RunnableSequence):
            runnable = runnable.first
        elif isinstance(runnable, RunnableWithFallbacks):
            runnable = runnable.runnable
        elif isinstance(runnable, DynamicRunnable):
            runnable = runnable.default
        else:
            return runnable


def _text(output: object) -> str:
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, str):
        return output
    raise InputError(f"the model must answer with text or a message, not {type(output).__name__}")
