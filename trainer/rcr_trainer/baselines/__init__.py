"""Every selector that a trained retriever is compared with: LangChain example selectors that also pick in batches.

A new one is a file with a class derived from `Baseline` and a line in `BASELINES`. Listing the names imports none of
them. The rivals that learn from a language model are registered here, too; their code is in `rcr_trainer.paper`.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rcr_trainer.baselines.base import Baseline

BASELINES = {
    "random": "rcr_trainer.baselines.random:RandomSelector",
    "no_examples": "rcr_trainer.baselines.random:NoneSelector",
    "bm25": "rcr_trainer.baselines.bm25:BM25Selector",
    "bm25_schema": "rcr_trainer.baselines.linking:BM25SchemaSelector",
    "bert": "rcr_trainer.baselines.dense:BERTSelector",
    "contriever": "rcr_trainer.baselines.dense:ContrieverSelector",
    "dense": "rcr_trainer.baselines.dense:DenseSelector",
    "mmr": "rcr_trainer.baselines.dense:MMRSelector",
    "dpp": "rcr_trainer.baselines.dense:DPPSelector",
    "set_bsr": "rcr_trainer.baselines.set_bsr:SetBSRSelector",
    "knn_structures": "rcr_trainer.baselines.greedy:KNNStructuresSelector",
    "dail_sql": "rcr_trainer.baselines.linking:DAILSQLSelector",
    "epr": "rcr_trainer.paper.learned:EPRSelector",
    "se2": "rcr_trainer.paper.se2:Se2Selector",
    "se2_tri": "rcr_trainer.paper.se2:Se2TriSelector",
    "ceil": "rcr_trainer.paper.ceil:CEILSelector",
    "iterr": "rcr_trainer.paper.iterr:ITERRSelector",
    "llm_r": "rcr_trainer.paper.llm_r:LLMRSelector",
    "oracle": "rcr_trainer.baselines.greedy:OracleSelector",
    "cover_ls_gold": "rcr_trainer.baselines.greedy:CoverLSGoldSelector",
}
"""Name → module:class, in the order of reports."""

STRONGEST = "set_bsr"
"""The one to beat: as a rule, language models answer best with it of those without training (docs/results.md)."""


def names() -> list[str]:
    """The names of all baselines, in the order of reports."""
    return list(BASELINES)


def get_baseline(name: str) -> type[Baseline]:
    """The class registered under one of `names()`; imports its module."""
    found: type[Baseline] = pkgutil.resolve_name(BASELINES[name])
    return found
