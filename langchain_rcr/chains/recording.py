"""Outcomes of chains: a callback handler that logs them, and a reader of LangSmith's feedback by run."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from uuid import UUID

from langchain_core.documents import Document
from langchain_core.runnables import Runnable
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run

from langchain_rcr.chains.few_shot import innermost
from langchain_rcr.errors import InputError
from langchain_rcr.pool.outcomes import OutcomeLog, checked_outcome
from langchain_rcr.retriever import SequentialCompositionalRetriever

_ASKED = 100
"""Runs per request for feedback: their ids are part of the URL."""


class OutcomeRecorder(BaseTracer):
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

    ignore_llm = ignore_chat_model = True  # a model's runs contain no others

    def __init__(
        self, retriever: Runnable[str, list[Document]], outcome: Callable[[Any], float | None] | None = None
    ) -> None:
        # Check now: LangChain only logs what a handler raises later.
        ours = innermost(retriever)
        if not isinstance(ours, SequentialCompositionalRetriever) or ours.log is None:
            raise InputError('a recorder needs a retriever of ours with a log: log=OutcomeLog("outcomes.jsonl")')
        super().__init__()
        self._retriever, self._outcome = ours, outcome

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> Run:
        """A run has its output: any object, kept as a tool's is."""
        return super().on_chain_end({"output": outputs}, run_id=run_id, **kwargs)

    def _persist_run(self, run: Run) -> None:
        """Nothing: `_on_run_update` records, after LangChain has forgotten the run."""

    def _on_run_update(self, run: Run) -> None:
        """Record what an outermost run picked, if it succeeded."""
        if run.parent_run_id is not None:
            return
        runs, is_cancelled = [run], (run.error or "").startswith("CancelledError(")
        for each in runs:
            runs += each.child_runs
            self.order_map.pop(each.id, None)  # which LangChain keeps
            if is_cancelled:  # and it doesn't say so of retrievers and tools
                self.run_map.pop(str(each.id), None)
        if run.error is not None:
            return
        policy, picked, outcome = self._retriever.store.fingerprint, dict[str, Run](), None
        for each in sorted(runs, key=attrgetter("start_time")):
            if each.run_type == "retriever" and each.outputs and each.metadata.get("ls_embedding_model") == policy:
                picked[each.inputs["query"]] = each
        # LangGraph's, which is no dependency.
        waits = any((each.error or "").startswith("GraphInterrupt(") for each in runs)
        try:
            if self._outcome is not None and not waits and run.run_type != "retriever":
                outcome = checked_outcome(self._outcome((run.outputs or {})["output"]))
        finally:  # Record the picks even so: their outcome can come later, by the run.
            for question, each in picked.items():
                picker = self._retriever.model_copy(update={"explore": each.metadata["explore"]})
                picker.record(question, (each.outputs or {})["documents"], outcome, run=str(run.id))


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
