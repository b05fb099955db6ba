"""The head of the `structure` family: which structures will this question's program have?

In closed form or nearly so, before any gradient descent on the policy:
1. Kernel ridge regression of the structures on the training questions, and with it, exactly, what it would have
   predicted for each question had its fold been left out (`Folds`).
2. The local evidence of phrases (`cues`), refitted without each fold of programs.
3. The composition nets learn on both as they are for held-out questions. From the predictions for questions that the
   kernel has seen, which are nearly perfect, they would learn to trust every prediction.
4. What a need is worth goes by its size and by how rare it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from langchain_rcr.families.structure import cues
from langchain_rcr.families.structure.encoders import NeedEncoder, Needs
from langchain_rcr.families.structure.inventory import Inventory
from langchain_rcr.families.structure.nets import INPUTS, NETS, PROGRAMS, Composition, padded
from langchain_rcr.folds import CLUSTER, PROGRAM, Folds
from langchain_rcr.items import Item
from langchain_rcr.progress import track

MOST_LANDMARKS = 4000
"""Training questions that the kernel compares with; of more, a sample. The fit takes time by its cube."""
PRECISION = 0.9
"""Of its phrases, from which on a label's local evidence is a floor under its likelihood; ungated it cost 0.6 points of
coverage on one set of trials."""
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
_PUPILS = 1000
"""Held-out questions of each way that the nets learn on: some hundreds of structures of each are enough."""
STEPS, _BATCH, _LR = 600, 1024, 0.01
_CHUNK = 128
_ABSENT = 0.1
"""The share of the plainly absent structures that the nets learn on, so that they know them."""
_HAS = 0.5
"""The share of a column's structures from which on a program has it. Programs of the pool have all or none; what is
read back from a checkpoint is off by rounding, and moves when gradient descent has moved the weights."""
_THREADS = Lock()
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What would have been predicted for M landmarks in one way of holding out, each without its fold.

    Args:
        fold: (M,) the fold of each; −1: it is in none.
        raw: (M, D) likelihoods by the kernel.
        local: (M, C) likelihoods by the phrases.
        frequency: (F, D) shares of programs that each column is in, without each fold.
        together: (F, S) as in `NeedEncoder`, without each fold.
    """

    fold: _Ints
    raw: _Floats
    local: _Floats
    frequency: _Floats
    together: _Floats

    def needs(self, evidence: _Floats, rows: _Ints) -> Needs:
        """Features of some landmarks, each in its fold."""
        fold = self.fold[rows]
        unseen = np.zeros((len(rows), 0), dtype=np.float32)
        arrays = (self.raw[rows], self.frequency[fold], self.together[fold])
        return Needs(unseen, evidence[rows], self.local[rows], *arrays)


def fit(encoder: NeedEncoder, questions: Sequence[Item], folds: Folds, *, seed: int) -> None:
    """Fit E_x to the training questions' programs.

    Args:
        encoder: fitted in place.
        questions: the training questions with their programs; those whose program has no column are not landmarks.
        folds: of these questions.
        seed: of the sample and of the nets.
    """
    rng = np.random.default_rng([seed, 5])
    gold = np.asarray(encoder.inventory.rows([question.target for question in questions]))
    known: _Ints = np.flatnonzero(gold.any(axis=1))
    if len(known) > MOST_LANDMARKS:
        known = np.sort(rng.choice(known, MOST_LANDMARKS, replace=False))
    targets = gold[known]
    chosen = [questions[row] for row in known.tolist()]
    encoder.learn(chosen)
    composition = encoder.composition.cpu()

    mean = targets.mean(axis=0)
    inverse = encoder.landmarks.inverse()
    dual = inverse @ (targets - mean)
    bags = encoder.landmarks.views.bags
    have = targets[:, encoder.inventory.owner] >= _HAS
    small = (targets[:, encoder.inventory.small] >= _HAS).astype(np.float32)
    labels = _labels(encoder.inventory)
    phrases = cues.phrases(bags, encoder.vocabulary.words, small[:, labels])
    present = cues.incidence(bags, phrases, phrases.max(initial=-1) + 1)
    with torch.no_grad():
        encoder.dual.copy_(torch.from_numpy(dual))
        encoder.mean.copy_(torch.from_numpy(mean))
        encoder.frequency.copy_(torch.from_numpy(mean))
        encoder.together.copy_(torch.from_numpy(_together(composition, have, np.zeros(len(have), np.int64))[-1]))
        encoder.phrases.copy_(torch.from_numpy(phrases))
        programs = len(set(encoder.learnt[:, 1].tolist()))
        composition.share.fill_(programs / (programs + PROGRAMS))
        encoder.speaks = torch.from_numpy(cues.fit(present, small, labels=labels)).to(encoder.mean.device)

    left_out = _left_out(encoder, targets, inverse, dual, present, folds)
    evidence = encoder.evidence(chosen, encoder.landmarks.views)
    parts = []
    for way in left_out:
        rows = np.flatnonzero(way.fold >= 0)
        if len(rows) > _PUPILS:
            rows = np.sort(rng.choice(rows, _PUPILS, replace=False))
        parts.append((way.needs(evidence, rows), targets[rows]))
    with _one_thread():
        _train(composition, [_pairs(composition, needs, wanted, rng) for needs, wanted in parts], seed)
        composition.to(encoder.mean.device)
        _weigh(encoder, targets)
        if parts:
            _trust_phrases(encoder, left_out[0], targets)


