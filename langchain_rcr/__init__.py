"""Few-shot examples picked step by step: a LangChain example selector and retriever.

Importing this package loads neither torch nor transformers: every name below is imported when it is first used. A
class whose extra is not installed can still be imported; creating one raises the `MissingExtraError` that names it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from langchain_rcr.errors import (
    CheckpointError,
    EngineError,
    InputError,
    MissingExtraError,
    PoolError,
    ProgramError,
    RCRError,
)

if TYPE_CHECKING:
    from langchain_rcr.agents import ComposedToolSelector, FewShotMiddleware
    from langchain_rcr.basics.items import Item
    from langchain_rcr.chains.few_shot import FewShotPrompt, chat_few_shot_prompt, few_shot_prompt
    from langchain_rcr.chains.recording import OutcomeRecorder, record_feedback
    from langchain_rcr.chains.semantic_parsing import ParsedProgram, SemanticParsingChain, semantic_parsing_chain
    from langchain_rcr.chains.text_to_sql import text_to_sql_chain
    from langchain_rcr.databases.database import open_database
    from langchain_rcr.databases.schema import schema_text
    from langchain_rcr.index.faiss import FaissIndex
    from langchain_rcr.index.memory import MemoryIndex
    from langchain_rcr.index.pgvector import PgVectorIndex
    from langchain_rcr.index.vectorstore import VectorStoreIndex
    from langchain_rcr.policy.explanation import Explanation
    from langchain_rcr.policy.prompt import Prompt
    from langchain_rcr.policy.triencoder import TriEncoder
    from langchain_rcr.pool.examples import ExamplePool
    from langchain_rcr.pool.outcomes import OutcomeLog
    from langchain_rcr.pool.store import ExampleStore
    from langchain_rcr.retriever import SequentialCompositionalRetriever

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ComposedToolSelector",
    "EngineError",
    "ExamplePool",
    "ExampleStore",
    "Explanation",
    "FaissIndex",
    "FewShotMiddleware",
    "FewShotPrompt",
    "InputError",
    "Item",
    "MemoryIndex",
    "MissingExtraError",
    "OutcomeLog",
    "OutcomeRecorder",
    "ParsedProgram",
    "PgVectorIndex",
    "PoolError",
    "ProgramError",
    "Prompt",
    "RCRError",
    "SemanticParsingChain",
    "SequentialCompositionalRetriever",
    "TriEncoder",
    "VectorStoreIndex",
    "chat_few_shot_prompt",
    "few_shot_prompt",
    "open_database",
    "record_feedback",
    "schema_text",
    "semantic_parsing_chain",
    "text_to_sql_chain",
]

_HOME = {
    "ComposedToolSelector": "agents",
    "ExamplePool": "pool.examples",
    "ExampleStore": "pool.store",
    "Explanation": "policy.explanation",
    "FaissIndex": "index.faiss",
    "FewShotMiddleware": "agents",
    "FewShotPrompt": "chains.few_shot",
    "Item": "basics.items",
    "MemoryIndex": "index.memory",
    "OutcomeLog": "pool.outcomes",
    "OutcomeRecorder": "chains.recording",
    "ParsedProgram": "chains.semantic_parsing",
    "PgVectorIndex": "index.pgvector",
    "Prompt": "policy.prompt",
    "SemanticParsingChain": "chains.semantic_parsing",
    "SequentialCompositionalRetriever": "retriever",
    "TriEncoder": "policy.triencoder",
    "VectorStoreIndex": "index.vectorstore",
    "chat_few_shot_prompt": "chains.few_shot",
    "few_shot_prompt": "chains.few_shot",
    "open_database": "databases.database",
    "record_feedback": "chains.recording",
    "schema_text": "databases.schema",
    "semantic_parsing_chain": "chains.semantic_parsing",
    "text_to_sql_chain": "chains.text_to_sql",
}

# Hidden from type checkers, which would conclude that any name exists here.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        try:
            value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        except MissingExtraError as error:
            value = _unavailable(name, error)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _unavailable(name: str, error: MissingExtraError) -> type:
    """A class in place of one whose module needs a missing extra, so that `import *` and `help` work without it."""
    package, extra = error.package, error.extra

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise MissingExtraError(package, extra)

    return type(name, (), {"__doc__": f"Unavailable: {error}", "__init__": refuse, "__module__": __name__})
