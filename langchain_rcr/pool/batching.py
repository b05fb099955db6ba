"""Questions to a retriever, one or many at once, each with a callback run of its own."""

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
    """What a question got: the picks, in the order of the prompt, and, where somebody sees them, their documents."""

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
    """Pick for questions together; an invalid one gets its exception and stops no other.

    Args:
        retriever: whose name, tags and metadata the runs get.
        queries: the questions.
        config: for all, or for each.
        manager: of callbacks that are sync, and then nothing here waits, or async.
        pick: what the valid questions get, in their order, an error among others; and whether callbacks see it.
        about: for traces.
        return_exceptions: put exceptions into the list in place of raising the first.

    Returns:
        For each question its `Selection`, or its exception.
    """
    runs, configs = [], get_config_list(config, len(queries))
    callbacks: Any = None
    for query, one in zip(queries, configs, strict=True):
        if callbacks is None or isinstance(config, list):  # else all have the same
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
        else:  # nobody listens
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
    """A value, awaited where it has to be."""
    return await value if inspect.isawaitable(value) else value
