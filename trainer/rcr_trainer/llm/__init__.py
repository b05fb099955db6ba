"""The one place that calls a language model: dedupe, cache, retries, budget; and an offline simulator of one."""

from __future__ import annotations

from rcr_trainer.llm.answers import Answer, program_of, programs_of
from rcr_trainer.llm.budget import Budget, Estimate, Prices, Stats, Use
from rcr_trainer.llm.cache import AnswerCache
from rcr_trainer.llm.errors import AccessError, BudgetExceeded, LLMError, RequestError
from rcr_trainer.llm.model import LanguageModel
from rcr_trainer.llm.opening import CHAT_INSTRUCTION, LLMSettings, open_llm, wrap
from rcr_trainer.llm.simulator import StructureBoundLLM

__all__ = [
    "CHAT_INSTRUCTION",
    "AccessError",
    "Answer",
    "AnswerCache",
    "Budget",
    "BudgetExceeded",
    "Estimate",
    "LLMError",
    "LLMSettings",
    "LanguageModel",
    "Prices",
    "RequestError",
    "Stats",
    "StructureBoundLLM",
    "Use",
    "open_llm",
    "program_of",
    "programs_of",
    "wrap",
]
