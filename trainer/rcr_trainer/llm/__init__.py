"""The one place that calls a language model: dedupe, cache, retries, budget; and an offline simulator of one.

Importing this package loads no LangChain: every name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rcr_trainer.llm.answers import Answer, program_of, programs_of
    from rcr_trainer.llm.budget import Budget, Estimate, Prices, Stats, Use
    from rcr_trainer.llm.cache import AnswerCache
    from rcr_trainer.llm.errors import AccessError, BudgetExceeded, LLMError, RequestError
    from rcr_trainer.llm.model import LanguageModel
    from rcr_trainer.llm.opening import CHAT_INSTRUCTION, open_llm, wrap
    from rcr_trainer.llm.settings import LLMSettings
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

_HOME = {
    "CHAT_INSTRUCTION": "opening",
    "AccessError": "errors",
    "Answer": "answers",
    "AnswerCache": "cache",
    "Budget": "budget",
    "BudgetExceeded": "errors",
    "Estimate": "budget",
    "LLMError": "errors",
    "LLMSettings": "settings",
    "LanguageModel": "model",
    "Prices": "budget",
    "RequestError": "errors",
    "Stats": "budget",
    "StructureBoundLLM": "simulator",
    "Use": "budget",
    "open_llm": "opening",
    "program_of": "answers",
    "programs_of": "answers",
    "wrap": "opening",
}

# Hidden from type checkers: they would take it as "any name exists here".
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            msg = f"module '{__name__}' has no attribute '{name}'"
            raise AttributeError(msg)
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
