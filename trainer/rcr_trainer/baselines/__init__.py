"""Every selector that a trained retriever is compared with: LangChain example selectors that also pick in batches."""

from __future__ import annotations

from rcr_trainer.baselines.base import Baseline, Exclude
from rcr_trainer.baselines.bm25 import BM25Scorer, BM25Selector
from rcr_trainer.baselines.bm25_coverage import BM25CoverageSelector
from rcr_trainer.baselines.dense import DenseSelector, Embed
from rcr_trainer.baselines.dpp import DPPSelector
from rcr_trainer.baselines.fixed import FixedSelector
from rcr_trainer.baselines.mmr import MMRSelector, maximal_marginal_relevance
from rcr_trainer.baselines.oracle import OracleSelector
from rcr_trainer.baselines.random import RandomSelector
from rcr_trainer.baselines.set_bsr import SetBSRSelector
from rcr_trainer.baselines.tokens import EmbedTokens, TokenVectors, TransformerTokens

__all__ = [
    "BM25CoverageSelector",
    "BM25Scorer",
    "BM25Selector",
    "Baseline",
    "DPPSelector",
    "DenseSelector",
    "Embed",
    "EmbedTokens",
    "Exclude",
    "FixedSelector",
    "MMRSelector",
    "OracleSelector",
    "RandomSelector",
    "SetBSRSelector",
    "TokenVectors",
    "TransformerTokens",
    "maximal_marginal_relevance",
]
