"""The head of the `structure` family: which structures will this question's program have?

Kernel ridge regression of the structures on the training questions, in closed form, and with it, exactly, what it would
have predicted for each question had its fold been left out (`Folds`). What a need is worth goes by its size and by how
rare it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_rcr.families.structure.encoders import NeedEncoder, Needs
from langchain_rcr.folds import CLUSTER, PROGRAM, Folds
from langchain_rcr.items import Item
from langchain_rcr.progress import track

MOST_LANDMARKS = 4000
"""Training questions that the kernel compares with; of more, a sample. The fit takes time by its cube."""
COST = 0.01
"""ε (`NeedEncoder`): the best or nearly so on folds of twelve tasks (COVR, GeoQuery, SQL). Chosen for each task by its
own folds, picks for test questions were no better on sixteen. γ of 0.7 and 0.5, with an ε that suits them, were no
better."""
RARITY = 0.5
"""δ: a structure is worth (idf / mean idf)^δ. In trials on COVR, GeoQuery and SQL 0 to 1 differ by a point."""
LABEL, PAIR = 8.0, 3.0
"""What a single label, and a structure of two nodes, count for: a model that isn't shown a label can't write it, nor
easily put it where it was never shown. With 3 and 2, one question in 36 of COVR with few pairs wasn't shown a label
that was known to be needed, since larger structures weighed more; with 8, one in 140. On folds of SQL and GeoQuery 8
costs 0.1 points of coverage; 3 makes up for the pairs that it costs."""
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


def fit(encoder: NeedEncoder, questions: Sequence[Item], *, seed: int) -> None:
    """Fit E_x to the training questions' programs.

    Args:
        encoder: fitted in place.
        questions: the training questions with their programs; those whose program has no column are not landmarks.
        seed: of the sample.
    """
    gold = np.asarray(encoder.inventory.rows([question.target for question in questions]))
    known: _Ints = np.flatnonzero(gold.any(axis=1))
    if len(known) > MOST_LANDMARKS:
        rng = np.random.default_rng([seed, 5])
        known = np.sort(rng.choice(known, MOST_LANDMARKS, replace=False))
    targets = gold[known]
    encoder.learn([questions[row] for row in known.tolist()])

    mean = targets.mean(axis=0)
    dual = encoder.landmarks.inverse() @ (targets - mean)
    with torch.no_grad():
        encoder.dual.copy_(torch.from_numpy(dual))
        encoder.mean.copy_(torch.from_numpy(mean))
    _weigh(encoder, targets)


def held_out(encoder: NeedEncoder, questions: Sequence[Item], folds: Folds, ways: _Ints) -> Needs:
    """What a fitted E_x would have predicted for questions had it not been fitted to their folds.

    Args:
        encoder: after `fit`, in this process or before it was saved.
        questions: any; those that it was not fitted to are featurised as usual.
        folds: those of the fit.
        ways: (N,) by which each is held out.
    """
    features = encoder.featurize([Item(question.source) for question in questions])
    landmark = encoder.landmark_of(questions)
    rows = np.flatnonzero(landmark >= 0)
    if not len(rows):
        return features
    dual, mean = (tensor.detach().cpu().numpy().astype(np.float64) for tensor in (encoder.dual, encoder.mean))
    inverse = encoder.landmarks.inverse()
    targets = (np.linalg.solve(inverse, dual) + mean).astype(np.float32)
    numbers = folds.of_hashes(encoder.learnt[:, 0 if folds.own_program else 1].tolist())
    raw = features.likeness @ dual.astype(np.float32) + mean.astype(np.float32)
    for way in (PROGRAM, CLUSTER):
        fold = np.full(len(targets), -1)
        there = numbers[:, way] >= 0
        fold[there] = np.unique(numbers[there, way], return_inverse=True)[1]
        if fold.max(initial=-1) < 1:
            break  # of fewer programs than two, there are no clusters either
        mine = rows[(ways[rows] == way) & there[landmark[rows]]]
        raw[mine] = without_folds(inverse, dual, targets, fold)[landmark[mine]]
    return replace(features, raw=raw)


def without_folds(inverse: NDArray[np.float64], dual: NDArray[np.float64], targets: _Floats, fold: _Ints) -> _Floats:
    """What ridge regression predicts for every row without its fold, (M, D); 0 for rows in no fold.

    With G = (K + ρI)⁻¹ and α = G(Y − μ) those of fold b are Y_b − G_bb⁻¹ α_b; μ stays.

    Args:
        inverse: G (M, M).
        dual: α (M, D).
        targets: Y (M, D).
        fold: (M,) from 0; −1: in none.
    """
    raw = np.zeros_like(targets)
    for number in track(range(fold.max(initial=-1) + 1), "predicting without each fold"):
        rows = np.flatnonzero(fold == number)
        raw[rows] = targets[rows] - np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
    return raw


def _weigh(encoder: NeedEncoder, targets: _Floats) -> None:
    """What each structure is worth: the more, the fewer nodes it has and the fewer programs have it."""
    share = (targets > 0).mean(axis=0)[encoder.inventory.owner]
    idf = -np.log(np.clip(share, 1 / len(targets), 0.98))  # those of all programs are worth a little, too
    with torch.no_grad():
        encoder.worth.copy_(torch.from_numpy(RARITY * np.log(idf / idf.mean())))
        encoder.by_size[:2] = torch.log(torch.tensor([LABEL, PAIR])[: len(encoder.by_size)])
        encoder.cost.fill_(np.log(COST))
