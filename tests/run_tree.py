"""What a trace shows: the runs of a call as a tree of names."""

from __future__ import annotations

from typing import Any

from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run


class RunTree(BaseTracer):
    """`runnable.invoke(…, {"callbacks": [tree]})`, then `tree.shape`."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        self.roots.append(run)

    @property
    def shape(self) -> list[Any]:
        """A name for a run without children, {name: [children]} for others, in the order of their starts."""
        return [_shape(run) for run in self.roots]

    def find(self, name: str) -> list[Run]:
        """All runs of this name, in the order of the tree."""
        found, todo = [], self.roots[::-1]
        while todo:
            run = todo.pop()
            found += [run] if run.name == name else []
            todo += run.child_runs[::-1]
        return found


def _shape(run: Run) -> Any:
    children = [_shape(child) for child in sorted(run.child_runs, key=lambda child: child.start_time)]
    return {run.name: children} if children else run.name
