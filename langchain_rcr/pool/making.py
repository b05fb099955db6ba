"""How a retriever is created, from a checkpoint or as LangChain creates selectors; changed while it serves; saved."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, cast

from langchain_rcr.basics.items import home_field
from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import CheckpointError, InputError, refusing
from langchain_rcr.index.vectorstore import VectorStoreIndex
from langchain_rcr.policy.checkpoint import Runtime
from langchain_rcr.policy.hub import fetched
from langchain_rcr.policy.manifest import reread
from langchain_rcr.policy.triencoder import TriEncoder
from langchain_rcr.pool.arguments import Fields, check_fields, check_types, keys_of
from langchain_rcr.pool.examples import Example, ExamplePool, pool_of
from langchain_rcr.pool.outcomes import OutcomeLog
from langchain_rcr.pool.saved import RETRIEVER_FILE, stored_fields, stored_pool
from langchain_rcr.pool.store import ExampleStore
from langchain_rcr.programs import TOKENS, ProgramSpec
from langchain_rcr.programs.languages import SAMPLE, guess_language

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore

    from langchain_rcr.index.base import CandidateIndex

logger = logging.getLogger(__name__)

_OPTIONS = ("ids", "index", "append")
"""What `from_examples` passes to `from_encoder` unchanged."""
_NOT_SAVED = ("store", "tokenizer", "log")
"""Fields that must be given again when a saved retriever is loaded."""
_WIDEST = 1000
"""The most beams that a saved retriever may have: with more, a stranger's could exhaust memory."""


