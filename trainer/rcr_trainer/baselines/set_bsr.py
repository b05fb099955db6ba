"""Greedy Set-BERTScore-Recall: every token of the query is to have a token like it, in its context, in some pick.

BSR(x, z) = Σ_i w(x_i) max_j x_iᵀ z_j over unit vectors of contextual tokens; for a set of examples the maximum goes
over the tokens of all of them. Eq. 5 and 6 of Gupta, Gardner and Singh, "Coverage-based Example Selection for
In-Context Learning", Findings of EMNLP 2023, arXiv 2305.14907, maximised by their Algorithm 1.

As in the paper all tokens weigh the same unless `idf` is set; then w(t) = log((M + 1) / (df(t) + 1)) over the pool's M
questions, as in BERTScore (Zhang et al., ICLR 2020). The weights aren't divided by their sum, which is the same for all
candidates. Departures: the encoder is the caller's (default: the MiniLM that the embedding selectors use, three
quarters of the way up; the paper's is deberta-large-mnli, which BERTScore reads there); special tokens are left out of
the candidates, too, where BERTScore gives them no weight in the query but lets them be matched; the picks stay in the
order of picking, where the paper orders a prompt by each example's own BSR (section 6.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from langchain_rcr.errors import InputError
from rcr_trainer.baselines.base import Baseline
from rcr_trainer.baselines.dense import unit_vectors
from rcr_trainer.baselines.set_cover import greedy_set_cover
from rcr_trainer.baselines.tokens import EmbedTokens, TokenVectors, TransformerTokens
from rcr_trainer.programs.coverage import row_blocks

_PRODUCTS = 1 << 22  # similarities of single tokens that are in memory at once: 16 MiB
_FULL_PRECISION = 1 << 26  # numbers that the pool's tokens may take in float32 (256 MiB); more are kept in float16
_TEXTS = 4096  # texts embedded in one call


class SetBSRSelector(Baseline):
    """Picks, one after the other, the example that adds most to the set's BERTScore-Recall of the query.

    Each distinct question of the pool is embedded once. Its tokens' vectors take 4 bytes a number (3,000 questions of
    20 tokens by MiniLM: 92 MB), 2 bytes where they would take more than 256 MiB.

    Args:
        examples: the pool, one dict per example.
        embed_tokens: embeds the tokens of texts; None: those of the default MiniLM.
        idf: whether tokens that are rare in the pool count more.
        **options: as for `Baseline`.
    """

    name: ClassVar[str] = "set_bsr"

    def __init__(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        embed_tokens: EmbedTokens | None = None,
        idf: bool = False,
        **options: Any,
    ) -> None:
        self.embed_tokens = embed_tokens if embed_tokens is not None else TransformerTokens()
        self.idf = idf
        self._rows: dict[str, int] = {}  # question → row: its place among the distinct questions
        self._lengths = np.empty(0, dtype=np.int64)  # (U,)
        self._ids = np.empty(0, dtype=np.int64)  # (P,)
        self._vectors = np.empty((0, 0), dtype=np.float32)  # (P, D)
        super().__init__(examples, **options)

    def _fit(self) -> None:
        new = [text for text in dict.fromkeys(self._questions) if text not in self._rows]
        for start in range(0, len(new), _TEXTS):
            texts = new[start : start + _TEXTS]
            self._append(texts, self._embed(texts))
        self._row_of = np.array([self._rows[text] for text in self._questions], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        if self.idf:
            self._count_documents()

    def _append(self, texts: Sequence[str], tokens: TokenVectors) -> None:
        known = self._vectors if self._rows else tokens.vectors[:0]
        narrow = known.dtype == np.float16 or known.size + tokens.vectors.size > _FULL_PRECISION
        dtype = np.float16 if narrow else np.float32
        self._vectors = np.concatenate([known.astype(dtype, copy=False), tokens.vectors.astype(dtype, copy=False)])
        self._lengths = np.concatenate([self._lengths, tokens.lengths])
        self._ids = np.concatenate([self._ids, tokens.ids])
        self._rows.update(zip(texts, range(len(self._rows), len(self._lengths)), strict=True))

    def _embed(self, texts: Sequence[str]) -> TokenVectors:
        """Checked tokens, with unit vectors in float32."""
        lengths, ids, vectors = (np.asarray(part) for part in self.embed_tokens(list(texts)))
        total = int(lengths.sum()) if lengths.shape == (len(texts),) else -1
        if vectors.ndim != 2 or not len(ids) == len(vectors) == total:
            raise InputError(
                f"embed_tokens returned lengths {lengths.shape}, ids {ids.shape} and vectors {vectors.shape} for "
                f"{len(texts)} texts"
            )
        if self._rows and vectors.shape[1] != self._vectors.shape[1]:
            raise InputError(
                f"embed_tokens gave {vectors.shape[1]} dimensions, the pool's tokens have {self._vectors.shape[1]}"
            )
        return TokenVectors(lengths.astype(np.int64), ids, unit_vectors(vectors))

    def _pick(
        self, queries: Sequence[str], k: int, excluded: list[np.ndarray], references: Sequence[str] | None
    ) -> np.ndarray:
        tokens = self._embed(queries)
        starts = np.concatenate([[0], np.cumsum(tokens.lengths)])
        weights = self._weights(tokens.ids)
        picked = np.empty((len(queries), k), dtype=np.int64)
        longest = max(1, int(tokens.lengths.max()))
        for block in row_blocks(len(queries), longest * len(self._questions)):
            own = slice(starts[block.start], starts[block.stop])
            owner = np.repeat(np.arange(block.stop - block.start), tokens.lengths[block])
            similarity = self._similarity(tokens.vectors[own])
            picked[block] = greedy_set_cover(similarity, weights[own], owner, self._row_of, excluded[block], k)
        return picked

    def _count_documents(self) -> None:
        """The pool's vocabulary, ascending, and how many questions hold each token; −1 stands for those unknown."""
        questions = np.bincount(self._row_of, minlength=len(self._lengths))
        rows = np.repeat(np.arange(len(self._lengths)), self._lengths)
        ids, rows = np.unique(np.stack([self._ids, rows]), axis=1)
        vocabulary, place = np.unique(ids, return_inverse=True)
        self._vocabulary = np.concatenate([[-1], vocabulary])
        self._frequency = np.bincount(place + 1, weights=questions[rows], minlength=len(self._vocabulary))

    def _weights(self, ids: np.ndarray) -> np.ndarray:
        """(T,) what each of the query's tokens counts."""
        if not self.idf:
            return np.ones(len(ids))
        place = np.searchsorted(self._vocabulary, ids, side="right") - 1
        frequency = np.where(self._vocabulary[place] == ids, self._frequency[place], 0)
        return np.log((len(self._questions) + 1) / (frequency + 1))

    def _similarity(self, tokens: np.ndarray) -> np.ndarray:
        """(T, U) float32: the largest cosine of each token (T, D) with those of each question; −1 where it has none."""
        best = np.full((len(tokens), len(self._lengths)), -1, dtype=np.float32)
        for part in self._parts(len(tokens)):
            first, last = self._starts[part.start], self._starts[part.stop]
            products = tokens @ self._vectors[first:last].astype(np.float32, copy=False).T
            filled = np.flatnonzero(self._lengths[part]) + part.start
            if len(filled) and len(tokens):
                best[:, filled] = np.maximum.reduceat(products, self._starts[filled] - first, axis=1)
        return best

    def _parts(self, n_tokens: int) -> Iterator[slice]:
        """Ranges of questions whose tokens' products with so many tokens fit in memory; at least one question each."""
        most, start = _PRODUCTS // max(1, n_tokens), 0
        while start < len(self._lengths):
            stop = int(np.searchsorted(self._starts, self._starts[start] + most, side="right")) - 1
            stop = max(start + 1, stop)
            yield slice(start, stop)
            start = stop
