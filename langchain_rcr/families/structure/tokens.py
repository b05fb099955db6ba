"""A question as a bag of its words in their contexts: words that mean alike there are alike, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FloatArray = NDArray[np.float32]

_WIDTH = 4.0
"""γ of the kernel exp(−γ · (1 − cosine)) of two words."""
_RARITY = 12.0
"""γ of the kernel that counts how many training words are like a word."""
_UNSEEN = 1e-4
_MOST = 1024
_SMALLEST = 1e-3
_BLOCK = 1 << 13


class TokenBags(nn.Module):
    """Token vectors of a text → one unit vector; inner products sum a kernel over all pairs of tokens, scaled.

    Tokens weigh as −log of the share of training tokens that are like them. Exact for texts whose tokens are among the
    K anchors, else by the Nyström approximation; anchors are far from each other, so that rare words have theirs.

    Args:
        anchors: K.
        dim: d of token vectors.
        rank: length of the vectors; at most K.
    """

    centre: Tensor
    anchors: Tensor
    mass: Tensor
    root: Tensor

    def __init__(self, anchors: int, dim: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("anchors", torch.zeros(anchors, dim))
        self.register_buffer("mass", torch.zeros(anchors))
        self.register_buffer("root", torch.zeros(anchors, rank))

    @classmethod
    def of(cls, texts: Sequence[FloatArray]) -> TokenBags:
        """From the tokens (T_i, d) of training texts, at least one in all."""
        tokens = np.concatenate(texts)
        centre = tokens.mean(axis=0)
        tokens = _unit(tokens - centre)
        anchors = tokens[_far_apart(tokens, _MOST)]
        values, vectors = np.linalg.eigh(_alike(anchors, anchors).astype(np.float64))
        kept = values > _SMALLEST
        root = (vectors[:, kept] / np.sqrt(values[kept])).astype(np.float32)
        nearest = np.concatenate(
            [(tokens[start : start + _BLOCK] @ anchors.T).argmax(axis=1) for start in range(0, len(tokens), _BLOCK)]
        )
        mass = (np.bincount(nearest, minlength=len(anchors)) / len(tokens)).astype(np.float32)
        made = cls(len(anchors), tokens.shape[1], root.shape[1])
        for name, array in (("centre", centre), ("anchors", anchors), ("mass", mass), ("root", root)):
            getattr(made, name).copy_(torch.from_numpy(array))
        return made

    @property
    def rank(self) -> int:
        """The length of the vectors."""
        return int(self.root.shape[1])

    def vectors(self, texts: Sequence[FloatArray]) -> FloatArray:
        """(N, rank) unit vectors of texts given by their tokens (T_i, d); zeros for one without tokens."""
        arrays = (self.centre, self.anchors, self.mass, self.root)
        centre, anchors, mass, root = (tensor.cpu().numpy() for tensor in arrays)
        out = np.zeros((len(texts), len(anchors)), dtype=np.float32)
        start = 0
        while start < len(texts):
            stop, count = start, 0
            while stop < len(texts) and (stop == start or count + len(texts[stop]) <= _BLOCK):
                count += len(texts[stop])
                stop += 1
            tokens = _unit(np.concatenate(texts[start:stop]).astype(np.float32) - centre)
            alike = _alike(tokens, anchors)
            weight = -np.log(np.minimum(alike ** (_RARITY / _WIDTH) @ mass, 1) + _UNSEEN)
            owner = np.repeat(np.arange(start, stop), [len(text) for text in texts[start:stop]])
            np.add.at(out, owner, alike * weight[:, None])
            start = stop
        return _unit(out @ root)


def _alike(one: FloatArray, other: FloatArray) -> FloatArray:
    alike: FloatArray = np.exp(_WIDTH * (one @ other.T - 1))
    return alike


def _unit(vectors: FloatArray) -> FloatArray:
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    unit: FloatArray = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit


def _far_apart(vectors: FloatArray, most: int) -> NDArray[np.int64]:
    """Rows chosen one after the other, each the farthest from those before it, until all are near one."""
    nearest = np.full(len(vectors), -np.inf, dtype=np.float32)
    rows = [0]
    while len(rows) < most:
        nearest = np.maximum(nearest, vectors @ vectors[rows[-1]])
        row = int(nearest.argmin())
        if nearest[row] > 0.999:
            break
        rows.append(row)
    return np.array(rows, dtype=np.int64)
