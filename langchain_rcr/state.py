"""How the picks compose into the vector that searches for the next one."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from langchain_rcr.errors import CheckpointError

Array = TypeVar("Array")
"""numpy.ndarray while serving, torch.Tensor while training: states use plain arithmetic only."""


class State(Protocol[Array]):
    """A batch of partly built contexts [x, z_1, …, z_{t-1}]. Values, never changed in place."""

    def start(self, query: Array) -> State[Array]:
        """The state before the first pick; `query` is E_x(x), (B, D)."""
        ...

    def update(self, context: Array) -> State[Array]:
        """The state after a pick; `context` is E_z of each row's pick, (B, D)."""
        ...

    def vector(self) -> Array:
        """The vectors (B, D) whose inner products with E_c(c) are the logits of Eq. 4."""
        ...


class AdditiveState(Generic[Array]):
    """The paper's state (Eq. 4): E_x(x) + λ · Σ_{i<t} E_z(z_i).

    Args:
        lam: λ, the weight of the picks so far.
    """

    name = "additive"

    def __init__(self, lam: float) -> None:
        self.lam = float(lam)  # a NumPy scalar would turn float32 vectors into float64
        self._sum: Array | None = None

    def _with(self, total: Array) -> AdditiveState[Array]:
        state: AdditiveState[Array] = AdditiveState(self.lam)
        state._sum = total
        return state

    def start(self, query: Array) -> AdditiveState[Array]:
        """The query alone, (B, D)."""
        return self._with(query)

    def update(self, context: Array) -> AdditiveState[Array]:
        """Add λ · E_z of each row's pick, (B, D)."""
        total: Any = self.vector()
        added: Any = context
        return self._with(total + self.lam * added)

    def vector(self) -> Array:
        """E_x(x) + λ · Σ E_z, (B, D)."""
        if self._sum is None:
            msg = "start(query) comes before update and vector"
            raise RuntimeError(msg)
        return self._sum


def make_state(name: str, lam: float) -> AdditiveState[Any]:
    """A fresh state by the name that a checkpoint stores.

    Raises:
        CheckpointError: no such state in this version.
    """
    if name != AdditiveState.name:
        msg = f"unknown state '{name}': this version of langchain-rcr knows '{AdditiveState.name}'"
        raise CheckpointError(msg)
    return AdditiveState(lam)
