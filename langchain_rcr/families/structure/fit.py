"""The head of the `structure` family: which structures will this question's program have?

In closed form, before any gradient descent on the policy:
1. Kernel ridge regression of the structures on the training questions. It also gives, exactly, what would have been
predicted for each question had its fold been left out (`Folds`).
2. Local evidence of phrases (`cues`), which is refitted without each fold of programs for held-out questions.
3. The worth of a need, which depends on its size and rarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.items import Item
from langchain_rcr.basics.progress import track
from langchain_rcr.basics.rows import DoubleArray, FloatArray, IntArray
from langchain_rcr.families.folds import CLUSTER, PROGRAM, Folds
from langchain_rcr.families.structure import COST, COST_OF_MANY, cues
from langchain_rcr.families.structure.homes import home_hashes, learn_homes
from langchain_rcr.families.structure.needs import Needs, NumpyNeedEncoder

RARITY = 0.5
"""δ: a structure is worth (idf / mean idf)^δ. In trials on COVR, GeoQuery and SQL 0 to 1 differ by a point."""
LABEL, PAIR = 8.0, 3.0
"""Weights of a single label and of a structure of two nodes. A model can't write a label it wasn't shown, and hardly
puts one where it was never shown. With 3 and 2, one question in 36 of COVR with few pairs wasn't shown a label known to
be needed, as larger structures weighed more; with 8, one in 140. On folds of SQL and GeoQuery 8 costs 0.1 points of
coverage; 3 makes up for the pairs that it costs."""
_UNKNOWN = 0.5
"""Likelihood of each structure without a fit, from which learning can go either way."""
_HAS = 0.5
"""A program has a column if it has at least this share of the column's structures. Programs of the pool have all or
none, but what is read back from a checkpoint is off by rounding, and gradient descent shifts it."""


def fit(encoder: NumpyNeedEncoder, questions: Sequence[Item], *, seed: int) -> None:
    """See `Family.fit`; questions whose program has no column don't become landmarks."""
    targets = _learn(encoder, questions, seed)
    mean = targets.mean(axis=0)
    dual = np.linalg.solve(encoder.landmarks.ridged(), targets - mean)
    bags = encoder.landmarks.bags
    small = (targets[:, encoder.inventory.small] >= _HAS).astype(np.float32)
    phrases = cues.phrases(bags)
    present = cues.incidence(bags, phrases, phrases.max(initial=-1) + 1)
    fitted = {"dual": dual.astype(np.float32), "mean": mean.astype(np.float32)}
    encoder.put({**fitted, "phrases": phrases, "speaks": cues.fit(present, small)})
    _weigh(encoder, targets)


def begin(encoder: NumpyNeedEncoder, questions: Sequence[Item], *, seed: int) -> None:
    """Give E_x the questions to compare with, as `fit` does, but not what they need, which is left to GRPO."""
    _learn(encoder, questions, seed)
    encoder.put({"mean": np.full(len(encoder.inventory), _UNKNOWN, dtype=np.float32)})


def _learn(encoder: NumpyNeedEncoder, questions: Sequence[Item], seed: int) -> FloatArray:
    """Make landmarks of the questions whose program has a column; returns their columns (M, D)."""
    gold = encoder.inventory.rows([question.target for question in questions])
    if encoder.homes:
        sole, elsewhere = learn_homes(gold, home_hashes([question.home for question in questions]))
        encoder.put({"sole": sole, "elsewhere": np.array(elsewhere, dtype=np.float32)})
    known: IntArray = np.flatnonzero(np.diff(gold.starts))
    if len(known) > encoder.most:
        rng = np.random.default_rng([seed, 5])
        known = np.sort(rng.choice(known, encoder.most, replace=False))
    others = np.setdiff1d(np.arange(len(questions)), known).tolist()
    encoder.learn([questions[row] for row in known.tolist()], [questions[row] for row in others])
    return np.asarray(gold.select(known))