@contextmanager
def _one_thread() -> Iterator[None]:
    """So small are the nets that threads of torch wait for each other: with two they took up to twice the time.

    One fit at a time: a second that begins meanwhile would take the one thread for the setting to go back to.
    """
    with _THREADS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


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
    bags, count = encoder.landmarks.views.bags, len(encoder.speaks) - 1
    present = cues.incidence(bags, encoder.phrases.cpu().numpy(), count)
    left_out = _left_out(encoder, targets, inverse, dual, present, folds)
    raw = features.likeness @ dual.astype(np.float32) + mean.astype(np.float32)
    frequency, together = (
        np.tile(tensor.detach().cpu().numpy(), (len(questions), 1)) for tensor in (encoder.frequency, encoder.together)
    )
    local = features.local.copy()
    for number, way in enumerate(left_out):
        mine = rows[(ways[rows] == number) & (way.fold[landmark[rows]] >= 0)]
        at = landmark[mine]
        raw[mine], local[mine] = way.raw[at], way.local[at]
        frequency[mine], together[mine] = way.frequency[way.fold[at]], way.together[way.fold[at]]
    return replace(features, local=local, raw=raw, frequency=frequency, together=together)


def _left_out(
    encoder: NeedEncoder,
    targets: _Floats,
    inverse: NDArray[np.float64],
    dual: NDArray[np.float64],
    present: csr_array,
    folds: Folds,
) -> list[LeftOut]:
    """Predictions for the landmarks in every way of holding out that there is.

    Phrases, which can't learn that structures exclude each other, are refitted without each fold of programs alone.
    """
    owner, small = encoder.inventory.owner, (targets[:, encoder.inventory.small] >= _HAS).astype(np.float32)
    labels = _labels(encoder.inventory)
    numbers = folds.of_hashes(encoder.learnt[:, 0 if folds.own_program else 1].tolist())
    local = np.zeros(small.shape, dtype=np.float32)
    left_out: list[LeftOut] = []
    for way in (PROGRAM, CLUSTER):
        fold = np.full(len(targets), -1)
        there = numbers[:, way] >= 0
        fold[there] = np.unique(numbers[there, way], return_inverse=True)[1]
        count = fold.max(initial=-1) + 1
        if count < 2:
            break  # of fewer programs than two, there are no clusters either
        for number in track(range(count if way == PROGRAM else 0), "leaving out each program"):
            mine, others = fold == number, fold != number
            local[mine] = cues.likelihoods(present[mine], cues.fit(present[others], small[others], labels=labels))
        raw, frequency = without_folds(inverse, dual, targets, fold)
        together = _together(encoder.composition, targets[:, owner] >= _HAS, fold)
        left_out.append(LeftOut(fold, raw, local, frequency, together))
    return left_out


def _labels(inventory: Inventory) -> NDArray[np.bool_]:
    """(C,) which of the columns of small structures have a label."""
    return np.isin(inventory.small, inventory.owner[inventory.lengths == 1])


def without_folds(
    inverse: NDArray[np.float64], dual: NDArray[np.float64], targets: _Floats, fold: _Ints
) -> tuple[_Floats, _Floats]:
    """What ridge regression predicts for every row without its fold, and how frequent columns are then.

    With G = (K + ρI)⁻¹ and α = G(Y − μ) those of fold b are Y_b − G_bb⁻¹ α_b; μ stays.

    Args:
        inverse: G (M, M).
        dual: α (M, D).
        targets: Y (M, D).
        fold: (M,) from 0; −1: in none.

    Returns:
        Predictions (M, D), 0 for rows in no fold, and shares (F, D) of the rows outside each fold.
    """
    raw = np.zeros_like(targets)
    frequency = np.zeros((fold.max(initial=-1) + 1, targets.shape[1]), dtype=np.float32)
    for number in track(range(len(frequency)), "predicting without each fold"):
        rows = np.flatnonzero(fold == number)
        raw[rows] = targets[rows] - np.linalg.solve(inverse[np.ix_(rows, rows)], dual[rows])
        frequency[number] = targets[fold != number].mean(axis=0)
    return raw, frequency


