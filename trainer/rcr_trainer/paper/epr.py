"""EPR: a bi-encoder that learns which single example helps a language model most to write the program.

Source: Rubin, Herzig and Berant, "Learning To Retrieve Prompts for In-Context Learning", NAACL 2022, arXiv 2112.08633,
section 3. The candidates of a training question (x, y), the best by BM25 between programs, are ranked by
p(y | candidate, x). One of the five best is the positive, one of the five worst the hard negative; those of the other
questions in the batch are negatives, too. Picks are the k largest inner products.

Departures: encoders, rate and epochs are the run's (there: BERT, 1e-4, 30 epochs). A question's own picks are never its
negatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.triencoder import TriEncoder
from rcr_trainer.baselines.base import top_k
from rcr_trainer.baselines.options import LearnedSettings
from rcr_trainer.paper.learned import FloatArray, IntArray, LearnedSelector


class EPRSelector(LearnedSelector):
    """Picks the k examples whose vectors have the largest inner products with the query's."""

    @classmethod
    def texts(cls, options: LearnedSettings, queries: int, k: int) -> int:
        """See `Baseline.texts`."""
        return queries * max(options.candidates, k)

    def _learn(self, model: TriEncoder, rows: IntArray) -> None:
        near, scores = self._scored(rows)
        ranked = np.take_along_axis(near, np.argsort(-scores, axis=1, kind="stable"), axis=1)
        questions = model.query.featurize([Item(self.examples[row]["source"]) for row in rows])
        self._contrast(
            model,
            rows,
            ranked[:, None],
            self.options.extreme,
            ranked[:, :1],
            lambda at, _: model.query(questions.select(at)),
        )

    def _scored(self, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """(Q, L) the candidates of each question, and the log-likelihoods of its program behind each."""
        near = self._near(rows)
        scores = self._scores(np.repeat(rows, near.shape[1]).tolist(), near.reshape(-1, 1).tolist())
        return near, scores.reshape(near.shape)

    def _pick(self, queries: Sequence[str], k: int, excluded: list[np.ndarray]) -> np.ndarray:
        return top_k(self._pool_logits(self._query_vectors(queries)), k, excluded)
