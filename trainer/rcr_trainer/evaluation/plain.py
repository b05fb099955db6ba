"""The selectors to compare with, built for one pool, and MMR's trade-off chosen on dev."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rcr_trainer.baselines import (
    Baseline,
    BM25Selector,
    DenseSelector,
    Embed,
    Exclude,
    FixedSelector,
    MMRSelector,
    OracleSelector,
    RandomSelector,
)
from rcr_trainer.data import Example
from rcr_trainer.evaluation.metrics import coverage_by_step, recall_by_step
from rcr_trainer.evaluation.report import MMRChoice
from rcr_trainer.programs import ProgramSpec, structure_matrices

MMR_GRID = (0.3, 0.5, 0.7, 0.9)
POOL_QUERIES = 200  # about as many of the pool's examples stand in for dev


class PlainSelectors(dict[str, Baseline]):
    """Baselines by name, with what the report says about them.

    Attributes:
        left_out: the selectors that could not be built, with the reason.
        mmr: how MMR's trade-off was chosen; None where MMR is left out.
    """

    def __init__(
        self,
        selectors: Mapping[str, Baseline],
        *,
        left_out: Mapping[str, str] | None = None,
        mmr: MMRChoice | None = None,
    ) -> None:
        super().__init__(selectors)
        self.left_out = dict(left_out or {})
        self.mmr = mmr


def plain_selectors(
    pool: Sequence[Example],
    spec: ProgramSpec,
    embed: Embed | None,
    seed: int,
    *,
    dev: Sequence[Example] = (),
    k: int = 4,
    exclude_dev: Exclude = None,
) -> PlainSelectors:
    """Build random, fixed, bm25, dense, mmr and oracle for one pool; its questions are embedded once.

    Args:
        pool: the candidates; their programs also stand for the training queries of `fixed`.
        spec: how programs are read.
        embed: embeds questions; None leaves out dense and mmr.
        seed: of `random`.
        dev: queries on which MMR's trade-off is chosen.
        k: picks that it is chosen for, and that `select_examples` returns.
        exclude_dev: per dev query, the positions it may not pick.
    """
    examples = [{"source": example.source, "target": example.target} for example in pool]
    selectors: dict[str, Baseline] = {
        "random": RandomSelector(examples, seed=seed, k=k),
        "fixed": FixedSelector(examples, spec=spec, k=k),
        "bm25": BM25Selector(examples, k=k),
    }
    oracle = OracleSelector(examples, spec=spec, k=k)
    if embed is None:
        reason = "no embeddings were given"
        return PlainSelectors({**selectors, "oracle": oracle}, left_out={"dense": reason, "mmr": reason})
    vectors = np.asarray(embed([example.source for example in pool]))
    choice = choose_mmr(embed, pool, dev, spec, k, exclude=exclude_dev, vectors=vectors)
    selectors["dense"] = DenseSelector(examples, embed=embed, vectors=vectors, k=k)
    selectors["mmr"] = MMRSelector(examples, embed=embed, vectors=vectors, lambda_mult=choice.lambda_mult, k=k)
    return PlainSelectors({**selectors, "oracle": oracle}, mmr=choice)


def choose_mmr(
    embed: Embed,
    pool: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    k: int,
    *,
    grid: Sequence[float] = MMR_GRID,
    exclude: Exclude = None,
    vectors: np.ndarray | None = None,
) -> MMRChoice:
    """The trade-off λ of MMR with the highest coverage on dev; the first of equals.

    Where no dev query counts, the pool's own examples are the queries, each barred from picking its own question;
    where the pool is too small for that, λ = 0.5, LangChain's default. MMR untuned would be too easy to beat.

    Args:
        embed: embeds questions.
        pool: the candidates.
        dev: the queries; those whose gold program doesn't parse don't count.
        spec: how programs are read.
        k: picks per query.
        grid: the trade-offs to try.
        exclude: per dev query, the positions it may not pick.
        vectors: (N, D), the pool's embeddings where they are already known.
    """
    pool_structures, gold = structure_matrices(spec, [e.target for e in pool], [e.target for e in dev])
    kept = np.flatnonzero(np.diff(gold.indptr)).tolist()
    if vectors is None:
        vectors = np.asarray(embed([example.source for example in pool]))
    chosen_on = "dev"
    if kept:
        questions = [dev[i].source for i in kept]
        embedded, gold = np.asarray(embed(questions)), gold[kept]
        exclude = None if exclude is None else [exclude[i] for i in kept]
    else:
        chosen_on = "pool"
        usable = np.flatnonzero(np.diff(pool_structures.indptr))
        kept = usable[:: max(1, len(usable) // POOL_QUERIES)].tolist()
        questions = [pool[i].source for i in kept]
        embedded, gold = vectors[kept], pool_structures[kept]
        sources = np.array([example.source for example in pool], dtype=object)
        exclude = [np.flatnonzero(sources == question) for question in questions]
        if not kept or k > len(pool) - max(map(len, exclude)):
            return MMRChoice(lambda_mult=0.5, chosen_on="nothing")
    examples = [{"source": example.source} for example in pool]
    selector = MMRSelector(examples, embed=lambda _: embedded, vectors=vectors)
    coverage = {}
    for value in grid:
        selector.lambda_mult = value
        positions = selector.pick(questions, k, exclude)
        coverage[float(value)] = float(coverage_by_step(recall_by_step(gold, pool_structures, positions))[-1])
    best = max(coverage, key=lambda value: coverage[value])
    return MMRChoice(lambda_mult=best, coverage=coverage, n=len(kept), chosen_on=chosen_on)