class Lifecycle:
    """The part of the retriever that creates it, changes its examples and saves it."""

    if TYPE_CHECKING:
        model_fields: ClassVar[dict[str, Any]]
        store: ExampleStore
        log: OutcomeLog | None
        auto_refit: bool

        def __init__(self, *, store: ExampleStore, **fields: Unpack[Fields]) -> None: ...

    @classmethod
    def from_pretrained(
        cls,
        run_or_checkpoint: str | Path,
        *,
        examples: Sequence[Example] | None = None,
        ids: Sequence[str] | None = None,
        index: CandidateIndex | None = None,
        source_key: str | Sequence[str] | None = None,
        target_key: str | None = None,
        embeddings: Embeddings | None = None,
        trust: bool = False,
        append: bool = False,
        **fields: Unpack[Fields],
    ) -> Self:
        """A retriever with a trained encoder.

        Args:
            run_or_checkpoint: a run folder of `rcr-train`, a checkpoint folder, what `save` wrote, or
                `hub:ORG/NAME[@REVISION]` for a checkpoint on the Hugging Face hub.
            examples: the pool. None: the examples in `index` or, if it is empty, those stored in the checkpoint.
            ids: an id for each of `examples`; see `from_encoder`.
            index: the engine that holds the pool; None: one in memory.
            source_key: the key of an example's question, or several (see `ExamplePool`). None: the saved one, else
                "source".
            target_key: the key of its program. None: the saved one, else "target".
            embeddings: the LangChain embeddings that the checkpoint was trained with, if any.
            trust: whether a model that the checkpoint names but doesn't contain may be fetched from the Hugging Face
                hub or opened in another folder.
            append: as in `from_encoder`.
            **fields: fields of the class (`k`, `input_keys`, `mask_same_program`, …), overriding those that `save`
                wrote. `tokenizer` and `log` are not saved; a saved `max_tokens` needs `tokenizer` again.

        Raises:
            CheckpointError: the folder or a file in it is missing, damaged, foreign, or of a newer version; the engine
                holds another encoder's vectors.
            PoolError, InputError: the examples, ids, keys or fields are invalid; the engine holds other examples.
            EngineError: the engine can't be reached.
        """
        check_fields(**fields, source_key=source_key, target_key=target_key)
        folder = fetched(run_or_checkpoint)
        if (folder / "checkpoint").is_dir():
            folder = fetched(folder / "checkpoint")  # which may not be readable
        if examples is None and ids is not None:
            raise InputError("ids were given without examples: the checkpoint's own examples have theirs")

        def read() -> Any:
            saved = stored_fields(folder)
            kept = cls._reopened(folder, saved["fields"], fields)
            source = source_key or saved.get("source_key", "source")
            target = target_key or saved.get("target_key", "target")
            # The user's own examples are checked before a large model is loaded.
            pool = None if examples is None else pool_of(examples, ids, source, target)
            encoder = TriEncoder.from_pretrained(folder, embeddings=embeddings, trust=trust)
            if pool is not None:
                return cls(store=ExampleStore(encoder, pool, index, append=append), **kept)
            if index is not None:
                empty = ExamplePool(source_key=source, target_key=target)
                store = ExampleStore(encoder, empty, index, append=True)
                if store.index.count():
                    return cls(store=store, **kept)
            stored = stored_pool(folder, source, target)
            return cls(store=ExampleStore(encoder, stored, index, folder=folder), **kept)

        made: Self = reread(folder, read)
        return made

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
        source_key: str | Sequence[str] | None = None,
        target_key: str | None = None,
        prefer: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """A retriever that fits itself to its examples, in seconds and without `rcr-train`.

        It accepts any call of `from_examples` of LangChain's `SemanticSimilarityExampleSelector` or
        `MaxMarginalRelevanceExampleSelector`. With fewer than 20 programs that parse, it picks by question similarity.

        Args:
            examples: mappings with a question and a program, and any other fields; they are the pool and what is fitted
                to.
            embeddings: read the questions; None: the default model, from the extra `offline`, whose word vectors are
                read too.
            vectorstore_cls: the class of the store that holds the pool, created by its `from_texts`, or a function that
                `VectorStoreIndex` takes; None: memory.
            k: how many examples to pick.
            input_keys: as the field of the class.
            fetch_k: of MMR; has no effect, since every step searches the whole pool.
            example_keys: as the field of the class.
            vectorstore_kwargs: `{"filter": …}`, as the field `filter`.
            language: of the programs: `functional`, `sexpr`, `sql`, `sql:DIALECT`, `json`, `python`, or `tokens` for
                anything else. None: `sql`, or what most programs parse as if fewer than half do as SQL; without SQL's
                extra, `tokens`.
            source_key: the key of an example's question, or several (see `ExamplePool`). None: `input_keys`, else
                "source", else of two fields the one that isn't "target" or that parses as a program less often, or the
                first.
            target_key: the key of its program. None: "target", else the only other field, else the only one of those in
                `example_keys`, else the only one with a program that parses.
            prefer: a field: examples that share the question's value in it are preferred. The question's value is a
                variable of `select_examples` and of chains, and `within` of `invoke` and `batch`; without one,
                there is no preference. None: "db_id", if examples have it and differ in it; "": none.
            seed: of the random parts.
            **options: fields of the class (`order`, `mask_same_program`, …); `ids`, `index` and `append` as in
                `from_encoder`; the rest goes to `vectorstore_cls`.

        Raises:
            PoolError, InputError, EngineError: as for `from_encoder`; or there is no such option or language.
            MissingExtraError: the language needs a package that is not installed.
        """
        fields = {name: options.pop(name) for name in list(options) if name in cls.model_fields}
        fields = {"auto_refit": True, **fields, "k": k, "input_keys": input_keys, "example_keys": example_keys}
        for name, value in (vectorstore_kwargs or {}).items():
            if name != "filter":
                raise InputError(f"vectorstore_kwargs: {unknown(name, ['filter'])}")
            fields |= {} if value is None else {name: value}
        given = {name: options.pop(name) for name in _OPTIONS if name in options}
        check_fields(**fields, source_key=source_key, target_key=target_key, prefer=prefer)
        if vectorstore_cls is not None:
            given["index"] = _index_of(vectorstore_cls, options)
        elif options:
            raise InputError(f"from_examples: {unknown(next(iter(options)), (*cls.model_fields, *_OPTIONS))}")
        spec = ProgramSpec(language or ("sql" if find_spec("sqlglot") else TOKENS))
        source_key, target_key = keys_of(examples, input_keys, example_keys, source_key, target_key, spec)
        pool = pool_of(examples, given.pop("ids", None), source_key, target_key)
        prefer = home_field("" if fields.get("group") and prefer is None else prefer, examples)
        items = pool.items(prefer)
        if language is None and spec.language != TOKENS:
            spec = _of_most(spec, [item.target for item in items])
        fields_there = dict.fromkeys(chain.from_iterable(examples))
        for argument, keys in (("example_keys", example_keys or ()), ("prefer", [prefer] if prefer else ())):
            lacking = next((key for key in keys if key not in fields_there), None)
            if items and lacking is not None:
                raise InputError(f"{argument}: {unknown(lacking, map(str, fields_there))}")
        encoder = TriEncoder.fitted(items, embeddings=embeddings, spec=spec, seed=seed)
        encoder.prefer = prefer
        return cls(store=ExampleStore(encoder, pool, **given), **fields)

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
        source_key: str | Sequence[str] = "source",
        target_key: str = "target",
        append: bool = False,
        **fields: Unpack[Fields],
    ) -> Self:
        """A retriever over examples with a loaded encoder.

        Args:
            encoder: the trained encoder.
            examples: mappings with the keys, and any other fields. They are the pool. Those that a filled engine
                already holds aren't encoded again; those that have changed are replaced.
            ids: one per example. None: derived from the example's content, so that a persistent engine recognises it
                next time. With ids, an engine recognises an example however much it has changed.
            index: the engine that holds the pool; None: one in memory.
            source_key: the key of an example's question, or several (see `ExamplePool`).
            target_key: the key of its program.
            append: keep the engine's other examples and pick from them too. Otherwise they are an error.
            **fields: fields of the class: `k`, `input_keys`, `mask_same_program`, …

        Raises:
            PoolError, InputError, CheckpointError, EngineError: as for `from_pretrained`.
        """
        check_fields(**fields, source_key=source_key, target_key=target_key)
        pool = pool_of(examples, ids, source_key, target_key)
        return cls(store=ExampleStore(encoder, pool, index, append=append), **fields)

    @classmethod
    async def afrom_encoder(cls, encoder: TriEncoder, examples: Sequence[Example], **options: Any) -> Self:
        """`from_encoder` in a thread, since encoding would block the event loop."""
        return await asyncio.to_thread(cls.from_encoder, encoder, examples, **options)

    def add_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """Add an example, and return its id; the next query can pick it.

        Args:
            example: a mapping with the pool's two keys, and any other fields.
            id: its id; None for a random one.

        Raises:
            PoolError: a field is missing, not a string or blank; the id is taken.
        """
        return self.add_examples([example], None if id is None else [id])[0]

    async def aadd_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """`add_example`, awaited."""
        return (await self.aadd_examples([example], None if id is None else [id]))[0]

    def add_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """Add examples, all or none, encoded together. Arguments, result and errors as for `add_example`."""
        return self.store.add(examples, ids, refit=self.auto_refit and self.log is None)

    async def aadd_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """`add_examples` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.add_examples, examples, ids)

    def upsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """Add examples, replacing those with the same ids; all or none. Returns the ids."""
        return self.store.add(examples, ids, replace=True, refit=self.auto_refit and self.log is None)

    async def aupsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """`upsert` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.upsert, examples, ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples by their ids; unknown ids are ignored. Returns how many were deleted."""
        return self.store.delete(ids)

    async def adelete(self, ids: Sequence[str]) -> int:
        """`delete` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.delete, ids)

    @property
    def needs_refit(self) -> bool:
        """Whether so much was added since the fit that `refit` is worth its time.

        With `auto_refit` one is then already under way; otherwise it is logged once.
        """
        return self.store.needs_refit

    def refit(self, index: CandidateIndex | None = None) -> None:
        """Fit the encoder anew to all examples, as `from_examples` does, in seconds; see `ExampleStore.refit`.

        Questions are answered as before until it is done. To update a saved folder, `save` again.

        Args:
            index: an empty engine, needed if the examples are in one outside this process, which is left as it is.

        Raises:
            InputError: that engine is missing, or the family isn't fitted to examples.
        """
        self.store.refit(index)

    async def arefit(self, index: CandidateIndex | None = None) -> None:
        """`refit` in a thread; once begun, it goes on when its caller is cancelled."""
        await asyncio.to_thread(self.refit, index)

    def save(self, folder: str | Path, *, runtime: Runtime | None = None) -> None:
        """Write encoder, examples, vectors and this retriever's fields to a folder that `from_pretrained` reads.

        Atomic. Examples that an engine keeps elsewhere, such as in a database, are not written: pass the engine to
        `from_pretrained` again (`index=`). Nor are `tokenizer` and `log` written.

        Args:
            folder: where.
            runtime: "onnx" or "onnx-int8": for serving without torch, text encoder included
                (`TriEncoder.save_pretrained`).

        Raises:
            InputError: a field, such as LangChain's `metadata`, has a value that JSON can't hold; the folder can't be
                written, or holds files that aren't a checkpoint's, which it would replace.
            PoolError: an example has a field that JSON can't hold as it is: an instance of a class, a tuple, a key that
                isn't a string. The message names it.
        """
        fields = {}
        for name, field in type(self).model_fields.items():
            if name not in _NOT_SAVED and (value := getattr(self, name)) != field.default:
                with refusing(f"the field {name!r} of the retriever can't be saved"):
                    fields[name] = json.loads(json.dumps(value, allow_nan=False, default=_listed))
        self.store.save(folder, fields, runtime=runtime)

    @classmethod
    def _reopened(cls, folder: Path, saved: Mapping[str, Any], given: Fields) -> Fields:
        """The saved fields, overridden by those given."""
        strange = next((name for name in saved if name in _NOT_SAVED or name not in cls.model_fields), None)
        if strange is not None:
            raise CheckpointError(f"{folder} was saved with the field {strange!r:.80}, which this retriever lacks")
        with refusing(f"{folder / RETRIEVER_FILE} is damaged", CheckpointError):
            check_types(**saved)
            if saved.get("beam_width", 1) > _WIDEST:
                raise InputError(f"beam_width = {saved['beam_width']} is more than {_WIDEST}")
        fields = cast("Fields", {**saved, **given})
        check_fields(**fields)
        return fields


