"""The LangChain face: one object that is a retriever and an example selector."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from pydantic import ConfigDict

from langchain_rcr.errors import CheckpointError, InputError, PoolError
from langchain_rcr.index.memory import MemoryIndex
from langchain_rcr.pool import Example, ExamplePool, check_text, read_jsonl
from langchain_rcr.selection import greedy
from langchain_rcr.tri_encoder import TriEncoder

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from langchain_rcr.index.base import CandidateIndex

CHECKPOINT_FOLDER = "checkpoint"
"""Where a run folder keeps its checkpoint."""

POOL_FILE = "pool.jsonl"
"""The examples that a checkpoint was trained with."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One pick for one query.

    Args:
        id: the example's id.
        text: the example as a prompt shows it.
        example: its fields, a copy.
        step: 1 for the first pick, up to k.
        logit: of the pick in the state that it was picked in (Eq. 4).
    """

    id: str
    text: str
    example: dict[str, Any]
    step: int
    logit: float


@dataclass(frozen=True, slots=True)
class _Content:
    pool: ExamplePool
    index: CandidateIndex


class ExampleStore:
    """A trained encoder, a pool and the pool's vectors: what several retrievers share.

    Safe to read and extend from many threads: a change replaces pool and vectors together, as one value, so that a
    query sees the pool as it was before or after it.

    Args:
        encoder: the trained encoder; put in inference mode.
        pool: the examples; all are encoded here, once.
    """

    def __init__(self, encoder: TriEncoder, pool: ExamplePool) -> None:
        self.encoder = encoder.eval()
        self._content = _Content(pool, MemoryIndex(encoder.encode_pool(pool.items())))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ExampleStore({self.pool!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def pool(self) -> ExamplePool:
        """The examples as they are now."""
        return self._content.pool

    def add(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """Encode new examples (only these) and append them; the next query can pick them.

        Returns:
            Their ids.

        Raises:
            PoolError, InputError: as `ExamplePool`; then nothing was added.
        """
        vectors = self.encoder.encode_pool(self.pool.items(examples))
        with self._lock:
            pool = self._content.pool.extended(examples, ids)
            # Searches that are under way keep the index they started with: `add` changes the copy only.
            index = copy.copy(self._content.index)
            index.add(vectors)
            self._content = _Content(pool, index)
        return list(pool.ids[len(pool) - len(vectors.candidate) :])

    def select(self, query: str, k: int, *, mask_same_program: bool = False) -> list[Pick]:
        """Pick k examples for a query, each in the light of those before it (greedy, section 3.2).

        Raises:
            InputError: the query is not a string, blank or not valid Unicode; k is not a whole number from 1 to the
                pool's size.
            PoolError: the pool is empty.
        """
        _check_query(query)
        check_k(k)
        content = self._content
        pool = content.pool
        if not pool:
            msg = "the pool is empty: add examples before asking for some"
            raise PoolError(msg)
        if k > len(pool):
            msg = f"k = {k} examples asked for, but the pool has only {len(pool)}"
            raise InputError(msg)
        picks = greedy(
            self.encoder.encode_queries([query]),
            content.index,
            self.encoder.state(),
            k,
            groups=pool.programs if mask_same_program else None,
        )
        chosen = zip(picks.positions[0].tolist(), picks.logits[0].tolist(), strict=True)
        return [
            Pick(pool.ids[at], pool.text(pool.examples[at]), dict(pool.examples[at]), step, logit)
            for step, (at, logit) in enumerate(chosen, start=1)
        ]


class SequentialCompositionalRetriever(BaseRetriever, BaseExampleSelector):
    """Picks few-shot examples one after the other, each conditioned on those already picked.

    A LangChain retriever and example selector in one. Make it with `from_pretrained` or `from_examples`. Pickles,
    deep-copies, and may be used from many threads while examples are added.

    Args:
        store: encoder, pool and vectors; shared by the copies that `configurable_fields` makes.
        k: how many examples to pick; may be above the pool's size as long as nothing is asked.
        input_keys: the prompt variables that make up the query (their values in the order of the sorted names, a
            space between, as LangChain's own selectors do). None: the variable with the name of the pool's source
            key, or the only variable there is.
        mask_same_program: never pick two examples with the same program (white space aside) while others are left.

    Raises:
        InputError: k is not a positive whole number.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    store: ExampleStore
    k: int = 4
    input_keys: list[str] | None = None
    mask_same_program: bool = False

    def __init__(
        self,
        *,
        store: ExampleStore,
        k: int = 4,
        input_keys: Sequence[str] | None = None,
        mask_same_program: bool = False,
        **fields: Any,
    ) -> None:
        # Here and not in a validator, from where pydantic would hide the InputError in one of its own.
        check_k(k)
        keys = None if input_keys is None else list(input_keys)
        fields |= {"store": store, "k": k, "input_keys": keys, "mask_same_program": mask_same_program}
        super().__init__(**fields)

    @classmethod
    def from_pretrained(
        cls,
        run_or_checkpoint: str | Path,
        *,
        examples: Sequence[Example] | None = None,
        ids: Sequence[str] | None = None,
        k: int = 4,
        source_key: str = "source",
        target_key: str = "target",
        embeddings: Embeddings | None = None,
        **fields: Any,
    ) -> Self:
        """A retriever with a trained encoder.

        Args:
            run_or_checkpoint: a run folder of `rcr-train` or a checkpoint folder.
            examples: the pool; None for the one stored in the checkpoint.
            ids: an id for each of `examples`; see `ExamplePool`.
            k: how many examples to pick.
            source_key: the key of an example's question.
            target_key: the key of its program.
            embeddings: the LangChain embeddings, where the checkpoint was trained over some.
            **fields: further fields of the class.

        Raises:
            CheckpointError: the folder or a file in it is missing, damaged, foreign, or of a newer version.
            PoolError, InputError: the examples, ids, keys or k don't fit.
        """
        check_k(k)
        folder = _checkpoint(Path(run_or_checkpoint))
        if examples is None and ids is not None:
            msg = "ids were given without examples: the checkpoint's own examples have theirs"
            raise InputError(msg)
        # The user's own examples are checked before a large model is loaded.
        pool = (
            None if examples is None else ExamplePool(examples, ids=ids, source_key=source_key, target_key=target_key)
        )
        encoder = TriEncoder.from_pretrained(folder, embeddings=embeddings)
        if pool is None:
            pool = _stored_pool(folder, source_key, target_key)
        return cls(store=ExampleStore(encoder, pool), k=k, **fields)

    @classmethod
    def from_examples(
        cls,
        encoder: TriEncoder,
        examples: Sequence[Example],
        *,
        ids: Sequence[str] | None = None,
        k: int = 4,
        source_key: str = "source",
        target_key: str = "target",
        **fields: Any,
    ) -> Self:
        """A retriever over examples with an encoder at hand. Arguments and errors: as `from_pretrained`."""
        check_k(k)
        pool = ExamplePool(examples, ids=ids, source_key=source_key, target_key=target_key)
        return cls(store=ExampleStore(encoder, pool), k=k, **fields)

    def select_examples(self, input_variables: Mapping[str, str]) -> list[dict[str, Any]]:
        """The examples for a prompt, as they were given, in the order of picking.

        Args:
            input_variables: the prompt's variables; see `input_keys` for which of them are the query.

        Raises:
            InputError: they hold no query; the message names the keys.
        """
        query = _query(input_variables, self.input_keys, self.store.pool.source_key)
        return [pick.example for pick in self._picks(query, self.k)]

    def add_example(self, example: Mapping[str, str], *, id: str | None = None) -> str:
        """Add an example; the next query can pick it.

        Args:
            example: a mapping with the pool's two keys, and any other fields.
            id: its id; None for a random one.

        Returns:
            Its id.

        Raises:
            PoolError: a field is missing, not a string or blank; the id is taken.
        """
        return self.store.add([example], None if id is None else [id])[0]

    def _picks(self, query: str, k: int | None) -> list[Pick]:
        k = self.k if k is None else k
        return self.store.select(query, k, mask_same_program=self.mask_same_program)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """The picks as documents: the example as text, its id, its fields; `step` (from 1) and `logit` with them."""
        return [
            Document(
                id=pick.id, page_content=pick.text, metadata={**pick.example, "step": pick.step, "logit": pick.logit}
            )
            for pick in self._picks(query, k)
        ]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        """`_get_relevant_documents` in a thread: encoding is computation, which would hold up the event loop."""
        return await run_in_executor(None, self._get_relevant_documents, query, run_manager=run_manager.get_sync(), k=k)


def check_k(k: object) -> None:
    """Refuse a k that is not a positive whole number.

    Raises:
        InputError: naming it.
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        msg = f"k must be a whole number from 1 on, not {k!r}"
        raise InputError(msg)


def _check_query(query: object) -> None:
    if not isinstance(query, str):
        msg = f"the query must be a string, not {type(query).__name__}"
        raise InputError(msg)
    try:
        check_text(query)
    except ValueError as error:
        msg = f"the query {error}"
        raise InputError(msg) from None


def _query(variables: Mapping[str, str], input_keys: Sequence[str] | None, source_key: str) -> str:
    if not isinstance(variables, Mapping):
        msg = f"input_variables must be a mapping of names to values, not {type(variables).__name__}"
        raise InputError(msg)
    if input_keys:
        keys = sorted(input_keys)
    elif source_key in variables:
        keys = [source_key]
    else:
        keys = list(variables)
    names = ", ".join(repr(key) for key in variables) or "nothing"
    lacking = [key for key in keys if key not in variables]
    if lacking:
        msg = f"input_keys names {lacking[0]!r}, but the input variables are {names}"
        raise InputError(msg)
    if not input_keys and len(keys) != 1:
        msg = f"which variable is the query? Expected '{source_key}' or a single one, got {names}: set input_keys"
        raise InputError(msg)
    for key in keys:
        if not isinstance(variables[key], str):
            msg = f"the input variable {key!r} must be a string, not {type(variables[key]).__name__}"
            raise InputError(msg)
    return " ".join(variables[key] for key in keys)


def _checkpoint(path: Path) -> Path:
    folder = path / CHECKPOINT_FOLDER
    if folder.is_dir():
        return folder
    if not path.is_dir():
        msg = f"{path} is no folder: give a run folder of rcr-train or a checkpoint folder"
        raise CheckpointError(msg)
    return path


def _stored_pool(folder: Path, source_key: str, target_key: str) -> ExamplePool:
    file = folder / POOL_FILE
    if not file.is_file():
        msg = f"{folder} has no {POOL_FILE}: pass the examples as examples=…"
        raise CheckpointError(msg)
    try:
        return read_jsonl(file, source_key=source_key, target_key=target_key)
    except PoolError as error:
        raise CheckpointError(str(error)) from error
