"""Rewards that read programs: the paper's Jaccard, exact match, and the recall of the picks, which asks no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from rcr_trainer.data import Example
from rcr_trainer.programs import ProgramSpec, Tree, get_parser

_T = TypeVar("_T")

_REMEMBERED = 1 << 16
"""Programs whose structures are kept: a group's answers and a pool's programs come back again and again."""


class StructureCoverage:
    """The paper's reward (Eq. 7): Jaccard similarity of the local structures of answer and gold program.

    r = |LS(ŷ) ∩ LS(y)| / |LS(ŷ) ∪ LS(y)|. An answer that is no program has no structures and scores 0. A gold program
    without structures can't be scored.

    Args:
        spec: how programs are read.
    """

    name, needs_llm, maximum = "structure_coverage", True, 1.0

    def __init__(self, spec: ProgramSpec) -> None:
        self._structures = _remembering(spec.structures)

    def __call__(
        self,
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        queries: Sequence[str],
        contexts: Sequence[Sequence[Example]],
    ) -> list[float | None]:
        """See `Reward`."""
        return [self._one(*pair) for pair in zip(predictions, references, strict=True)]

    def _one(self, prediction: str | None, reference: str) -> float | None:
        gold = self._structures(reference)
        if not gold:
            return None
        found = self._structures(prediction) if prediction else frozenset()
        return len(found & gold) / len(found | gold)


class Correctness:
    """Exact match (appendix F): 1 where answer and gold program are the same, else 0.

    The same are two programs with equal parse trees, values included; where one of them doesn't parse, two texts that
    are equal up to white space. An empty gold program can't be scored.

    Args:
        spec: its language; whether it anonymises doesn't matter.
    """

    name, needs_llm, maximum = "correctness", True, 1.0

    def __init__(self, spec: ProgramSpec) -> None:
        self._tree = _remembering(get_parser(spec.language).parse)

    def __call__(
        self,
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        queries: Sequence[str],
        contexts: Sequence[Sequence[Example]],
    ) -> list[float | None]:
        """See `Reward`."""
        return [
            float(self._same(prediction or "", reference)) if reference.split() else None
            for prediction, reference in zip(predictions, references, strict=True)
        ]

    def _same(self, prediction: str, reference: str) -> bool:
        if prediction.split() == reference.split():
            return True
        tree: Tree | None = self._tree(prediction)
        return tree is not None and tree == self._tree(reference)


class ContextCoverage:
    """Recall of the gold program's local structures by the union of the picks' programs. Needs no language model.

    It is what SFT and the dev coverage measure, not what the paper rewards: a policy that maximises it need not be
    the one from whose picks a language model answers best. (The Jaccard of the picks would be no remedy: it is
    highest for copies of one program.)

    Args:
        spec: how programs are read.
    """

    name, needs_llm, maximum = "context_coverage", False, 1.0

    def __init__(self, spec: ProgramSpec) -> None:
        self._structures = _remembering(spec.structures)

    def __call__(
        self,
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        queries: Sequence[str],
        contexts: Sequence[Sequence[Example]],
    ) -> list[float | None]:
        """See `Reward`."""
        return [self._one(*pair) for pair in zip(references, contexts, strict=True)]

    def _one(self, reference: str, context: Sequence[Example]) -> float | None:
        gold = self._structures(reference)
        if not gold:
            return None
        shown = frozenset().union(*(self._structures(example.target) for example in context))
        return len(gold & shown) / len(gold)


def _remembering(function: Callable[[str], _T]) -> Callable[[str], _T]:
    return lru_cache(maxsize=_REMEMBERED)(function)
