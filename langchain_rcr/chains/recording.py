"""Outcomes of chains: a callback handler that logs them, and a reader of LangSmith's feedback by run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import Runnable

from langchain_rcr.chains.few_shot import innermost
from langchain_rcr.errors import InputError
from langchain_rcr.pool.outcomes import OutcomeLog, checked_outcome
from langchain_rcr.retriever import SequentialCompositionalRetriever

_ASKED = 100
"""Runs per request for feedback: their ids are part of the URL."""


class OutcomeRecorder(BaseCallbackHandler):
    """Writes what each run of a chain picked, and what came of it, to the retriever's `log`.

    For `chain.invoke(question, {"callbacks": [recorder]})`, with any chain or tool that contains the retriever. A
    question ends with the outermost run, whose id is the log's `run`. Failed runs and the picks of other retrievers
    aren't recorded. If there were several picks for a question, as with drafts, the last count.

    Args:
        retriever: ours, bare or wrapped, with a `log`.
        outcome: says how good the chain's output is. If it is None, returns None or fails, which LangChain logs, the
            outcome comes later, by run (`OutcomeLog.outcome`, `record_feedback`). It isn't asked about an agent's run
            that waits for a human.

    Raises:
        InputError: the retriever isn't ours, or has no log.
    """

    def __init__(
        self, retriever: Runnable[str, list[Document]], outcome: Callable[[Any], float | None] | None = None
    ) -> None:
        # Check now: LangChain only logs what a handler raises later.
        ours = innermost(retriever)
        if not isinstance(ours, SequentialCompositionalRetriever) or ours.log is None:
            raise InputError('a recorder needs a retriever of ours with a log: log=OutcomeLog("outcomes.jsonl")')
        self._retriever, self._outcome = ours, outcome
        self._root: dict[UUID, UUID] = {}  # run → its outermost run, while that is ongoing
        self._asked: dict[UUID, tuple[str, float]] = {}  # a retriever's run → its question, and its `explore`
        # Outermost run → its questions, each with its picks and the `explore` that drew them.
        self._picked: dict[UUID, dict[str, tuple[Sequence[Document], float]]] = {}
        self._waiting = set[UUID]()  # outermost runs that wait for a human

    def on_chain_start(  # type: ignore[override]  # a tool's run gets `inputs` by name as well
        self, serialized: Any, given: Any, /, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A run begins."""
        self._root[run_id] = run_id if parent_run_id is None else self._root.get(parent_run_id, run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A run has its output."""
        if self._root.get(run_id) != run_id:
            return
        outcome = None
        try:
            if self._outcome is not None and run_id not in self._waiting:
                outcome = checked_outcome(self._outcome(outputs))
        finally:  # Record the picks even so: their outcome can come later, by the run.
            self._write(run_id, outcome)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A run has failed, or part of an agent's run waits for a human."""
        root = self._root.get(run_id)
        if root == run_id:
            self._forget(run_id)
        elif root is not None and type(error).__name__ == "GraphInterrupt":  # LangGraph's, which is no dependency
            self._waiting.add(root)

    def on_retriever_start(
        self, serialized: Any, query: str, *, metadata: Mapping[str, Any] | None = None, run_id: UUID, **kwargs: Any
    ) -> None:
        """A question is asked."""
        about = metadata or {}
        if about.get("ls_embedding_model") == self._retriever.store.fingerprint:
            self.on_chain_start(serialized, query, run_id=run_id, **kwargs)
            self._asked[run_id] = query, about["explore"]

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """A question has its picks."""
        if run_id not in self._asked:  # another retriever's
            return
        root, (question, explore) = self._root[run_id], self._asked.pop(run_id)
        self._picked.setdefault(root, {})[question] = documents, explore
        if root == run_id:  # a retriever without a chain
            self._write(root, None)

    on_tool_start = on_chain_start  # type: ignore[assignment]  # a tool may contain the retriever
    on_tool_end = on_chain_end  # type: ignore[assignment]  # passed by position
    on_tool_error = on_retriever_error = on_chain_error

    def _write(self, root: UUID, outcome: float | None) -> None:
        for question, (documents, explore) in self._forget(root).items():
            picker = self._retriever.model_copy(update={"explore": explore})
            picker.record(question, documents, outcome, run=str(root))

    def _forget(self, root: UUID) -> dict[str, tuple[Sequence[Document], float]]:
        """Forget an outermost run and all within it, as LangChain reports no cancelled retriever; return its picks."""
        self._waiting.discard(root)
        for run in [run for run, outermost in [*self._root.items()] if outermost == root]:
            del self._root[run]
            self._asked.pop(run, None)
        return self._picked.pop(root, {})


def record_feedback(log: OutcomeLog, key: str, client: Any = None) -> int:
    """Append the outcomes that LangSmith has as feedback on a log's runs.

    Args:
        log: feedback is requested for what is recorded there without an outcome, under an id of LangSmith's kind.
        key: the feedback's key, such as "correctness"; the latest score is the outcome.
        client: a `langsmith.Client`; None: one configured by the environment.

    Returns:
        How many runs had one.
    """
    if client is None:
        from langsmith import Client

        client = Client()
    waiting = [each.run for each in log.read() if each.outcome is None and _is_uuid(each.run)]
    found: dict[str, tuple[Any, float]] = {}
    for start in range(0, len(waiting), _ASKED):
        for each in client.list_feedback(run_ids=waiting[start : start + _ASKED], feedback_key=[key]):
            run = str(each.run_id)
            if each.score is not None and (run not in found or each.created_at > found[run][0]):
                found[run] = each.created_at, float(each.score)
    for run, (_, score) in found.items():
        log.outcome(run, score)
    return len(found)


def _is_uuid(run: str | None) -> bool:
    """Whether LangSmith may know this run: it refuses a request with an id of another kind."""
    try:
        return run is not None and bool(UUID(run))
    except ValueError:
        return False
