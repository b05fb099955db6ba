"""Few-shot examples picked step by step: a LangChain example selector and retriever.

Importing this package loads neither torch nor transformers: every name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from langchain_rcr.errors import CheckpointError, InputError, MissingExtraError, PoolError, RCRError

if TYPE_CHECKING:
    from langchain_rcr.items import Item
    from langchain_rcr.pool import ExamplePool
    from langchain_rcr.prompting import FewShotPrompt, few_shot_prompt
    from langchain_rcr.retriever import ExampleStore, SequentialCompositionalRetriever
    from langchain_rcr.tri_encoder import TriEncoder

__all__ = [
    "CheckpointError",
    "ExamplePool",
    "ExampleStore",
    "FewShotPrompt",
    "InputError",
    "Item",
    "MissingExtraError",
    "PoolError",
    "RCRError",
    "SequentialCompositionalRetriever",
    "TriEncoder",
    "few_shot_prompt",
]

_HOME = {
    "ExamplePool": "pool",
    "ExampleStore": "retriever",
    "FewShotPrompt": "prompting",
    "Item": "items",
    "SequentialCompositionalRetriever": "retriever",
    "TriEncoder": "tri_encoder",
    "few_shot_prompt": "prompting",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
