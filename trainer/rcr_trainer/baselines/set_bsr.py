"""Greedy Set-BERTScore-Recall: every query token should have a similar token, in context, in some pick.

BSR(x, z) = Σ_i max_j x_iᵀ z_j over unit vectors of contextual tokens; for a set, the maximum is over the tokens of all
its examples. Eq. 5 and 6 and Algorithm 1 of Gupta, Gardner and Singh, "Coverage-based Example Selection for In-Context
Learning", Findings of EMNLP 2023, arXiv 2305.14907.

Departures: the encoder is the caller's (the MiniLM of the embedding selectors; theirs is deberta-large-mnli); special
tokens are left out of the candidates, too; a prompt shows the first pick last, while theirs orders examples by their
own BSR (section 6.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.families.model_files import unit
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.data.arrays import distinct, row_blocks
from rcr_trainer.data.coverage import greedy_set_cover

_PRODUCTS = 1 << 22  # token similarities held in memory at once: 16 MiB
_TEXTS = 4096  # questions embedded at once


class SetBSRSelector(Baseline):
    """At each step, picks the example that adds most to the set's BERTScore-Recall of the query.

    The pool's token vectors stay in memory (3,000 questions of 20 tokens by MiniLM: 92 MB).
    """

    needs: ClassVar[tuple[str, ...]] = ("embed_tokens",)

    def _fit(self) -> None:
        texts, self._row_of = distinct(self._questions)
        self._starts, self._vectors = self._embed(texts)

    def _embed(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Where each text's tokens begin, and the end (n + 1,), in the unit vectors of all tokens (P, D)."""
        embed_tokens: Any = self.resources.embed_tokens
        lengths, vectors = [0], np.empty((0, 0), dtype=np.float32)
        for block in row_blocks(len(texts), 1, _TEXTS):
            found = [np.asarray(own) for own in embed_tokens(list(texts[block]))]
            own, before = unit(np.concatenate(found)), len(vectors)
            lengths += map(len, found)
            vectors.resize((before + len(own), own.shape[1]), refcheck=False)  # grows in place: it may be gigabytes
            vectors[before:] = own
        return np.cumsum(lengths), vectors

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        starts, vectors = self._embed(queries)
        picked = np.empty((len(queries), k), dtype=np.int64)
        for block in row_blocks(len(queries), max(1, int(np.diff(starts).max())) * len(self.examples)):
            ends = starts[block.start : block.stop + 1]
            similarity = self._similarity(vectors[ends[0] : ends[-1]])
            each = zip(np.split(similarity, ends[1:-1] - ends[0]), excluded[block], strict=True)
            picked[block] = [greedy_set_cover(own, self._row_of, barred, k) for own, barred in each]
        return picked

    def _similarity(self, tokens: np.ndarray) -> np.ndarray:
        """(T, U) float32: each token's (T, D) largest cosine with a token of each question; −1 if that has none."""
        lengths = np.diff(self._starts)
        best = np.full((len(tokens), len(lengths)), -1, dtype=np.float32)
        # As many questions as have token products that fit in memory, but at least one.
        for part in row_blocks(len(lengths), len(tokens) * int(lengths.max(initial=1)), _PRODUCTS):
            first, last = self._starts[part.start], self._starts[part.stop]
            filled = np.flatnonzero(lengths[part]) + part.start
            if len(filled) and len(tokens):
                products = tokens @ self._vectors[first:last].T
                best[:, filled] = np.maximum.reduceat(products, self._starts[filled] - first, axis=1)
        return best
