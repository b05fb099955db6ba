"""The head of the `structure` family: which structures will this question's program have?

Two steps, both before any step of gradient descent on the policy:
1. Kernel ridge regression of the structures on the training questions, in closed form, and with it, exactly, what it
   would have predicted for each question had its program, or all programs like it, been left out.
2. The composition net learns on those left-out predictions. On the predictions for questions that it has seen, which
   are all but perfect, it would learn that every prediction can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import squareform

from langchain_rcr.encoders.composition import INPUTS, Composition
from langchain_rcr.encoders.inventory import dense
from langchain_rcr.encoders.structure import NeedEncoder, Needs
from langchain_rcr.items import Item
from rcr_trainer.data import Example

MOST_LANDMARKS = 4000
"""Training questions that the kernel compares with; of more, a sample. The fit takes time by its cube."""
RIDGE = 0.01
_ALIKE = 0.25
"""Programs whose structures' Jaccard is above this on average are left out together."""
_MOST_CLUSTERED = 4000
_STEPS, _BATCH, _LR = 600, 8192, 0.01
_CHUNK = 128
_ABSENT = 0.1
"""The share of the plainly absent columns that the net learns on, so that it knows them."""


def fit_needs(encoder: NeedEncoder, queries: Sequence[Example], *, own_program: bool, seed: int) -> Needs:
    """Fit E_x to the training queries' programs.

    Args:
        encoder: fitted in place.
        queries: the training queries; those whose program doesn't parse are no landmarks.
        own_program: whether held-out questions may find their own program in the pool: then predictions leave out the
            question alone, not its program.
        seed: of the sample and of the net.

    Returns:
        The queries' features for further training: likelihoods predicted without the query's own program.
    """
    rng = np.random.default_rng([seed, 5])
    spec, device = encoder.inventory.spec, encoder.mean.device
    gold = dense(encoder.inventory.rows([query.target for query in queries]), encoder.dim)
    known: NDArray[np.int64] = np.flatnonzero(gold.any(axis=1))
    if len(known) > MOST_LANDMARKS:
        known = np.sort(rng.choice(known, MOST_LANDMARKS, replace=False))
    chosen = [queries[row] for row in known.tolist()]
    encoder.learn([query.source for query in chosen])
    features = encoder.featurize([Item(query.source) for query in queries])
    targets, size = gold[known], len(known)

    mean = targets.mean(axis=0)
    kernel = features.likeness[known].astype(np.float64)
    inverse = cho_solve(cho_factor(kernel + RIDGE * np.eye(size)), np.eye(size))
    dual = inverse @ (targets - mean)
    with torch.no_grad():
        encoder.dual.copy_(torch.from_numpy(dual))
        encoder.mean.copy_(torch.from_numpy(mean))
        encoder.frequency.copy_(torch.from_numpy(mean))

    names = [query.source if own_program else spec.key(query.target) for query in chosen]
    groupings = [np.unique(names, return_inverse=True)[1]]
    if size <= _MOST_CLUSTERED:
        groupings.append(_clusters(targets, encoder.inventory.sizes))
    parts = [_without_group(inverse, dual, targets, groups) for groups in groupings]
    evidence = features.evidence[known]
    inputs = [_pairs(encoder.composition.cpu(), *part, evidence, targets, rng) for part in parts]
    _train(encoder.composition, *(np.concatenate(column) for column in zip(*inputs, strict=True)), seed=seed)
    encoder.composition.to(device)

    raw, frequency = np.tile(mean, (len(queries), 1)), np.tile(mean, (len(queries), 1))
    others = np.setdiff1d(np.arange(len(queries)), known)
    raw[others] = features.likeness[others] @ dual.astype(np.float32) + mean
    raw[known], frequency[known] = parts[0]
    return Needs(features.likeness, features.evidence, raw.astype(np.float32), frequency.astype(np.float32))


def _without_group(
    inverse: NDArray[np.float64], dual: NDArray[np.float64], targets: NDArray[np.float32], groups: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What ridge regression predicts for every row when its group is left out, and how frequent columns are then.

    With G = (K + ρI)⁻¹ and α = G(Y − μ): the left-out predictions of group b are Y_b − G_bb⁻¹ α_b (μ stays).
    """
    raw, frequency = np.empty_like(targets), np.empty_like(targets)
    total = targets.sum(axis=0)
    for group in range(groups.max() + 1):
        rows = np.flatnonzero(groups == group)
        raw[rows] = targets[rows] - np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
        left = total - targets[rows].sum(axis=0)
        frequency[rows] = np.maximum(left, 0) / max(1, len(targets) - len(rows))
    return raw, frequency


def _clusters(targets: NDArray[np.float32], sizes: NDArray[np.float32]) -> NDArray[np.int64]:
    """Groups of programs that are alike by the Jaccard of their structures."""
    if len(targets) < 2:
        return np.zeros(len(targets), dtype=np.int64)
    shared = (targets * sizes) @ targets.T
    own = np.diag(shared)
    distance = 1 - shared / np.maximum(own[:, None] + own - shared, 1e-6)
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(np.maximum(distance, 0), checks=False), "average")
    groups: NDArray[np.int64] = fcluster(tree, 1 - _ALIKE, "distance").astype(np.int64) - 1
    return groups


def _pairs(
    composition: Composition,
    raw: NDArray[np.float32],
    frequency: NDArray[np.float32],
    evidence: NDArray[np.float32],
    targets: NDArray[np.float32],
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs (P, INPUTS) and targets (P,) of the net: pairs of a question and a column that is left without its group.

    Of the columns that are plainly absent, which are most, a sample.
    """
    inputs, labels = [np.empty((0, INPUTS), np.float32)], [np.empty(0, np.float32)]
    for start in range(0, len(raw), _CHUNK):
        rows = slice(start, start + _CHUNK)
        with torch.no_grad():
            seen = composition.inputs(*(torch.from_numpy(a[rows]) for a in (raw, frequency, evidence))).numpy()
        telling = (seen[..., 0] > 0.005) | (seen[..., 2] > 0.05) | (targets[rows] > 0)
        telling |= rng.random(telling.shape) < _ABSENT
        kept = telling & (frequency[rows] > 0)
        inputs.append(seen[kept])
        labels.append(targets[rows][kept])
    return np.concatenate(inputs), np.concatenate(labels)


def _train(composition: Composition, inputs: NDArray[np.float32], labels: NDArray[np.float32], *, seed: int) -> None:
    if not len(inputs):
        return
    generator = torch.Generator().manual_seed(seed)
    seen, wanted = torch.from_numpy(inputs), torch.from_numpy(labels)
    optimizer = torch.optim.Adam(composition.parameters(), lr=_LR)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _LR * (1 - step / _STEPS)
        rows = torch.randint(len(seen), (min(_BATCH, len(seen)),), generator=generator)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(composition(seen[rows]), wanted[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
