"""The one place that calls a language model: dedupe, cache, retries, budget; and an offline simulator of one.

Importing this package loads no LangChain: every name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rcr_trainer.llm.backend import CHAT_INSTRUCTION
    from rcr_trainer.llm.faults import AccessError, BudgetExceeded, LLMError, RequestError
    from rcr_trainer.llm.ledger import Answer, AnswerCache, Estimate, Stats, Use
    from rcr_trainer.llm.model import LanguageModel
    from rcr_trainer.llm.opening import open_llm, wrap
    from rcr_trainer.llm.settings import LLMSettings
    from rcr_trainer.llm.simulator import StructureBoundLLM

_HOME = {
    "backend": ["CHAT_INSTRUCTION"],
    "faults": ["AccessError", "BudgetExceeded", "LLMError", "RequestError"],
    "ledger": ["Answer", "AnswerCache", "Estimate", "Stats", "Use"],
    "model": ["LanguageModel"],
    "opening": ["open_llm", "wrap"],
    "settings": ["LLMSettings"],
    "simulator": ["StructureBoundLLM"],
}
__all__ = [
    "CHAT_INSTRUCTION",
    "AccessError",
    "Answer",
    "AnswerCache",
    "BudgetExceeded",
    "Estimate",
    "LLMError",
    "LLMSettings",
    "LanguageModel",
    "RequestError",
    "Stats",
    "StructureBoundLLM",
    "Use",
    "open_llm",
    "wrap",
]

# Hidden from type checkers: they would take it as "any name exists here".
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        for module, names in _HOME.items():
            if name in names:
                value = getattr(import_module(f"{__name__}.{module}"), name)
                globals()[name] = value
                return value
        msg = f"module '{__name__}' has no attribute '{name}'"
        raise AttributeError(msg)