def held_out(encoder: NumpyNeedEncoder, questions: Sequence[Item], folds: Folds, ways: IntArray) -> Needs:
    """See `Family.held_out`; questions that E_x was not fitted to are featurised as usual."""
    features = encoder.featurize([question.asked for question in questions])
    landmark = encoder.landmark_of(questions)
    rows = np.flatnonzero(landmark >= 0)
    if not (len(rows) and encoder.tensors()["dual"].any()):  # not fitted: nothing is known about them
        return features
    dual, mean = (encoder.tensors()[name].astype(np.float64) for name in ("dual", "mean"))
    inverse = np.linalg.inv(encoder.landmarks.ridged())
    targets = (np.linalg.solve(inverse, dual) + mean).astype(np.float32)
    small = (targets[:, encoder.inventory.small] >= _HAS).astype(np.float32)
    present = cues.incidence(encoder.landmarks.bags, encoder.phrases, len(encoder.speaks) - 1)
    numbers = folds.of_hashes(encoder.learnt[: len(dual)].tolist())

    @cache
    def by_phrases(way: int) -> FloatArray:
        """(M, C) likelihoods for the landmarks, by phrases refitted without each fold."""
        likely, fold = np.zeros(small.shape, dtype=np.float32), numbers[:, way]
        for number in track(_folds(fold), "leaving out each fold"):
            mine, others = (np.flatnonzero(held) for held in (fold == number, fold != number))
            weights = cues.fit(present.select(others), small[others])
            likely[mine] = cues.likelihoods(present.select(mine), weights)
        return likely

    raw = features.likeness[:, : len(dual)] @ dual.astype(np.float32) + mean.astype(np.float32)
    if features.raw is not None:  # from additions and descriptions, too
        raw[landmark < 0] = features.raw[landmark < 0]
    local = features.local
    for way in np.unique(ways[rows]).tolist():
        fold = numbers[:, way]
        if len(_folds(fold)) < 2:
            continue
        mine = rows[(ways[rows] == way) & (fold[landmark[rows]] >= 0)]
        raw[mine] = without_folds(inverse, dual, targets, fold)[landmark[mine]]
        # Phrases can't learn that structures exclude each other, so folds of programs will do in place of clusters.
        local[mine] = by_phrases(PROGRAM if way == CLUSTER else way)[landmark[mine]]
    return replace(features, local=local, raw=raw)


def _folds(fold: IntArray) -> list[int]:
    return sorted({*fold.tolist()} - {-1})


def without_folds(
    inverse: NDArray[np.floating[Any]], dual: DoubleArray, targets: FloatArray, fold: IntArray
) -> FloatArray:
    """What ridge regression predicts for every row without its fold, (M, D); 0 for rows in no fold.

    With G = (K + ρI)⁻¹ (M, M), `inverse`, and α = G(Y − μ) (M, D), `dual`, the predictions for fold b are
    Y_b − G_bb⁻¹ α_b; μ stays. `fold` (M,) has the number of each row's fold; −1: in none.
    """
    raw = np.zeros_like(targets)
    for number in track(_folds(fold), "predicting without each fold"):
        rows = np.flatnonzero(fold == number)
        raw[rows] = targets[rows] - np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
    return raw


def _weigh(encoder: NumpyNeedEncoder, targets: FloatArray) -> None:
    """Set what each structure is worth: more for fewer nodes and for fewer programs that have it.

    Structures of programs that don't parse are worth their share of the programs, since a few among many that parse
    are more likely "TODO" than of a dialect that the parser doesn't know.
    """
    owner, unread = encoder.inventory.owner, encoder.inventory.unread
    share = (targets > 0).mean(axis=0)[owner]
    idf = -np.log(np.clip(share, 1 / len(targets), 0.98))  # structures of all programs are worth a little too
    by_size = encoder.tensors()["by_size"].copy()
    by_size[:2] = np.log(np.array([LABEL, PAIR], dtype=np.float32))[: len(by_size)]
    worth = (RARITY * np.log(idf / idf.mean())).astype(np.float32)
    worth[unread] += np.log(max(1, int(targets[:, owner[unread]].any(axis=1).sum())) / len(targets))
    cost = np.log(COST_OF_MANY if encoder.homes else COST)
    encoder.put({"worth": worth, "by_size": by_size, "cost": np.array(cost, dtype=np.float32)})
