"""The selectors to compare with, built for one pool, and the trade-offs of MMR and DPP chosen on dev."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from rcr_trainer.baselines import (
    Baseline,
    BM25CoverageSelector,
    BM25Selector,
    DenseSelector,
    DPPSelector,
    Embed,
    EmbedTokens,
    Exclude,
    FixedSelector,
    MMRSelector,
    OracleSelector,
    RandomSelector,
    SetBSRSelector,
)
from rcr_trainer.data import Example
from rcr_trainer.evaluation.metrics import coverage_by_step, recall_by_step, within_pool
from rcr_trainer.evaluation.report import Gold, MMRChoice
from rcr_trainer.programs import ProgramSpec, structure_matrices

NAMES = ("random", "fixed", "bm25", "bm25_coverage", "dense", "mmr", "dpp", "set_bsr", "oracle")
MMR_GRID = (0.3, 0.5, 0.7, 0.9)
DPP_GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
POOL_QUERIES = 200  # about as many of the pool's examples stand in for dev


class PlainSelectors(dict[str, Baseline]):
    """Baselines by name, with what the report says about them.

    Attributes:
        left_out: the selectors that could not be built, with the reason.
        mmr: how MMR's trade-off was chosen; None where MMR is left out.
        dpp: how that of the determinantal point process was chosen; None where it is left out.
    """

    def __init__(
        self,
        selectors: Mapping[str, Baseline],
        *,
        left_out: Mapping[str, str] | None = None,
        mmr: MMRChoice | None = None,
        dpp: MMRChoice | None = None,
    ) -> None:
        super().__init__(selectors)
        self.left_out = dict(left_out or {})
        self.mmr = mmr
        self.dpp = dpp


def plain_selectors(
    pool: Sequence[Example],
    spec: ProgramSpec,
    embed: Embed | None,
    seed: int,
    *,
    embed_tokens: EmbedTokens | None = None,
    dev: Sequence[Example] = (),
    k: int = 4,
    exclude_dev: Exclude = None,
    mmr_grid: Sequence[float] = MMR_GRID,
    gold: Gold = "all",
    names: Collection[str] = NAMES,
) -> PlainSelectors:
    """Build the plain selectors and the oracle for one pool; its questions are embedded once.

    Args:
        pool: the candidates; their programs also stand for the training queries of `fixed`.
        spec: how programs are read.
        embed: embeds questions; None leaves out dense, mmr and dpp.
        seed: of `random`.
        embed_tokens: embeds the tokens of questions; None leaves out set_bsr.
        dev: queries on which the trade-offs of MMR and DPP are chosen.
        k: picks that they are chosen for, and that `select_examples` returns.
        exclude_dev: per dev query, the positions it may not pick.
        mmr_grid: the trade-offs of MMR to try.
        gold: which structures of the dev queries' programs count for that choice.
        names: those to build, of `NAMES`; nothing is spent on the others.
    """
    examples = [{"source": example.source, "target": example.target} for example in pool]
    plain: dict[str, Baseline] = {
        "random": RandomSelector(examples, seed=seed, k=k),
        "fixed": FixedSelector(examples, spec=spec, k=k),
        "bm25": BM25Selector(examples, k=k),
        "bm25_coverage": BM25CoverageSelector(examples, k=k),
        "oracle": OracleSelector(examples, spec=spec, k=k),
    }
    left_out: dict[str, str] = {}
    mmr = dpp = None
    if embed is None:
        left_out |= dict.fromkeys(("dense", "mmr", "dpp"), "no embeddings were given")
    elif {"dense", "mmr", "dpp"}.intersection(names):
        vectors = np.asarray(embed([example.source for example in pool]))
        plain["dense"] = DenseSelector(examples, embed=embed, vectors=vectors, k=k)
        if "mmr" in names:
            mmr = choose_mmr(embed, pool, dev, spec, k, grid=mmr_grid, gold=gold, exclude=exclude_dev, vectors=vectors)
            plain["mmr"] = MMRSelector(examples, embed=embed, vectors=vectors, lambda_mult=mmr.lambda_mult, k=k)
        if "dpp" in names:
            dpp = choose_dpp(embed, pool, dev, spec, k, gold=gold, exclude=exclude_dev, vectors=vectors)
            plain["dpp"] = DPPSelector(examples, embed=embed, vectors=vectors, lam=dpp.lambda_mult, k=k)
    if embed_tokens is None:
        left_out["set_bsr"] = "no embeddings of tokens were given"
    else:
        plain["set_bsr"] = SetBSRSelector(examples, embed_tokens=embed_tokens, k=k)
    return PlainSelectors(
        {name: plain[name] for name in NAMES if name in names and name in plain},
        left_out={name: reason for name, reason in left_out.items() if name in names},
        mmr=mmr,
        dpp=dpp,
    )


def choose_mmr(
    embed: Embed,
    pool: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    k: int,
    *,
    grid: Sequence[float] = MMR_GRID,
    exclude: Exclude = None,
    gold: Gold = "all",
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
        gold: which structures of the dev queries' programs count.
        vectors: (N, D), the pool's embeddings where they are already known.
    """

    def selector(embed: Embed, vectors: np.ndarray, value: float) -> Baseline:
        return MMRSelector([{"source": e.source} for e in pool], embed=embed, vectors=vectors, lambda_mult=value)

    return _choose(selector, 0.5, embed, pool, dev, spec, k, grid=grid, exclude=exclude, gold=gold, vectors=vectors)


