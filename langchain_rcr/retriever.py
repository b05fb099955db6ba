"""The LangChain interface: one object that is both a retriever and an example selector."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForRetrieverRun,
    CallbackManager,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list, run_in_executor
from pydantic import ConfigDict

from langchain_rcr.basics.section import stated
from langchain_rcr.errors import InputError
from langchain_rcr.index.base import InThisThread, resolved
from langchain_rcr.policy.explanation import Explanation, Structures
from langchain_rcr.policy.prompt import arranged
from langchain_rcr.pool.arguments import OPEN, Fields, Order, check_fields, options_of, query_of, value_of
from langchain_rcr.pool.making import Lifecycle
from langchain_rcr.pool.outcomes import OutcomeLog
from langchain_rcr.pool.served import Pick, error_of
from langchain_rcr.pool.store import ExampleStore

logger = logging.getLogger(__name__)

_Configs = RunnableConfig | list[RunnableConfig] | None


class SequentialCompositionalRetriever(Lifecycle, BaseRetriever, BaseExampleSelector):
    """Picks few-shot examples one after the other, each conditioned on those already picked.

    A LangChain retriever and example selector in one. Create it with `from_pretrained`, `from_examples` or
    `from_encoder`. It can be pickled and deep-copied (with a `VectorStoreIndex`, where its store can), and used from
    many threads while examples are added and deleted.

    Args:
        store: encoder, pool and engine; shared by the copies that `configurable_fields` makes.
        k: how many examples to pick; fewer if the pool, or the part of it that the filter allows, is smaller. None: as
            the policy was trained (`model.k`), or 4 if that says nothing.
        k_min: fewer picks than this are an error.
        input_keys: the prompt variables that make up the query. Their values are joined by spaces in the order of the
            sorted names, as in LangChain's selectors. None: those named like the pool's source keys, or the only one.
        example_keys: the fields of an example that `select_examples` returns. None, or an empty list: all.
        filter: which examples may be picked, by their fields: `{"db": "geo"}`, `{"year": {"$gte": 2000}}`; see
            `langchain_rcr.index.filters.parse_filter`. A call's filter and the value of `group` are applied as well.
        group: a field, such as `db_id` or `tenant`, in which question and examples must have the same value: one text,
            number or bool. `select_examples` and chains take the value as a variable, `invoke` and `batch` as `within`
            (or as part of a filter). None: as the policy was trained (`data.group`); "": none.
        beam_width: how many sequences of picks beam search keeps; 1: greedy.
        order: the order of the picks in the prompt. "reversed" puts the first pick, which matters most, last, next to
            the question; "picked" keeps the order of picking. None: as the policy was trained (`model.order`).
        mask_same_program: never pick two examples with the same program while others are left.
        max_tokens: the limit for the texts of all picks together, not counting the tables that a prompt puts before
            examples of other databases. An example that doesn't fit is skipped, not cut.
        tokenizer: counts the tokens: a LangChain model, a tokenizer with `encode`, or a function from a text to its
            tokens or their number.
        stop_early: stop before a pick whose logit is not above 0. In the `structure` family logits are gains, so such a
            pick gains nothing; in other families 0 has no special meaning.
        min_relevance: pick nothing for a question whose `relevance` is lower. 0.05 refuses nearly all off-topic
            questions and hardly any on-topic ones; 0 refuses none. Refused questions are exempt from `k_min`. Needs the
            `structure` family, fitted or trained.
        probabilities: compute each pick's probability under the policy; costs one more pass over the pool per step.
        explore: draw each pick from π at temperature `explore` · τ, among the 128 best candidates. Its `probability` is
            then that of the draw, which `rcr-train learn` learns from. 0: always pick the best.
        log: where `record` writes.
        auto_refit: `refit` in the background as soon as `needs_refit`; `from_examples` turns it on. Not possible with
            an engine outside this process, nor with a `log`, which describes a single policy.

    Raises:
        InputError: a field is out of range; the message names it.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: ExampleStore
    k: int | None = None
    k_min: int = 0
    input_keys: list[str] | None = None
    example_keys: list[str] | None = None
    filter: dict[str, Any] | None = None
    group: str | None = None
    beam_width: int = 1
    order: Order | None = None
    mask_same_program: bool = False
    max_tokens: int | None = None
    tokenizer: Any = None
    stop_early: bool = False
    min_relevance: float = 0.0
    probabilities: bool = True
    explore: float = 0.0
    log: OutcomeLog | None = None
    auto_refit: bool = False

    def __init__(self, *, store: ExampleStore | None = None, **fields: Unpack[Fields]) -> None:
        if "vectorstore" in fields:
            raise InputError(f"{type(self).__name__}: a filled vectorstore has no vectors of ours: use from_examples")
        if store is None:
            raise InputError(f"{type(self).__name__}: create it with from_pretrained, from_examples or from_encoder")
        check_fields(**fields)
        if fields.get("min_relevance") and not store.encoder.family.fits:
            name = store.encoder.family.name
            logger.warning("min_relevance has no effect: the %s family can't tell what its examples are about", name)
        with stated(type(self).__name__, type(self)):
            super().__init__(store=store, **fields)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have `batch` and `ainvoke`, too, call the `_get_relevant_documents` that a subclass brings."""
        super().__init_subclass__(**kwargs)
        ours = SequentialCompositionalRetriever
        is_own = cls._get_relevant_documents is not ours._get_relevant_documents
        if is_own and cls._aget_relevant_documents is ours._aget_relevant_documents:
            cls._aget_relevant_documents = _in_thread  # type: ignore[method-assign]
        if is_own and cls.batch is ours.batch:
            cls.batch = BaseRetriever.batch  # type: ignore[method-assign]
        if cls._aget_relevant_documents is not ours._aget_relevant_documents and cls.abatch is ours.abatch:
            cls.abatch = BaseRetriever.abatch  # type: ignore[method-assign]
        cls._expects_other_args = True  # otherwise LangChain would drop a filter that the method doesn't take

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field; an `InputError` if it is out of range."""
        if name in type(self).model_fields:
            check_fields(**{**self.__dict__, name: value})
        super().__setattr__(name, value)

    @property
    def source_keys(self) -> tuple[str, ...]:
        """The keys of an example's question, sorted; usually one."""
        return self.store.schema.source_keys

    @property
    def target_key(self) -> str:
        """The key of an example's program."""
        return self.store.schema.target_key

    @property
    def picks_within(self) -> str:
        """The field in which a question and its examples must have the same value; "": none."""
        return (self.store.encoder.group or "") if self.group is None else self.group

    # ------------------------------------------------------------------ the selector

    def select_examples(self, input_variables: Mapping[str, str], *, draft: str | None = None) -> list[dict[str, Any]]:
        """The examples for a prompt, as they were given; traced as a retriever run inside the prompt's run.

        Args:
            input_variables: the prompt's variables; `input_keys` says which of them are the query.
            draft: a guess at the query's program; see `invoke`.

        Raises:
            InputError: the query, or the value of `group`, is missing; the message names the keys.
        """
        return InThisThread().run(self._select_for(input_variables, draft, is_async=False))

    async def aselect_examples(
        self, input_variables: Mapping[str, str], *, draft: str | None = None
    ) -> list[dict[str, Any]]:
        """`select_examples`, awaited."""
        return await self._select_for(input_variables, draft, is_async=True)

    async def _select_for(
        self, input_variables: Mapping[str, Any], draft: str | None, *, is_async: bool
    ) -> list[dict[str, Any]]:
        query = query_of(input_variables, self.input_keys, self.source_keys)
        (picks,) = await self._select(False, is_async, [query], None, draft, **self.options_for(input_variables))
        return [pick.shown(self.example_keys) for pick in picks]

    def options_for(self, input_variables: Mapping[str, Any]) -> dict[str, Any]:
        """The options that a prompt's variables imply: the value of `group`, or of the preferred field.

        They aren't passed as `within`: LangChain would let that override a bound one (`retriever.bind(within=…)`).

        Raises:
            InputError: the value is missing, or isn't a text, a number or a bool.
        """
        field = self.picks_within or self.store.encoder.prefer
        if not field or (not self.picks_within and input_variables.get(field) is None):
            return {}
        if field not in input_variables:
            names = ", ".join(map(repr, input_variables))
            raise InputError(f"examples are picked within one {field!r}, but the input variables are {names}")
        return {"of_variables": {field: value_of(field, input_variables[field])}}

    # ------------------------------------------------------------------ the retriever

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        """The picks as documents: what `invoke` returns.

        Args:
            query: the question.
            run_manager: LangChain's.
            **options: `k` and `beam_width` override the fields. `filter` applies on top of the field. `within` is the
                value of `group` or of the preferred field. `draft` is a guess at the question's program, such as a
                model's first answer: its structures count as likely needed, and one that doesn't parse changes nothing.
                `drafts` is that of `batch`, which configured retrievers pass on.

        Returns:
            One document per pick: the example as text, its id, and its fields as metadata. `step` (from 1), `logit` and
            `probability` are added and hide fields of these names (not in what `select_examples` returns).

        Raises:
            InputError: the question is blank, an option is unknown or out of range, or there are fewer picks than
                `k_min`.
        """
        return InThisThread().run(self._documents_for(query, False, **options))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        """`_get_relevant_documents`, awaited."""
        return await self._documents_for(query, True, **options)

    async def _documents_for(
        self, query: str, is_async: bool, /, draft: str | None = None, **options: Any
    ) -> list[Document]:
        (picks,) = await self._picked([query], True, is_async, draft, **options)
        if isinstance(picks, InputError):
            raise picks
        documents: list[Document] = self._documents([picks])[0]
        return documents

    def batch(
        self,
        inputs: list[str],
        config: _Configs = None,
        *,
        return_exceptions: bool = False,
        drafts: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """Documents for many questions, encoded in one pass and searched for together at each step.

        Each question has its own callback run. With `return_exceptions`, an invalid question yields its exception and
        the others their documents. `drafts` maps questions to drafts of their programs; it needn't name all.
        """
        options = {"return_exceptions": return_exceptions, "drafts": drafts, **kwargs}
        return InThisThread().run(self._select(True, False, inputs, config, **options))

    async def abatch(
        self,
        inputs: list[str],
        config: _Configs = None,
        *,
        return_exceptions: bool = False,
        drafts: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """`batch`, awaited."""
        options = {"return_exceptions": return_exceptions, "drafts": drafts, **kwargs}
        return await self._select(True, True, inputs, config, **options)

    async def _select(
        self,
        as_documents: bool,
        is_async: bool,
        queries: Sequence[str],
        config: _Configs = None,
        draft: str | None = None,
        /,
        *,
        return_exceptions: bool = False,
        **options: Any,
    ) -> list[list[Any]]:
        """For each question its picks, plain or `as_documents`, or its exception; nothing awaits unless `is_async`.

        Each has its own callback run, and neither an invalid one nor a handler that raises stops the others. Documents
        and probabilities are left out unless the caller or a callback sees them.
        """
        runs = await self._opened(queries, config, is_async, options)
        seen = as_documents or any(runs)
        try:
            picked = shown = await self._picked(queries, seen, is_async, draft, **options)
            if seen:
                shown = self._documents(picked)
        except Exception as error:
            picked = shown = [error_of(query) or error for query in queries]
        results: list[Any] = []
        for run, picks, documents in zip(runs, picked, shown, strict=True):
            failure = run
            if run is not None and not isinstance(run, Exception):
                ended = run.on_retriever_error if isinstance(documents, Exception) else run.on_retriever_end
                failure = await _settled(ended, documents)
            results.append(failure if isinstance(failure, Exception) else documents if as_documents else picks)
        if not return_exceptions and (failed := [each for each in results if isinstance(each, Exception)]):
            raise failed[0]
        return results

    async def _picked(
        self,
        queries: Sequence[str],
        seen: bool,
        is_async: bool,
        draft: str | None,
        /,
        drafts: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> list[Any]:
        """For each question its picks in the order of the prompt, or why it has none (an `InputError`)."""
        if drafts is not None and not isinstance(drafts, Mapping):
            raise InputError(f"drafts must map questions to drafts of their programs, not {type(drafts).__name__}")
        errors = [error_of(query) for query in queries]
        valid = [query for query, error in zip(queries, errors, strict=True) if error is None]
        asked = [(query, drafts.get(query) if drafts and draft is None else draft) for query in valid]
        now, order = self.store.current(), self.order or self.store.encoder.config.order
        found = now.select(asked, options_of(self, seen, **overrides), is_async=is_async) if asked else ()
        each = iter(await resolved(found))
        results = [error or next(each) for error in errors]
        return [one if isinstance(one, InputError) else arranged(one, order) for one in results]

    async def _opened(
        self, queries: Sequence[str], config: _Configs, is_async: bool, options: Mapping[str, Any]
    ) -> list[Any]:
        """For each question its callback run, a handler's exception, or None if nothing listens."""
        manager: Any = AsyncCallbackManager if is_async else CallbackManager
        callbacks: Any = None
        runs = []
        configs = [ensure_config()] * len(queries) if config is None else get_config_list(config, len(queries))
        for query, one in zip(queries, configs, strict=True):
            if callbacks is None or isinstance(config, Sequence):  # otherwise all share one
                callbacks = manager.configure(
                    inheritable_callbacks=one.get("callbacks"), inheritable_tags=one.get("tags"), local_tags=self.tags
                )
                if callbacks.handlers:
                    about = self._get_ls_params(**options)
                    callbacks.add_metadata({**(one.get("metadata") or {}), **about})
                    callbacks.add_metadata(self.metadata or {}, inherit=False)
            run = None
            if callbacks.handlers:
                name = one.get("run_name") or self.get_name()
                run = await _settled(callbacks.on_retriever_start, None, query, name=name, run_id=one.get("run_id"))
            runs.append(run)
        return runs

    def explain(
        self,
        query: str,
        *,
        k: int | None = None,
        beam_width: int | None = None,
        filter: Mapping[str, Any] | None = None,
        within: str | float | bool = OPEN,
        draft: str | None = None,
        runner_ups: int = 3,
        structures: Structures | None = None,
    ) -> Explanation:
        """Explain the picks for a question, step by step.

        Args:
            query: the question.
            k: overrides the field.
            beam_width: overrides the field.
            filter: applies on top of the field.
            within: the value of `group`.
            draft: a guess at the question's program.
            runner_ups: how many other candidates to show at each step.
            structures: maps a program to its local structures, to show which of them each pick adds:
                `langchain_rcr.programs.ProgramSpec("sql").structures`, or your own function. None: not shown.

        Returns:
            The explanation: data (`steps`, `to_dict()`) and a table (`print` it).

        Raises:
            InputError, PoolError, EngineError: as for `invoke`; runner_ups is not a whole number, 0 or more.
        """
        check_fields(runner_ups=runner_ups)
        options = options_of(self, True, k, beam_width, filter, within)
        return self.store.now.explain((query, draft), options, runner_ups=runner_ups, structures=structures)

    def record(
        self, question: str, picks: Sequence[Document], outcome: float | None, *, run: str | None = None
    ) -> None:
        """Write to `log` what a question got and what came of it.

        Args:
            question: as it was asked.
            picks: the documents that `invoke` or `batch` gave for it; chains have `OutcomeRecorder`.
            outcome: how good the answer was, such as 1 for a right one and 0 for a wrong one; None: not known yet.
            run: an id, such as LangSmith's, under which `OutcomeLog.outcome` can add the outcome later.

        Raises:
            InputError: there is no log; the outcome is not a finite number; a document is not a pick.
        """
        if self.log is None:
            raise InputError('record writes to the retriever\'s log, and it has none: log=OutcomeLog("outcomes.jsonl")')
        if strange := [each for each in picks if not isinstance(each, Document)]:
            raise InputError(f"record takes the documents of invoke or batch, not {type(strange[0]).__name__}")
        chance = "probability" if self.probabilities or self.explore else None  # else that is a field of the example
        drawn = [(each.id, each.metadata.get("step"), each.metadata.get(chance)) for each in picks]
        self.log.record(question, drawn, outcome, run=run, policy=self.store.fingerprint, explore=self.explore)

    def relevance(self, query: str) -> float:
        """How near a question is to the examples, from 0 to 1, compared with how near training questions are.

        Each training question is held out together with those most like it. The result is the share of them that are
        less similar to their nearest remaining question than this question is to its nearest. Always 1 with families
        other than `structure`.

        Raises:
            InputError: the question is not a string, blank or not valid Unicode.
        """
        if error := error_of(query):
            raise error
        return float(self.store.encoder.judge_queries([query], judge=True)[1][0])

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """Names for LangSmith traces."""
        params = super()._get_ls_params(**kwargs)
        params["ls_retriever_name"] = "sequential_compositional"
        params["ls_vector_store_provider"] = type(self.store.index).__name__
        params["ls_embedding_provider"] = f"tri_encoder_{self.store.encoder.family.name}"
        # `OutcomeRecorder` recognises its own runs by the model; `explore` may be configured by the call.
        params["ls_embedding_model"] = self.store.fingerprint
        return {**params, "explore": self.explore}  # type: ignore[typeddict-unknown-key]

    def _documents(self, picked: Sequence[list[Pick] | InputError]) -> list[Any]:
        """For each question its picks as documents, or its exception."""
        examples = [pick.example for picks in picked if isinstance(picks, list) for pick in picks]
        texts = iter(self.store.schema.texts(examples))
        return [[_document(pick, next(texts)) for pick in one] if isinstance(one, list) else one for one in picked]


def _document(pick: Pick, text: str) -> Document:
    metadata = {**pick.example, "step": pick.step, "logit": pick.logit}
    if pick.probability is not None:
        metadata["probability"] = pick.probability
    return Document(text, id=pick.id, metadata=metadata)


async def _settled(call: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """What a method of a callback manager returns, or the exception of a handler that raises (`raise_error`)."""
    try:
        return await resolved(call(*given, **more))
    except Exception as error:
        return error


async def _in_thread(self: BaseRetriever, query: str, *, run_manager: Any = None, **options: Any) -> list[Document]:
    """`_aget_relevant_documents` of a subclass with only a synchronous method of its own."""
    given = options if run_manager is None else {"run_manager": run_manager.get_sync(), **options}
    return await run_in_executor(None, self._get_relevant_documents, query, **given)
