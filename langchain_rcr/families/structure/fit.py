"""The head of the `structure` family: which structures will this question's program have?

Two steps, both before any step of gradient descent on the policy:
1. Kernel ridge regression of the structures on the training questions, in closed form, and with it, exactly, what it
   would have predicted for each question had its program, or all programs like it, been left out.
2. The composition nets learn on predictions with all programs like the question's left out, because the pool has none
   like those of held-out questions of a compositional split. From the predictions for questions that the kernel has
   seen, which are nearly perfect, they would learn to trust every prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_rcr.families.structure.clusters import AverageLinkage
from langchain_rcr.families.structure.encoders import NeedEncoder, Needs
from langchain_rcr.families.structure.inventory import dense
from langchain_rcr.families.structure.nets import INPUTS, Composition
from langchain_rcr.items import Item

MOST_LANDMARKS = 4000
"""Training questions that the kernel compares with; of more, a sample. The fit takes time by its cube."""
RIDGE = 0.01
"""ρ of the ridge regression, beside a kernel whose diagonal is 1; set by hand, no published trial compares values."""
CHOICES = ((0.15, 0.25), (0.15,), (0.25,))
"""Programs whose structures' Jaccard is above this on average are left out together; above either of two: both ways.
Which of them holds for the held-out questions depends on the data, so the development questions choose."""
MARGIN = 0.25
"""Points of development coverage by which a later choice must be better than those before it (docs/structure.md)."""
_FEWEST_GROUPS = 5
"""Of fewer, leaving one out leaves too little: then only each question's own program is left out."""
_STEPS, _BATCH, _LR = 600, 2048, 0.01
_CHUNK = 128
_Pairs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
_ABSENT = 0.1
"""The share of the plainly absent structures that the nets learn on, so that they know them."""


def fit(
    encoder: NeedEncoder,
    questions: Sequence[Item],
    *,
    own_program: bool,
    seed: int,
    choices: Sequence[tuple[float, ...]] = CHOICES[:1],
    judge: Callable[[], float] | None = None,
) -> Needs:
    """Fit E_x to the training questions' programs.

    Args:
        encoder: fitted in place.
        questions: the training questions with their programs; those whose program doesn't parse are no landmarks.
        own_program: whether held-out questions may find their own program in the pool: then predictions leave out the
            question alone, not its program.
        seed: of the sample and of the nets.
        choices: which programs to leave out together while the nets learn: how unlike those of training the held-out
            programs will be. Of several, `encoder.levels` says which was taken.
        judge: development coverage of the policy as it stands, in percent; None: the first choice is taken.

    Returns:
        The questions' features for further training: likelihoods predicted without the question's own program.
    """
    rng = np.random.default_rng([seed, 5])
    spec = encoder.inventory.spec
    gold = dense(encoder.inventory.rows([question.target for question in questions]), encoder.dim)
    known: NDArray[np.int64] = np.flatnonzero(gold.any(axis=1))
    if len(known) > MOST_LANDMARKS:
        known = np.sort(rng.choice(known, MOST_LANDMARKS, replace=False))
    chosen = [questions[row] for row in known.tolist()]
    encoder.learn(chosen)
    features = encoder.featurize([Item(question.source) for question in questions])
    targets, size = gold[known], len(known)

    mean = targets.mean(axis=0)
    kernel = features.likeness[known].astype(np.float64)
    inverse = _inverse(kernel + RIDGE * np.eye(size))
    dual = inverse @ (targets - mean)
    with torch.no_grad():
        encoder.dual.copy_(torch.from_numpy(dual))
        encoder.mean.copy_(torch.from_numpy(mean))
        encoder.frequency.copy_(torch.from_numpy(mean))

    names = [item.source if own_program else spec.key(item.target) for item in chosen]
    alone = _without_group(inverse, dual, targets, np.unique(names, return_inverse=True)[1])
    evidence = features.evidence[known]
    pairs: dict[float, _Pairs] = {}
    for level, groups in _clusters(targets, encoder.inventory.sizes).items():
        if groups.max() + 1 >= _FEWEST_GROUPS and any(level in choice for choice in choices):
            part = _without_group(inverse, dual, targets, groups)
            pairs[level] = _pairs(encoder.composition, *part, evidence, targets, rng)
    if not pairs:
        pairs[1.0], choices = _pairs(encoder.composition, *alone, evidence, targets, rng), [(1.0,)]
    _learn(encoder, pairs, choices if judge is not None else choices[:1], judge, seed)

    landmark = np.full(len(questions), -1)
    landmark[known] = np.arange(size)
    return _held_out(encoder, features, landmark, *alone)


def held_out(encoder: NeedEncoder, questions: Sequence[Item], *, own_program: bool) -> Needs:
    """What a fitted E_x would have predicted for queries had it not been fitted to their programs.

    Args:
        encoder: after `fit`, in this process or before it was saved.
        questions: any; those that it was not fitted to are featurised as usual.
        own_program: as for `fit`.

    Returns:
        The features that `fit` returned for its questions; without a `raw` where it was fitted to none of these.
    """
    features = encoder.featurize([Item(question.source) for question in questions])
    landmark = encoder.landmark_of(questions)
    if (landmark < 0).all():
        return features
    dual, mean = (tensor.detach().cpu().numpy().astype(np.float64) for tensor in (encoder.dual, encoder.mean))
    regular = encoder.kernel().astype(np.float64) + RIDGE * np.eye(len(dual))
    inverse = _inverse(regular)
    targets = (regular @ dual + mean).astype(np.float32)
    groups = np.unique(encoder.learnt.cpu().numpy()[:, 0 if own_program else 1], return_inverse=True)[1]
    return _held_out(encoder, features, landmark, *_without_group(inverse, dual, targets, groups))