def choose_dpp(
    embed: Embed,
    pool: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    k: int,
    *,
    grid: Sequence[float] = DPP_GRID,
    exclude: Exclude = None,
    gold: Gold = "all",
    vectors: np.ndarray | None = None,
) -> MMRChoice:
    """The trade-off λ of the determinantal point process, chosen as MMR's is; 0.1 where there is nothing to choose on.

    Args:
        embed: as for `choose_mmr`, like all that follow.
        pool: the candidates.
        dev: the queries.
        spec: how programs are read.
        k: picks per query.
        grid: the trade-offs to try.
        exclude: per dev query, the positions it may not pick.
        gold: which structures of the dev queries' programs count.
        vectors: (N, D), the pool's embeddings where they are already known.
    """

    def selector(embed: Embed, vectors: np.ndarray, value: float) -> Baseline:
        return DPPSelector([{"source": e.source} for e in pool], embed=embed, vectors=vectors, lam=value)

    return _choose(selector, 0.1, embed, pool, dev, spec, k, grid=grid, exclude=exclude, gold=gold, vectors=vectors)


def _choose(
    selector: Callable[[Embed, np.ndarray, float], Baseline],
    default: float,
    embed: Embed,
    pool: Sequence[Example],
    dev: Sequence[Example],
    spec: ProgramSpec,
    k: int,
    *,
    grid: Sequence[float],
    exclude: Exclude,
    gold: Gold,
    vectors: np.ndarray | None,
) -> MMRChoice:
    """The trade-off with which `selector(embed, vectors, trade-off)` covers most."""
    pool_structures, needed = structure_matrices(spec, [e.target for e in pool], [e.target for e in dev])
    if gold == "pool":
        needed, pool_structures = within_pool(needed, pool_structures)
    kept = np.flatnonzero(np.diff(needed.indptr)).tolist()
    if vectors is None:
        vectors = np.asarray(embed([example.source for example in pool]))
    chosen_on = "dev"
    if kept:
        questions = [dev[i].source for i in kept]
        embedded, needed = np.asarray(embed(questions)), needed[kept]
        exclude = None if exclude is None else [exclude[i] for i in kept]
    else:
        chosen_on = "pool"
        usable = np.flatnonzero(np.diff(pool_structures.indptr))
        kept = usable[:: max(1, len(usable) // POOL_QUERIES)].tolist()
        questions = [pool[i].source for i in kept]
        embedded, needed = vectors[kept], pool_structures[kept]
        sources = np.array([example.source for example in pool], dtype=object)
        exclude = [np.flatnonzero(sources == question) for question in questions]
        if not kept or k > len(pool) - max(map(len, exclude)):
            return MMRChoice(lambda_mult=default, chosen_on="nothing")
    coverage = {}
    for value in grid:
        positions = selector(lambda _: embedded, vectors, value).pick(questions, k, exclude)
        coverage[float(value)] = float(coverage_by_step(recall_by_step(needed, pool_structures, positions))[-1])
    best = max(coverage, key=lambda value: coverage[value])
    return MMRChoice(lambda_mult=best, coverage=coverage, n=len(kept), chosen_on=chosen_on)
