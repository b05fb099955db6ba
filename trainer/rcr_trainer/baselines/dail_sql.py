"""DAIL-SQL's selection: questions alike once masked, those first whose SQL has the skeleton that the answer may have.

Gao et al., "Text-to-SQL Empowered by Large Language Models: A Benchmark Evaluation", VLDB 2024, arXiv 2308.15363,
section 3.2. Departures: their skeleton is that of a preliminary model's answer; here it is that of the program of the
question that is most alike once masked, so that no model is asked twice. Its similarity is the Jaccard coefficient of
the symbols of programs without names and values. A prompt shows the first pick last, as theirs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from langchain_rcr.programs import get_parser
from rcr_trainer.baselines.base import TradeOff, top_k
from rcr_trainer.baselines.dense import EmbeddingSelector
from rcr_trainer.baselines.linking import linker, mask_question
from rcr_trainer.data.coverage import PoolStructures

_ALIKE = 4.0
"""More than cosines differ by."""


class DAILSQLSelector(EmbeddingSelector):
    """Picks by the cosine of masked questions; examples with the likely skeleton go before all others.

    The pool's examples have a field `schema` where it is known; `Resources.schemas` has the queries'.

    Attributes:
        threshold: the Jaccard coefficient from which on a skeleton is the likely one, in (0, 1].
    """

    name: ClassVar[str] = "dail_sql"
    needs: ClassVar[tuple[str, ...]] = ("embed", "spec")
    trade_off: ClassVar[TradeOff | None] = TradeOff("threshold", (0.5, 0.7, 0.85, 1.0))
    threshold: float = 0.85

    def _fit(self) -> None:
        spec = self.resources.spec
        self._names = linker(self.examples, self.resources.schemas, spec)
        super()._fit()
        nameless: bool | Literal["names"] = "names" if hasattr(get_parser(spec.language), "shape") else True
        skeletons = replace(spec, anonymize=nameless, max_size=1, implied=())
        self._symbols = PoolStructures(skeletons, self._programs).matrix.astype(np.float64)
        self._sizes = np.asarray(self._symbols.sum(axis=1)).ravel()

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        return super()._embed([mask_question(text, self._names(text)) for text in texts])

    def _rank(self, similarity: np.ndarray, k: int, excluded: Sequence[np.ndarray]) -> np.ndarray:
        similarity = np.round(similarity, 6)
        nearest = top_k(similarity.copy(), 1, excluded)[:, 0]
        shared = (self._symbols[nearest] @ self._symbols.T).toarray()
        union = np.maximum(self._sizes[nearest][:, None] + self._sizes - shared, 1)
        return top_k(similarity + _ALIKE * (shared / union >= self.threshold), k, excluded)
