"""Our rewards: the paper's Jaccard, exact match, the same result, recall of the picks, probability of the gold program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from langchain_rcr.databases.many import Databases
from langchain_rcr.databases.results import Result
from langchain_rcr.errors import ProgramError
from langchain_rcr.programs import ProgramSpec, about, get_parser
from langchain_rcr.programs.remembering import remembered
from rcr_trainer.data import Example
from rcr_trainer.rewards.reward import Reward

Execute = Callable[[str], Any]
"""Runs a program and gives its result: rows as a list, or any value. Raises ProgramError for one that can't be run."""

_REMEMBERED = 1 << 16


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


def execution(execute: Execute | Databases, spec: ProgramSpec) -> Reward:
    """1 where answer and gold program give the same result, else 0.

    An answer that can't be run, or whose result can't be compared, scores 0; a gold program like that can't be scored.
    A list is compared as a multiset of rows, and in order where the gold program's outermost query has an ORDER BY; a
    tuple is always compared in order. Of rows that are tuples the order of columns doesn't matter. Numbers are equal to
    12 significant digits, whatever their types. Each program is run once, on each database.

    Args:
        execute: runs one program; or the databases that the questions' fields name.
        spec: its language tells whether order matters (SQL).
    """

    @lru_cache(maxsize=_REMEMBERED)
    def result(program: str, where: str) -> Result | None:
        """None if the program can't be run, or its result can't be compared."""
        try:
            return Result.of(execute.run(program, where) if isinstance(execute, Databases) else execute(program))
        except ProgramError:
            return None

    parse, is_ordered = get_parser(spec.language).parse, about(spec.language).is_ordered
    ordered = lru_cache(maxsize=_REMEMBERED)(lambda program: (tree := parse(program)) is not None and is_ordered(tree))

    def one(prediction: str | None, reference: str, where: str) -> float | None:
        gold = result(reference, where)
        if gold is None:
            return None
        found = result(prediction, where) if prediction and prediction.strip() else None
        if found is None:
            return 0.0
        return float(found.in_order == gold.in_order if ordered(reference) else found.rows == gold.rows)

    def function(
        predictions: Sequence[str | None],
        references: Sequence[str],
        *,
        fields: Sequence[Mapping[str, Any]] = (),
        **_: Any,
    ) -> list[float | None]:
        where = [execute.path(each) for each in fields] if isinstance(execute, Databases) else [""] * len(references)
        scores: list[float | None] = [None] * len(references)
        for n in sorted(range(len(references)), key=where.__getitem__):  # few databases are open at a time
            scores[n] = one(predictions[n], references[n], where[n])
        return scores

    return Reward("execution", function, reads_fields=isinstance(execute, Databases))


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
    return Reward("likelihood", lambda *_, **__: [], likelihood=True)  # which isn't called
