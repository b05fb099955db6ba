"""Rewards that read programs: the paper's Jaccard, exact match, and the recall of the picks, which needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_rcr.programs import ProgramSpec, get_parser
from langchain_rcr.programs.remembering import remembered
from rcr_trainer.data import Example
from rcr_trainer.rewards.reward import Reward


def structure_coverage(spec: ProgramSpec) -> Reward:
    """The paper's reward (Eq. 7): Jaccard similarity of the local structures of answer and gold program.

    r = |LS(ŷ) ∩ LS(y)| / |LS(ŷ) ∪ LS(y)|. An answer that is no program has no structures and scores 0. A gold program
    without structures can't be scored. Names of tables and columns count, whatever the spec says.
    """
    structures = spec.named.structures

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        gold = structures(reference)
        if not gold:
            return None
        found = structures(prediction) if prediction else frozenset()
        return len(found & gold) / len(found | gold)

    return Reward.per_answer("structure_coverage", one)


def correctness(spec: ProgramSpec) -> Reward:
    """Exact match (appendix F): 1 where answer and gold program are the same, else 0.

    Two programs are the same if their parse trees are equal, values included; if one of them doesn't parse, their texts
    must be equal up to white space. An empty gold program can't be scored.
    """
    tree_of = remembered(1 << 21)(get_parser(spec.language).parse)  # a group's answers come back again and again

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        if not reference.split():
            return None
        if (prediction or "").split() == reference.split():
            return 1.0
        tree = tree_of(prediction or "")
        return float(tree is not None and tree == tree_of(reference))

    return Reward.per_answer("correctness", one)


def context_coverage(spec: ProgramSpec) -> Reward:
    """Recall of the gold program's local structures by the union of the picks' programs. Needs no language model.

    It is what SFT and the dev coverage measure, not what the paper rewards: a policy that maximises it need not be
    the one from whose picks a language model answers best. (The Jaccard of the picks wouldn't help: it is highest for
    copies of one program.)
    """
    structures = spec.structures

    def one(prediction: str | None, reference: str, context: Sequence[Example]) -> float | None:
        gold = structures(reference)
        if not gold:
            return None
        shown = frozenset().union(*(structures(example.target) for example in context))
        return len(gold & shown) / len(gold)

    return Reward.per_answer("context_coverage", one, needs_llm=False)


def likelihood(spec: ProgramSpec) -> Reward:
    """The probability with which the language model writes the gold program, spacing and all (`Scorer`).

    It tells picks apart if all answers are right, or all wrong. Needs a local model, or a server with `echo`.
    """

    def unused(*_: object, **__: object) -> list[float | None]:
        raise NotImplementedError

    return Reward("likelihood", unused, likelihood=True)
