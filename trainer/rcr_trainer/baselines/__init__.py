"""Every selector that a trained retriever is compared with: LangChain example selectors that also pick in batches."""

from __future__ import annotations

from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.baselines.bm25 import BM25Scorer, BM25Selector
from rcr_trainer.baselines.dense import DenseSelector, Embed
from rcr_trainer.baselines.fixed import FixedSelector
from rcr_trainer.baselines.mmr import MMRSelector, maximal_marginal_relevance
from rcr_trainer.baselines.oracle import OracleSelector
from rcr_trainer.baselines.random import RandomSelector

__all__ = [
    "BM25Scorer",
    "BM25Selector",
    "Baseline",
    "DenseSelector",
    "Embed",
    "Exclude",
    "FixedSelector",
    "MMRSelector",
    "OracleSelector",
    "RandomSelector",
    "maximal_marginal_relevance",
]
