"""What a call of LangChain's own `from_examples` means here: the examples' keys, the store, the store's options."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from langchain_rcr.errors import InputError
from langchain_rcr.index.vectorstore import VectorStoreIndex
from langchain_rcr.pool import Example
from langchain_rcr.programs import TOKENS, ProgramSpec
from langchain_rcr.programs.languages import unknown

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore


def keys_of(
    examples: Sequence[Example],
    input_keys: Sequence[str] | None,
    example_keys: Sequence[str] | None,
    source_key: str | None,
    target_key: str | None,
) -> tuple[str, str]:
    """The keys of question and program, where they weren't given by those that the first example has.

    The question is "source", else the only one of `input_keys`, else the first of two fields; the program is "target",
    else the other field of two, else the only one of `example_keys` that isn't the question.

    Raises:
        InputError: the fields leave it open.
    """
    first = next(iter(examples), {})
    fields = list(first) if isinstance(first, Mapping) else []
    if source_key is None:
        named = list(input_keys or ())
        if len(named) == 1 and (named[0] in fields or not fields):
            source_key = named[0]
        elif "source" in fields or len(fields) < 2:
            source_key = "source"
        elif len(fields) == 2:
            source_key = next(name for name in fields if name != target_key)
    if target_key is None:
        others = [name for name in fields if name != source_key]
        shown = [name for name in example_keys or () if name in others]
        if "target" in others or not others:
            target_key = "target"
        else:
            target_key = next((names[0] for names in (others, shown) if len(names) == 1), None)
    if source_key is None or target_key is None:
        has = ", ".join(map(repr, fields))
        raise InputError(f"which fields are question and program? The examples have {has}: set source_key, target_key")
    return source_key, target_key


def index_of(store: Callable[..., VectorStore], options: Mapping[str, Any]) -> VectorStoreIndex:
    """The engine over a vector store that is made as LangChain's selectors make it, by `from_texts`.

    Args:
        store: its class, or a function as `VectorStoreIndex` takes it.
        options: of `from_texts`, or of the function.
    """
    if not isinstance(store, type):
        return VectorStoreIndex(store, **options)
    kind: Any = store

    def make(embedding: Embeddings) -> VectorStore:
        # A store can't be made without a text; this one is gone before the pool is looked at.
        probe = str(uuid.uuid4())
        made: VectorStore = kind.from_texts(["probe"], embedding, metadatas=[{"rcr_key": -1}], ids=[probe], **options)
        made.delete([probe])
        return made

    return VectorStoreIndex(make)


def spec_of(language: str | None) -> ProgramSpec:
    """How programs of a language are read; None: as SQL where its extra is installed, else as tokens."""
    return ProgramSpec(language or ("sql" if find_spec("sqlglot") else TOKENS))


def filter_of(vectorstore_kwargs: Mapping[str, Any] | None) -> Any:
    """The filter among what LangChain's selectors pass on to each search of the store; None: there is none.

    Raises:
        InputError: there is anything else.
    """
    strange = next((name for name in vectorstore_kwargs or () if name != "filter"), None)
    if strange is not None:
        raise InputError(f"vectorstore_kwargs: {unknown(strange, ['filter'])}")
    return (vectorstore_kwargs or {}).get("filter")
