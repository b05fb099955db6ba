"""Few-shot examples picked step by step: a LangChain example selector and retriever.

Importing this package loads neither torch nor transformers: every name below is imported on first use. A class whose
extra is not installed can still be imported; instantiating it raises the `MissingExtraError` that names the extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from langchain_rcr.errors import MissingExtraError as MissingExtraError

if TYPE_CHECKING:
    from langchain_rcr.agents import ComposedToolSelector as ComposedToolSelector
    from langchain_rcr.agents import FewShotMiddleware as FewShotMiddleware
    from langchain_rcr.basics.items import Item as Item
    from langchain_rcr.chains.few_shot import FewShotPrompt as FewShotPrompt
    from langchain_rcr.chains.few_shot import chat_few_shot_prompt as chat_few_shot_prompt
    from langchain_rcr.chains.few_shot import few_shot_prompt as few_shot_prompt
    from langchain_rcr.chains.recording import OutcomeRecorder as OutcomeRecorder
    from langchain_rcr.chains.recording import record_feedback as record_feedback
    from langchain_rcr.chains.semantic_parsing import ParsedProgram as ParsedProgram
    from langchain_rcr.chains.semantic_parsing import SemanticParsingChain as SemanticParsingChain
    from langchain_rcr.chains.semantic_parsing import semantic_parsing_chain as semantic_parsing_chain
    from langchain_rcr.chains.text_to_sql import text_to_sql_chain as text_to_sql_chain
    from langchain_rcr.databases.database import open_database as open_database
    from langchain_rcr.databases.schema import schema_text as schema_text
    from langchain_rcr.errors import CheckpointError as CheckpointError
    from langchain_rcr.errors import EngineError as EngineError
    from langchain_rcr.errors import InputError as InputError
    from langchain_rcr.errors import PoolError as PoolError
    from langchain_rcr.errors import ProgramError as ProgramError
    from langchain_rcr.errors import RCRError as RCRError
    from langchain_rcr.index.faiss import FaissIndex as FaissIndex
    from langchain_rcr.index.memory import MemoryIndex as MemoryIndex
    from langchain_rcr.index.pgvector import PgVectorIndex as PgVectorIndex
    from langchain_rcr.index.vectorstore import VectorStoreIndex as VectorStoreIndex
    from langchain_rcr.policy.explanation import Explanation as Explanation
    from langchain_rcr.policy.prompt import Prompt as Prompt
    from langchain_rcr.policy.triencoder import TriEncoder as TriEncoder
    from langchain_rcr.pool.examples import ExamplePool as ExamplePool
    from langchain_rcr.pool.outcomes import OutcomeLog as OutcomeLog
    from langchain_rcr.pool.store import ExampleStore as ExampleStore
    from langchain_rcr.retriever import SequentialCompositionalRetriever as SequentialCompositionalRetriever

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, names in {
        "agents": "ComposedToolSelector FewShotMiddleware",
        "basics.items": "Item",
        "chains.few_shot": "FewShotPrompt chat_few_shot_prompt few_shot_prompt",
        "chains.recording": "OutcomeRecorder record_feedback",
        "chains.semantic_parsing": "ParsedProgram SemanticParsingChain semantic_parsing_chain",
        "chains.text_to_sql": "text_to_sql_chain",
        "databases.database": "open_database",
        "databases.schema": "schema_text",
        "errors": "CheckpointError EngineError InputError MissingExtraError PoolError ProgramError RCRError",
        "index.faiss": "FaissIndex",
        "index.memory": "MemoryIndex",
        "index.pgvector": "PgVectorIndex",
        "index.vectorstore": "VectorStoreIndex",
        "policy.explanation": "Explanation",
        "policy.prompt": "Prompt",
        "policy.triencoder": "TriEncoder",
        "pool.examples": "ExamplePool",
        "pool.outcomes": "OutcomeLog",
        "pool.store": "ExampleStore",
        "retriever": "SequentialCompositionalRetriever",
    }.items()
    for name in names.split()
}

__all__ = sorted(_HOME)  # noqa: PLE0605

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
    """A stand-in for a class whose module needs a missing extra, so that `import *` and `help` work without it."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise MissingExtraError(error.package, error.extra)

    return type(name, (), {"__doc__": f"Unavailable: {error}", "__init__": refuse, "__module__": __name__})
