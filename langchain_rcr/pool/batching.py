"""Asks a retriever one or many questions, each with its own callback run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_rcr.errors import InputError
from langchain_rcr.pool.served import Pick, error_of


class Selection(NamedTuple):
    """The result for a question: the picks in the order of the prompt, and their documents if somebody sees them."""

    picks: list[Pick]
    documents: list[Document]


async def batched(
    retriever: BaseRetriever,
    queries: Sequence[str],
    config: RunnableConfig | list[RunnableConfig] | None,
    manager: type[CallbackManager | AsyncCallbackManager],
    pick: Callable[[Sequence[str], bool], Awaitable[list[Selection | InputError]]],
    about: Mapping[str, Any],
    return_exceptions: bool,
) -> list[Any]:
    """Pick for questions together; an invalid one gets its exception without stopping the others.

    Args:
        retriever: gives the runs its name, tags and metadata.
        queries: the questions.
        config: for all, or for each.
        manager: the class of callback managers; with the sync one nothing here awaits.
        pick: (valid questions, whether callbacks see the result) → the result or error of each, in order.
        about: metadata for traces.
        return_exceptions: put exceptions into the list instead of raising the first.

    Returns:
        For each question its `Selection`, or its exception.
    """
    runs, configs = [], get_config_list(config, len(queries))
    callbacks: Any = None
    for query, one in zip(queries, configs, strict=True):
        if callbacks is None or isinstance(config, list):  # otherwise all share one
            callbacks = manager.configure(
                inheritable_callbacks=one.get("callbacks"),
                inheritable_tags=one.get("tags"),
                local_tags=retriever.tags,
                inheritable_metadata={**(one.get("metadata") or {}), **about},
                local_metadata=retriever.metadata,
            )
        if callbacks.handlers:
            name = one.get("run_name") or retriever.get_name()
            run = callbacks.on_retriever_start(None, query, name=name, run_id=one.get("run_id"))
            runs.append(await resolved(run))
        else:  # no listeners
            runs.append(None)
    errors = [error_of(query) for query in queries]
    valid = [query for query, error in zip(queries, errors, strict=True) if error is None]
    results: list[Any]
    try:
        found = iter(await pick(valid, any(runs)) if valid else ())
        results = [next(found) if error is None else error for error in errors]
    except Exception as error:
        results = [one or error for one in errors]
    for run, result in zip(runs, results, strict=True):
        if run is None:
            continue
        ended = run.on_retriever_error if isinstance(result, Exception) else run.on_retriever_end
        await resolved(ended(getattr(result, "documents", result)))
    first = next((result for result in results if isinstance(result, Exception)), None)
    if first is not None and not return_exceptions:
        raise first
    return results


async def resolved(value: Any) -> Any:
    """A value, awaited if need be."""
    return await value if inspect.isawaitable(value) else value
