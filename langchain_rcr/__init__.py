"""Few-shot examples picked step by step: a LangChain example selector and retriever.

Importing this package loads neither torch nor transformers: every name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from langchain_rcr.errors import CheckpointError, EngineError, InputError, MissingExtraError, PoolError, RCRError

if TYPE_CHECKING:
    __version__: str

    from langchain_rcr.chains import ParsedProgram, SemanticParsingChain, semantic_parsing_chain
    from langchain_rcr.explaining import Explanation
    from langchain_rcr.index.faiss import FaissIndex
    from langchain_rcr.index.memory import MemoryIndex
    from langchain_rcr.index.pgvector import PgVectorIndex
    from langchain_rcr.items import Item
    from langchain_rcr.policy import TriEncoder
    from langchain_rcr.pool import ExamplePool
    from langchain_rcr.prompting import FewShotPrompt, chat_few_shot_prompt, few_shot_prompt
    from langchain_rcr.retriever import SequentialCompositionalRetriever
    from langchain_rcr.store import ExampleStore

__all__ = [
    "CheckpointError",
    "EngineError",
    "ExamplePool",
    "ExampleStore",
    "Explanation",
    "FaissIndex",
    "FewShotPrompt",
    "InputError",
    "Item",
    "MemoryIndex",
    "MissingExtraError",
    "ParsedProgram",
    "PgVectorIndex",
    "PoolError",
    "RCRError",
    "SemanticParsingChain",
    "SequentialCompositionalRetriever",
    "TriEncoder",
    "chat_few_shot_prompt",
    "few_shot_prompt",
    "semantic_parsing_chain",
]

_HOME = {
    "ExamplePool": "pool",
    "ExampleStore": "store",
    "Explanation": "explaining",
    "FaissIndex": "index.faiss",
    "FewShotPrompt": "prompting",
    "Item": "items",
    "MemoryIndex": "index.memory",
    "ParsedProgram": "chains",
    "PgVectorIndex": "index.pgvector",
    "SemanticParsingChain": "chains",
    "SequentialCompositionalRetriever": "retriever",
    "TriEncoder": "policy",
    "chat_few_shot_prompt": "prompting",
    "few_shot_prompt": "prompting",
    "semantic_parsing_chain": "chains",
}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("langchain-rcr")
    except PackageNotFoundError:
        return "0+unknown"  # run from source, not installed


# Hidden from type checkers: they would take it as "any name exists here".
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return _version()
        if name not in _HOME:
            msg = f"module '{__name__}' has no attribute '{name}'"
            raise AttributeError(msg)
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
