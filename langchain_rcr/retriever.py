"""The LangChain interface: one object that is both a retriever and an example selector."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

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
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from langchain_rcr.arguments import Order, check_fields, query_of
from langchain_rcr.constraints import DifferentPrograms, DifferentQuestions, TokenBudget, token_counter
from langchain_rcr.errors import InputError
from langchain_rcr.explaining import Explanation, Structures
from langchain_rcr.filters import Filter, parse_filter
from langchain_rcr.hub import fetched, push
from langchain_rcr.index.base import InThisThread
from langchain_rcr.policy import TriEncoder
from langchain_rcr.pool import Example, ExamplePool, pool_of
from langchain_rcr.programs.languages import unknown
from langchain_rcr.selection import Constraint, Options
from langchain_rcr.store import ExampleStore, Pick, check_query, checkpoint_folder, stored_pool
from langchain_rcr.swap import filter_of, index_of, keys_of, spec_of

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore

    from langchain_rcr.index.base import CandidateIndex


class SequentialCompositionalRetriever(BaseRetriever, BaseExampleSelector):
    """Picks few-shot examples one after the other, each conditioned on those already picked.

    A LangChain retriever and example selector in one. Create it with `from_pretrained`, `from_examples` or
    `from_encoder`. It can be pickled and deep-copied, and used from many threads while examples are added and deleted.

    Args:
        store: encoder, pool and engine; shared by the copies that `configurable_fields` makes.
        k: how many examples to pick; all of them if the pool, or what the filter lets through, has fewer.
        k_min: fewer picks than this are an error.
        input_keys: the prompt variables that make up the query: their values in the order of the sorted names,
            joined by spaces, as in LangChain's own selectors. None: the variable named like the pool's source key,
            or the only variable.
        example_keys: the fields of an example that `select_examples` returns. None: all.
        filter: which examples may be picked, by their fields: `{"db": "geo"}`, `{"year": {"$gte": 2000}}`; see
            `langchain_rcr.filters.parse_filter`.
        group: a field, such as `db_id`, of which question and examples must have the same value: a variable of
            `select_examples` and of chains, a part of the filter of `invoke`. None: as the policy was trained
            (`data.group`); "": none.
        beam_width: how many sequences of picks the beam search keeps; 1: greedy.
        order: the order of the picks in the prompt: as picked, the last pick first ("reversed"), or the most relevant
            to the question alone last, next to the question ("relevance").
        mask_same_program: never pick two examples with the same program while others are left. None: as the encoder's
            family does (`Family.masks_same_program`); `structure` does, the others don't.
        max_overlap: never pick two examples whose questions share more of their words (Jaccard, below 1) while others
            are left. None: no such rule.
        max_tokens: the limit for the texts of all picks together. An example that doesn't fit is skipped, not cut.
        tokenizer: counts the tokens: a LangChain model, a tokenizer with `encode`, or a function from text to number.
        min_probability: stop before a pick whose probability under the policy is lower.
        stop_early: stop before a pick whose logit is not above 0. Where logits are gains (the `structure` family),
            such a pick gains nothing; in other families 0 has no special meaning.
        probabilities: compute each pick's probability under the policy; costs one more pass over the pool per step.

    Raises:
        InputError: a field is out of range; the message names it.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: ExampleStore
    k: int = 4
    k_min: int = 0
    input_keys: list[str] | None = None
    example_keys: list[str] | None = None
    filter: dict[str, Any] | None = None
    group: str | None = None
    beam_width: int = 1
    order: Order = "picked"
    mask_same_program: bool | None = None
    max_overlap: float | None = None
    max_tokens: int | None = None
    tokenizer: Any = None
    min_probability: float = 0.0
    stop_early: bool = False
    probabilities: bool = True

    def __init__(self, *, store: ExampleStore, k: int = 4, **fields: Any) -> None:
        # Not in validators: pydantic would wrap the InputError in a ValidationError.
        if "vectorstore" in fields:
            raise InputError(f"{type(self).__name__}: a filled vectorstore has no vectors of ours: use from_examples")
        strange = next((name for name in fields if name not in type(self).model_fields), None)
        if strange is not None:
            raise InputError(f"{type(self).__name__}: {unknown(strange, type(self).model_fields)}")
        check_fields(k=k, **fields)
        super().__init__(store=store, k=k, **fields)

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_pretrained(
        cls,
        run_or_checkpoint: str | Path,
        *,
        examples: Sequence[Example] | None = None,
        ids: Sequence[str] | None = None,
        index: CandidateIndex | None = None,
        source_key: str = "source",
        target_key: str = "target",
        embeddings: Embeddings | None = None,
        trust: bool = False,
        **fields: Any,
    ) -> Self:
        """A retriever with a trained encoder.

        Args:
            run_or_checkpoint: a run folder of `rcr-train`, a checkpoint folder, what `save` wrote, or
                `hub:ORG/NAME[@REVISION]` for a checkpoint on the Hugging Face hub.
            examples: the pool. None: the examples in `index`, or, if it is empty, those stored in the checkpoint.
            ids: an id for each of `examples`; see `from_encoder`.
            index: the engine that holds the pool; None: one in memory.
            source_key: the key of an example's question.
            target_key: the key of its program.
            embeddings: the LangChain embeddings that the checkpoint was trained with, if any.
            trust: whether a model that the checkpoint names and doesn't contain may be fetched from the Hugging Face
                hub or opened in another folder.
            **fields: fields of the class: `k`, `input_keys`, `mask_same_program`, …

        Raises:
            CheckpointError: the folder or a file in it is missing, damaged, foreign, or of a newer version; the engine
                holds vectors of another encoder.
            PoolError, InputError: the examples, ids, keys or fields are invalid.
            EngineError: the engine can't be reached.
        """
        check_fields(**fields)
        folder = checkpoint_folder(fetched(run_or_checkpoint))
        if examples is None and ids is not None:
            raise InputError("ids were given without examples: the checkpoint's own examples have theirs")
        # The user's own examples are checked before a large model is loaded.
        pool = None if examples is None else pool_of(examples, ids, source_key, target_key)
        encoder = TriEncoder.from_pretrained(folder, embeddings=embeddings, trust=trust)
        if pool is not None:
            return cls(store=ExampleStore(encoder, pool, index), **fields)
        if index is not None:
            store = ExampleStore(encoder, ExamplePool(source_key=source_key, target_key=target_key), index)
            if store.index.count():
                return cls(store=store, **fields)
        stored = stored_pool(folder, source_key, target_key)
        return cls(store=ExampleStore(encoder, stored, index, folder=folder), **fields)

    @classmethod
    def from_examples(
        cls,
        examples: Sequence[Example],
        embeddings: Embeddings | None = None,
        vectorstore_cls: Callable[..., VectorStore] | None = None,
        k: int = 4,
        input_keys: list[str] | None = None,
        fetch_k: int | None = None,
        example_keys: list[str] | None = None,
        vectorstore_kwargs: Mapping[str, Any] | None = None,
        *,
        language: str | None = None,
        source_key: str | None = None,
        target_key: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """A retriever that fits itself to its examples, in seconds and without `rcr-train`.

        A call of `from_examples` of LangChain's `SemanticSimilarityExampleSelector` or
        `MaxMarginalRelevanceExampleSelector` is a call of this one. With fewer than 20 programs that parse it picks by
        the likeness of questions alone; see `TriEncoder.fitted`.

        Args:
            examples: mappings with a question and a program, and any other fields; the pool, and what is fitted to.
            embeddings: read the questions; None: the default model, from the extra `offline`, whose word vectors
                are read, too.
            vectorstore_cls: the class of the store that holds the pool, made by its `from_texts`, or a function that
                `VectorStoreIndex` takes; None: memory.
            k: how many examples to pick.
            input_keys: as the field of the class.
            fetch_k: MMR's; without effect, since every step searches the whole pool.
            example_keys: as the field of the class.
            vectorstore_kwargs: `{"filter": …}`, as the field `filter`.
            language: of the programs: `functional`, `sexpr`, `sql`, `sql:DIALECT`, `json`, `python`, or `tokens` for
                anything else. None: `sql` where its extra is installed, else `tokens`.
            source_key: the key of an example's question. None: the only one of `input_keys`, "source", or the first of
                two fields.
            target_key: the key of its program. None: "target", or the only other field.
            seed: of what is drawn at random.
            **options: fields of the class (`order`, `mask_same_program`, …); `ids` and `index` as in `from_encoder`;
                all others go to `vectorstore_cls`.

        Raises:
            PoolError, InputError, EngineError: as `from_encoder`; there is no such option or language.
            MissingExtraError: the language needs a package that is not installed.
        """
        fields = {name: options.pop(name) for name in list(options) if name in cls.model_fields}
        fields |= {"k": k, "input_keys": input_keys, "example_keys": example_keys}
        if (where := filter_of(vectorstore_kwargs)) is not None:
            fields["filter"] = where
        given = {name: options.pop(name, None) for name in ("ids", "index")}
        check_fields(**fields)
        if vectorstore_cls is not None:
            given["index"] = index_of(vectorstore_cls, options)
        elif options:
            raise InputError(f"from_examples: {unknown(next(iter(options)), (*cls.model_fields, 'ids', 'index'))}")
        source_key, target_key = keys_of(examples, input_keys, example_keys, source_key, target_key)
        items = ExamplePool(examples, source_key=source_key, target_key=target_key).items()
        encoder = TriEncoder.fitted(items, embeddings=embeddings, spec=spec_of(language), seed=seed)
        return cls.from_encoder(encoder, examples, source_key=source_key, target_key=target_key, **given, **fields)

    @classmethod
    async def afrom_examples(cls, examples: Sequence[Example], *arguments: Any, **options: Any) -> Self:
        """`from_examples` in a thread, since fitting would block the event loop."""
        return await asyncio.to_thread(cls.from_examples, examples, *arguments, **options)

    @classmethod
    def from_encoder(
        cls,
        encoder: TriEncoder,
        examples: Sequence[Example],
        *,
        ids: Sequence[str] | None = None,
        index: CandidateIndex | None = None,
        source_key: str = "source",
        target_key: str = "target",
        **fields: Any,
    ) -> Self:
        """A retriever over examples, from a loaded encoder.

        Args:
            encoder: the trained encoder.
            examples: mappings with the two keys, and any other fields.
            ids: one per example. None: derived from the example's content, so that a persistent engine recognises it
                next time and doesn't encode it again. An example whose id is in the engine already is left unchanged.
            index: the engine that holds the pool; None: one in memory.
            source_key: the key of an example's question.
            target_key: the key of its program.
            **fields: fields of the class: `k`, `input_keys`, `mask_same_program`, …

        Raises:
            PoolError, InputError, CheckpointError, EngineError: as `from_pretrained`.
        """
        check_fields(**fields)
        pool = pool_of(examples, ids, source_key, target_key)
        return cls(store=ExampleStore(encoder, pool, index), **fields)

    @classmethod
    async def afrom_encoder(cls, encoder: TriEncoder, examples: Sequence[Example], **options: Any) -> Self:
        """`from_encoder` in a thread, since encoding would block the event loop."""
        return await asyncio.to_thread(cls.from_encoder, encoder, examples, **options)

    def save(self, folder: str | Path) -> None:
        """Write encoder, examples and vectors atomically to a folder that `from_pretrained` reads.

        Raises:
            PoolError: an example has a field that JSON can't hold.
        """
        self.store.save(folder)

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload encoder, examples and vectors to the Hugging Face hub, as you are logged in there.

        Args:
            name: ORG/NAME; made if it isn't there.
            private: whether only its owner sees a repository that is made now. The examples are in it, in clear text.

        Returns:
            The address of the repository; `from_pretrained("hub:ORG/NAME")` reads it.

        Raises:
            InputError: the hub refuses, or can't be reached.
            PoolError: an example has a field that JSON can't hold.
        """
        with TemporaryDirectory() as folder:
            self.save(folder)
            return push(Path(folder), name, private=private)

    @property
    def source_key(self) -> str:
        """The key of an example's question."""
        return self.store.schema.source_key

    @property
    def target_key(self) -> str:
        """The key of an example's program."""
        return self.store.schema.target_key

    @property
    def picks_within(self) -> str:
        """The field of which a question and its examples have the same value; "": none."""
        return (self.store.encoder.group or "") if self.group is None else self.group

    # ------------------------------------------------------------------ the selector

    def select_examples(self, input_variables: Mapping[str, str], *, draft: str | None = None) -> list[dict[str, Any]]:
        """The examples for a prompt, as they were given; traced as a retriever run inside the prompt's run.

        Args:
            input_variables: the prompt's variables; `input_keys` says which of them are the query.
            draft: a program that the query may have; see `invoke`'s.

        Raises:
            InputError: the query, or the value of `group`, is missing; the message names the keys.
        """
        picks: list[Pick] = []
        self.invoke(self._query(input_variables), filter=self.filter_for(input_variables), picked=picks, draft=draft)
        return [self._shown(pick) for pick in picks]

    async def aselect_examples(
        self, input_variables: Mapping[str, str], *, draft: str | None = None
    ) -> list[dict[str, Any]]:
        """`select_examples`, awaited."""
        picks: list[Pick] = []
        where = self.filter_for(input_variables)
        await self.ainvoke(self._query(input_variables), filter=where, picked=picks, draft=draft)
        return [self._shown(pick) for pick in picks]

    def filter_for(self, input_variables: Mapping[str, Any]) -> dict[str, Any] | None:
        """The filter for a prompt's variables: the field `filter`, and the value that they have for `group`.

        Raises:
            InputError: they have none.
        """
        group = self.picks_within
        if not group:
            return self.filter
        if group not in input_variables:
            names = ", ".join(map(repr, input_variables))
            raise InputError(f"examples are picked within one {group!r}, but the input variables are {names}")
        return {**(self.filter or {}), group: input_variables[group]}

    def add_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """Add an example; the next query can pick it.

        Args:
            example: a mapping with the pool's two keys, and any other fields.
            id: its id; None for a random one.

        Returns:
            Its id.

        Raises:
            PoolError: a field is missing, not a string or blank; the id is taken.
        """
        return self.add_examples([example], None if id is None else [id])[0]

    async def aadd_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """`add_example`, awaited."""
        return (await self.aadd_examples([example], None if id is None else [id]))[0]

    def add_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """Add examples, all or none, encoded together. Arguments, result and errors as in `add_example`."""
        return self.store.add(examples, ids)

    async def aadd_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """`add_examples` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.add_examples, examples, ids)

    def upsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """Add examples, replacing those with the same ids; all or none. Returns the ids."""
        return self.store.add(examples, ids, replace=True)

    async def aupsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """`upsert` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.upsert, examples, ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples by their ids; unknown ids are ignored. Returns how many were deleted."""
        return self.store.delete(ids)

    async def adelete(self, ids: Sequence[str]) -> int:
        """`delete` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.delete, ids)

    # ------------------------------------------------------------------ the retriever

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        beam_width: int | None = None,
        filter: Mapping[str, Any] | None = None,
        draft: str | None = None,
        picked: list[Pick] | None = None,
    ) -> list[Document]:
        """The picks as documents.

        Args:
            query: the question.
            run_manager: LangChain's.
            k: overrides the field.
            beam_width: overrides the field.
            filter: overrides the field; `{}` for none.
            draft: a program that the question may have, such as a model's first answer: its structures count as likely
                needed. One that doesn't parse changes nothing.
            picked: a list that receives the picks. Then nobody but callbacks sees the documents: without any there are
                none, and no probabilities either.

        Returns:
            One document per pick: the example as text, its id, and as metadata its fields with `step` (from 1), `logit`
            and `probability`, which hide fields of these names (`select_examples` returns the examples unchanged).
        """
        seen = picked is None or bool(run_manager.handlers)
        picks = self._ordered(self.store.select([query], *self._options(k, beam_width, filter, seen), [draft])[0])
        if picked is not None:
            picked.extend(picks)
        return self._documents(picks) if seen else []

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        beam_width: int | None = None,
        filter: Mapping[str, Any] | None = None,
        draft: str | None = None,
        picked: list[Pick] | None = None,
    ) -> list[Document]:
        """`_get_relevant_documents`, awaited."""
        seen = picked is None or bool(run_manager.handlers)
        found = await self.store.aselect([query], *self._options(k, beam_width, filter, seen), [draft])
        picks = self._ordered(found[0])
        if picked is not None:
            picked.extend(picks)
        return self._documents(picks) if seen else []

    def batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        drafts: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """Documents for many questions: encoded in one pass, each step one search for all.

        Each question has a callback run of its own. With `return_exceptions` an invalid question gets its exception
        and the others their documents. `drafts` maps questions to drafts of their programs; it needn't name all.
        """
        batch = self._batch(inputs, config, CallbackManager, self.store.select, kwargs, drafts, return_exceptions)
        return InThisThread().run(batch)

    async def abatch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        drafts: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """`batch`, awaited."""
        select = self.store.aselect
        return await self._batch(inputs, config, AsyncCallbackManager, select, kwargs, drafts, return_exceptions)

    async def _batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None,
        manager: type[CallbackManager | AsyncCallbackManager],
        select: Callable[..., Any],
        overrides: Mapping[str, Any],
        drafts: Mapping[str, str] | None,
        return_exceptions: bool,
    ) -> list[list[Document]]:
        """`batch` with callbacks and a `select` that are both sync, and then nothing here waits, or both async."""
        traced, runs = self._get_ls_params(**overrides), []
        for query, one in zip(inputs, get_config_list(config, len(inputs)), strict=True):
            callbacks = manager.configure(
                inheritable_callbacks=one.get("callbacks"),
                inheritable_tags=one.get("tags"),
                local_tags=self.tags,
                inheritable_metadata={**(one.get("metadata") or {}), **traced},
                local_metadata=self.metadata,
            )
            name = one.get("run_name") or self.get_name()
            start = callbacks.on_retriever_start(None, query, name=name, run_id=one.get("run_id"))
            runs.append(await _result(start))
        errors = [_error_of(query) for query in inputs]
        valid = [query for query, error in zip(inputs, errors, strict=True) if error is None]
        results: list[Any]  # LangChain's type leaves out the exceptions among the lists
        try:
            given = [(drafts or {}).get(query) for query in valid]
            picks = iter(await _result(select(valid, *self._options(**overrides), given)) if valid else ())
            results = [self._documents(self._ordered(next(picks))) if error is None else error for error in errors]
        except Exception as error:
            results = [one or error for one in errors]
        for run, result in zip(runs, results, strict=True):
            failed = isinstance(result, Exception)
            await _result(run.on_retriever_error(result) if failed else run.on_retriever_end(result))
        first = next((result for result in results if isinstance(result, Exception)), None)
        if first is not None and not return_exceptions:
            raise first
        return results

    def explain(
        self,
        query: str,
        *,
        k: int | None = None,
        beam_width: int | None = None,
        filter: Mapping[str, Any] | None = None,
        draft: str | None = None,
        runner_ups: int = 3,
        structures: Structures | None = None,
    ) -> Explanation:
        """Explain the picks for a question, step by step.

        Args:
            query: the question.
            k: overrides the field.
            beam_width: overrides the field.
            filter: overrides the field; `{}` for none.
            draft: a program that the question may have.
            runner_ups: how many other candidates to show at each step.
            structures: maps a program to its local structures, to show which of them each pick adds:
                `langchain_rcr.programs.ProgramSpec("sql").structures`, or your own function. None: not shown.

        Returns:
            The explanation: data (`steps`, `to_dict()`) and a table (`print` it).

        Raises:
            InputError, PoolError, EngineError: as for `invoke`; runner_ups is not a whole number from 0 on.
        """
        check_fields(runner_ups=runner_ups)
        options, where = self._options(k, beam_width, filter)
        return self.store.explain(query, options, where, draft=draft, runner_ups=runner_ups, structures=structures)

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """Names for LangSmith traces."""
        params = super()._get_ls_params(**kwargs)
        params["ls_retriever_name"] = "sequential_compositional"
        params["ls_vector_store_provider"] = type(self.store.index).__name__
        params["ls_embedding_provider"] = f"tri_encoder_{self.store.encoder.family.name}"
        return params

    # ------------------------------------------------------------------ helpers

    def _options(
        self,
        k: int | None = None,
        beam_width: int | None = None,
        filter: Mapping[str, Any] | None = None,
        seen: bool = True,
    ) -> tuple[Options, Filter | None]:
        k = self.k if k is None else k
        beam_width = self.beam_width if beam_width is None else beam_width
        check_fields(k=k, beam_width=beam_width)
        where, group = self.filter if filter is None else filter, self.picks_within
        if group and group not in (where or {}):
            raise InputError(f"examples are picked within one {group!r}: pass filter={{{group!r}: …}}")
        constraints: list[Constraint] = []
        by_family = self.store.encoder.family.masks_same_program
        if by_family if self.mask_same_program is None else self.mask_same_program:
            constraints.append(DifferentPrograms())
        if self.max_overlap is not None:
            constraints.append(DifferentQuestions(self.source_key, self.max_overlap))
        if self.max_tokens is not None:
            constraints.append(TokenBudget(self.max_tokens, token_counter(self.tokenizer), self.store.schema.text))
        options = Options(
            k=k,
            beam_width=beam_width,
            tau=self.store.encoder.config.tau,
            probabilities=self.probabilities and seen,
            min_probability=self.min_probability,
            stop_early=self.stop_early,
            constraints=tuple(constraints),
            relevance=self.order == "relevance",
            k_min=self.k_min,
        )
        return options, parse_filter(where) if where else None

    def _query(self, input_variables: Mapping[str, Any]) -> str:
        return query_of(input_variables, self.input_keys, self.source_key)

    def _ordered(self, picks: list[Pick]) -> list[Pick]:
        if self.order == "reversed":
            return picks[::-1]
        return sorted(picks, key=lambda pick: pick.relevance or 0.0) if self.order == "relevance" else picks

    def _documents(self, picks: list[Pick]) -> list[Document]:
        return [
            Document(
                id=pick.id,
                page_content=self.store.schema.text(pick.example),
                metadata={
                    **pick.example,
                    "step": pick.step,
                    "logit": pick.logit,
                    **({} if pick.probability is None else {"probability": pick.probability}),
                },
            )
            for pick in picks
        ]

    def _shown(self, pick: Pick) -> dict[str, Any]:
        if self.example_keys is None:
            return pick.example
        lacking = next((key for key in self.example_keys if key not in pick.example), None)
        if lacking is not None:
            has = ", ".join(repr(key) for key in pick.example)
            raise InputError(f"example_keys names {lacking!r}, which the example {pick.id!r} lacks: it has {has}")
        return {key: pick.example[key] for key in self.example_keys}


def _error_of(query: object) -> InputError | None:
    """What is wrong with a question."""
    try:
        check_query(query)
    except InputError as error:
        return error
    return None


async def _result(value: Any) -> Any:
    """A value, awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value
