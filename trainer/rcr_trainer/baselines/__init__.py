"""Every selector that a trained retriever is compared with: LangChain example selectors that also pick in batches.

To add one, write a class derived from `Baseline` in a file of its own, and a line in `BASELINES`. Listing the names
imports none of them. Rivals that learn from a language model are registered here, too; their code is in
`rcr_trainer.paper`.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from pydantic import Field

from langchain_rcr.basics.section import Section

if TYPE_CHECKING:
    from rcr_trainer.baselines.base import Baseline

BASELINES = {
    "random": "rcr_trainer.baselines.simple:RandomSelector",
    "no_examples": "rcr_trainer.baselines.simple:NoneSelector",
    "bm25": "rcr_trainer.baselines.simple:BM25Selector",
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
    "llm_r": "rcr_trainer.paper.learned:LLMRSelector",
    "oracle": "rcr_trainer.baselines.greedy:OracleSelector",
    "cover_ls_gold": "rcr_trainer.baselines.greedy:CoverLSGoldSelector",
}
"""Name → module:class, in the order of reports."""

NO_EXAMPLES, OF_SCHEMAS = "no_examples", "bm25_schema"
USUAL = ("random", NO_EXAMPLES, "bm25", OF_SCHEMAS, "dense", "mmr", "dpp", "set_bsr", "knn_structures", "oracle")
"""Those compared unless settings name others: NO_EXAMPLES only if a language model answers, OF_SCHEMAS only if
questions have a schema; the latter was the best plain selector on Spider (docs/results.md)."""
STRONGEST = "set_bsr"
"""The one to beat: of the untrained selectors, language models usually answer best with it (docs/results.md)."""


def get_baseline(name: str) -> type[Baseline]:
    """The class registered under this name; imports its module."""
    found: type[Baseline] = pkgutil.resolve_name(BASELINES[name])
    return found


class LearnedSettings(Section, use_attribute_docstrings=True):
    """Training of the selectors that learn from scores of section llm's language model."""

    queries: int | None = Field(300, ge=1)
    """Number of the pool's examples to train them on, evenly spaced; null: all, as published."""
    candidates: int = Field(50, ge=2)
    """Candidates that the language model scores per question (se2: per question and step)."""
    extreme: int = Field(5, ge=1)
    """epr: positives are drawn from this many of the best; epr, se2: hard negatives from this many of the worst."""
    sets: int = Field(10, ge=2)
    """ceil: sets scored per question; iterr: sequences drawn per question."""
    beam_width: int = Field(3, ge=1)
    """se2: sequences kept while picking."""
    epochs: int = Field(10, ge=1)
    """Passes over the training questions."""
    batch_size: int = Field(32, ge=1)
    """States (ceil, iterr: questions) per optimiser step."""
    lr: float = Field(3e-4, gt=0)
    """Learning rate of AdamW, decayed linearly to 0."""