def _together(composition: Composition, have: NDArray[np.bool_], fold: _Ints) -> _Floats:
    """(F + 1, S) how often each structure is there where all its parts are, without each fold; the last: of all."""
    parts = padded(composition.pairs.cpu().numpy(), have.shape[1])
    whole = np.ones_like(have)
    for place in parts.T:
        more = place >= 0
        whole[:, more] &= have[:, place[more]]
    counts = []
    for rows in (have, whole):
        by_fold = np.stack([rows[fold == number].sum(axis=0) for number in range(fold.max() + 1)])
        total = rows.sum(axis=0)
        counts.append(np.concatenate([total - by_fold, total[None]]))
    there, possible = counts
    share: _Floats = ((there + 0.5) / (np.maximum(there, possible) + 1)).astype(np.float32)
    return share


def _trust_phrases(encoder: NeedEncoder, way: LeftOut, targets: _Floats) -> None:
    """Find the labels whose phrases are right where they speak, on held-out questions."""
    rows = way.fold >= 0
    inventory = encoder.inventory
    column = inventory.owner[inventory.lengths == 1]
    place = np.searchsorted(inventory.small, column)
    said, there = way.local[rows][:, place] > 0.5, targets[rows][:, column] > 0
    right, total = (said & there).sum(axis=0), said.sum(axis=0)
    trusted = np.zeros(len(inventory.names), dtype=bool)
    trusted[inventory.lengths == 1] = (total > 0) & (right >= PRECISION * total)
    encoder.trusted.copy_(torch.from_numpy(trusted))


def _weigh(encoder: NeedEncoder, targets: _Floats) -> None:
    """What each structure is worth: the more, the fewer nodes it has and the fewer programs have it."""
    share = (targets > 0).mean(axis=0)[encoder.inventory.owner]
    idf = -np.log(np.clip(share, 1 / len(targets), 0.98))  # those of all programs are worth a little, too
    with torch.no_grad():
        encoder.worth.copy_(torch.from_numpy(RARITY * np.log(idf / idf.mean())))
        encoder.by_size[:2] = torch.log(torch.tensor([LABEL, PAIR])[: len(encoder.by_size)])
        encoder.cost.fill_(np.log(COST))


def _pairs(
    composition: Composition, needs: Needs, targets: _Floats, rng: np.random.Generator
) -> tuple[_Floats, _Floats, _Floats]:
    """What the nets learn on: P pairs of a question and a structure that other folds have, too.

    Of the structures that are plainly absent, which are most, a sample. Those that always go together count as one.

    Returns:
        Inputs (P, INPUTS), targets (P,), weights (P,).
    """
    owner = composition.owner.numpy()
    share = 1 / np.bincount(owner).astype(np.float32)[owner]
    inputs, labels, weights = [np.empty((0, INPUTS), np.float32)], [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for rows in np.array_split(np.arange(len(needs)), len(needs) // _CHUNK + 1):
        with torch.no_grad():
            _, evidence, local, raw, frequency, together = map(torch.from_numpy, needs.select(rows).arrays())
            q = composition.local(local, together)
            seen = composition.inputs(raw, q, together, frequency, evidence)
        wanted = targets[rows][:, owner]
        telling = composition.telling(seen).numpy() | (wanted > 0) | (rng.random(wanted.shape) < _ABSENT)
        kept = np.flatnonzero(telling & (frequency.numpy()[:, owner] > 0))
        inputs.append(np.stack([column.numpy().take(kept) for column in seen]).T.copy())  # in blocks, in the cache
        labels.append(wanted.take(kept))
        weights.append(share[kept % len(share)])
    return np.concatenate(inputs), np.concatenate(labels), np.concatenate(weights)


def _train(composition: Composition, pairs: Sequence[tuple[_Floats, _Floats, _Floats]], seed: int) -> None:
    """Minimise the cross-entropy of all pairs by Adam with a rate that falls to 0, each net on batches of its own."""
    if not pairs:
        return
    inputs, labels, weights = (np.concatenate(part) for part in zip(*pairs, strict=True))
    generator = torch.Generator().manual_seed(seed)
    composition.start(generator)
    seen, wanted, counts = (torch.from_numpy(array) for array in (inputs, labels, weights / weights.mean()))
    parameters = [*composition.weights, *composition.biases]
    optimizer = torch.optim.Adam(parameters, lr=_LR, fused=True)
    batch = min(_BATCH, len(seen))
    for step in track(range(STEPS), "fitting the nets"):
        optimizer.param_groups[0]["lr"] = _LR * (1 - step / STEPS)
        rows = torch.randint(len(seen), (NETS * batch,), generator=generator)
        odds = composition.odds(seen.index_select(0, rows).view(NETS, batch, INPUTS).transpose(1, 2)).flatten()
        targets, shares = wanted.index_select(0, rows), counts.index_select(0, rows)
        total = torch.nn.functional.binary_cross_entropy_with_logits(odds, targets, weight=shares, reduction="sum")
        optimizer.zero_grad()
        torch.autograd.backward(total / batch)  # each net by the mean over its own batch
        optimizer.step()
