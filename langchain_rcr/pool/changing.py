"""Examples come and go while a retriever serves, and its encoder is fitted to them anew."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_rcr.index.base import CandidateIndex
from langchain_rcr.pool.examples import Example
from langchain_rcr.pool.outcomes import OutcomeLog
from langchain_rcr.pool.store import ExampleStore


class Changes:
    """The part of the retriever that changes its examples."""

    if TYPE_CHECKING:
        store: ExampleStore
        log: OutcomeLog | None
        auto_refit: bool

    def add_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """Add an example; the next query can pick it.

        Args:
            example: a mapping with the pool's two keys, and any other fields.
            id: its id; None for a random one.

        Returns:
            Its id.

        Raises:
            PoolError: a field is missing, not a string or blank; the id is taken.
        """
        return self.add_examples([example], None if id is None else [id])[0]

    async def aadd_example(self, example: Mapping[str, Any], *, id: str | None = None) -> str:
        """`add_example`, awaited."""
        return (await self.aadd_examples([example], None if id is None else [id]))[0]

    def add_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """Add examples, all or none, encoded together. Arguments, result and errors as in `add_example`."""
        return self.store.add(examples, ids, refit=self._refits)

    async def aadd_examples(self, examples: Sequence[Example], ids: Sequence[str] | None = None) -> list[str]:
        """`add_examples` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.add_examples, examples, ids)

    def upsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """Add examples, replacing those with the same ids; all or none. Returns the ids."""
        return self.store.add(examples, ids, replace=True, refit=self._refits)

    async def aupsert(self, examples: Sequence[Example], ids: Sequence[str]) -> list[str]:
        """`upsert` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.upsert, examples, ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete examples by their ids; unknown ids are ignored. Returns how many were deleted."""
        return self.store.delete(ids)

    async def adelete(self, ids: Sequence[str]) -> int:
        """`delete` in a thread; once begun, it goes on when its caller is cancelled."""
        return await asyncio.to_thread(self.delete, ids)

    @property
    def needs_refit(self) -> bool:
        """Whether so much was added since the fit that `refit` is worth its time.

        With `auto_refit` one is then on its way; else a line in the log says so, once.
        """
        return self.store.needs_refit

    @property
    def _refits(self) -> bool:
        return self.auto_refit and self.log is None

    def refit(self, index: CandidateIndex | None = None) -> None:
        """Fit the encoder anew to all examples, as `from_examples` does, in seconds; see `ExampleStore.refit`.

        Questions are answered as before until it is done. For a saved folder, `save` again.

        Args:
            index: an empty engine, where the examples are in one outside this process; that is left as it is.

        Raises:
            InputError: that engine is missing, or the family isn't fitted to examples.
        """
        self.store.refit(index)

    async def arefit(self, index: CandidateIndex | None = None) -> None:
        """`refit` in a thread; once begun, it goes on when its caller is cancelled."""
        await asyncio.to_thread(self.refit, index)