def _of_most(spec: ProgramSpec, programs: Sequence[str]) -> ProgramSpec:
    """`spec`, or if it reads fewer than half of the programs, that of the language which reads most of them."""
    sample = programs[:: max(1, len(programs) // SAMPLE)]
    if 2 * sum(bool(spec.structures(program)) for program in sample) >= len(sample):
        return spec
    best, counts = guess_language(sample)
    if best == TOKENS:
        return spec
    logger.info("%s: read as '%s' (language= names another)", counts, best)
    return replace(spec, language=best)


def _listed(value: object) -> list[Any]:
    """A filter's set of values as JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _index_of(store: Callable[..., VectorStore], options: Mapping[str, Any]) -> VectorStoreIndex:
    """The engine over a vector store created as LangChain's selectors create it, by `from_texts`."""
    if not isinstance(store, type):
        return VectorStoreIndex(store, **options)
    kind: Any = store

    def make(embedding: Embeddings) -> VectorStore:
        # A store can't be created without a text; this one is gone before the pool is looked at.
        probe = str(uuid.uuid4())
        made: VectorStore = kind.from_texts(
            ["probe"], embedding, metadatas=[{"rcr_key": -1, "rcr_vectors": ""}], ids=[probe], **options
        )
        made.delete([probe])
        return made

    return VectorStoreIndex(make)