def _held_out(
    encoder: NeedEncoder,
    features: Needs,
    landmark: NDArray[np.int64],
    raw: NDArray[np.float32],
    frequency: NDArray[np.float32],
) -> Needs:
    """Features with left-out predictions.

    Args:
        encoder: fitted.
        features: of N queries.
        landmark: (N,) which of the M landmarks each is; below 0: none.
        raw: (M, D) left-out predictions for the landmarks.
        frequency: (M, D) shares of the programs that are left.
    """
    dual, mean, usual = (t.detach().cpu().numpy() for t in (encoder.dual, encoder.mean, encoder.frequency))
    everyone = np.tile(usual, (len(landmark), 1))
    predicted = features.likeness @ dual + mean
    known = landmark >= 0
    predicted[known], everyone[known] = raw[landmark[known]], frequency[landmark[known]]
    return Needs(features.likeness, features.evidence, predicted, everyone)


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


def _learn(
    encoder: NeedEncoder,
    pairs: Mapping[float, _Pairs],
    choices: Sequence[tuple[float, ...]],
    judge: Callable[[], float] | None,
    seed: int,
) -> None:
    """Train the nets for each choice of what is left out together, and keep those that the judge finds best."""
    composition, device = encoder.composition, encoder.mean.device
    best, kept = -np.inf, None
    for choice in dict.fromkeys(tuple(level for level in choice if level in pairs) for choice in choices):
        if not choice:
            continue
        chosen = [pairs[level] for level in choice]
        inputs, labels, weights = (np.concatenate(part) for part in zip(*chosen, strict=True))
        _train(composition.cpu(), inputs, labels, weights, seed=seed)
        composition.to(device)
        coverage = judge() if judge is not None else 0.0
        if kept is None or coverage >= best + MARGIN:
            best, encoder.levels = coverage, choice
            kept = {name: tensor.clone() for name, tensor in composition.state_dict().items()}
    if kept is not None:
        composition.load_state_dict(kept)


def _inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a symmetric positive definite matrix."""
    inverse: NDArray[np.float64] = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(matrix))).numpy()
    return inverse


def _clusters(targets: NDArray[np.float32], sizes: NDArray[np.float32]) -> dict[float, NDArray[np.int64]]:
    """Groups of programs with similar structures, by their Jaccard similarity, for each number in `CHOICES`."""
    if len(targets) < 2:
        return {}
    shared = (targets * sizes) @ targets.T
    own = np.diag(shared)
    distance = 1 - shared / np.maximum(own[:, None] + own - shared, 1e-6)
    np.fill_diagonal(distance, 0)
    tree = AverageLinkage(np.maximum(distance, 0))
    return {level: tree.cut(1 - level) for level in sorted({level for choice in CHOICES for level in choice})}


def _pairs(
    composition: Composition,
    raw: NDArray[np.float32],
    frequency: NDArray[np.float32],
    evidence: NDArray[np.float32],
    targets: NDArray[np.float32],
    rng: np.random.Generator,
) -> _Pairs:
    """What the nets learn on: P pairs of a question and a structure that other groups have, too.

    Of the structures that are plainly absent, which are most, a sample. Those that always go together count as one.

    Returns:
        Inputs (P, INPUTS), targets (P,), weights (P,).
    """
    composition.cpu()
    owner = composition.owner.numpy()
    share = 1 / np.bincount(owner).astype(np.float32)[owner]
    inputs, labels, weights = [np.empty((0, INPUTS), np.float32)], [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for start in range(0, len(raw), _CHUNK):
        rows = slice(start, start + _CHUNK)
        with torch.no_grad():
            seen = composition.inputs(*(torch.from_numpy(a[rows]) for a in (raw, frequency, evidence))).numpy()
        wanted = targets[rows][:, owner]
        # All but plainly absent: likely by itself or by its parts (inputs 0 and 2), or there.
        telling = (seen[..., 0] > 0.005) | (seen[..., 2] > 0.05) | (wanted > 0)
        telling |= rng.random(telling.shape) < _ABSENT
        kept = telling & (frequency[rows][:, owner] > 0)
        inputs.append(seen[kept])
        labels.append(wanted[kept])
        weights.append(np.broadcast_to(share, kept.shape)[kept])
    return np.concatenate(inputs), np.concatenate(labels), np.concatenate(weights)


def _train(
    composition: Composition,
    inputs: NDArray[np.float32],
    labels: NDArray[np.float32],
    weights: NDArray[np.float32],
    seed: int,
) -> None:
    if not len(inputs):
        return
    generator = torch.Generator().manual_seed(seed)
    composition.start(generator)
    seen, wanted, counts = (torch.from_numpy(array) for array in (inputs, labels, weights / weights.mean()))
    for net in composition.nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=_LR)
        for step in range(_STEPS):
            optimizer.param_groups[0]["lr"] = _LR * (1 - step / _STEPS)
            rows = torch.randint(len(seen), (min(_BATCH, len(seen)),), generator=generator)
            odds = net(seen[rows]).squeeze(-1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, wanted[rows], weight=counts[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
