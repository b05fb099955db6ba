"""How the picks compose into the vector that searches for the next one."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from langchain_rcr.errors import CheckpointError

Array = TypeVar("Array")
"""numpy.ndarray while serving, torch.Tensor while training: states use plain arithmetic only."""


class State(Protocol[Array]):
    """A batch of partly built contexts [x, z_1, …, z_{t-1}]. Values, never changed in place."""

    @property
    def linear(self) -> float | None:
        """λ, if `update` adds λ · E_z to the vector, whatever it is: then logits add up, too. None if it doesn't."""
        ...

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

    @property
    def linear(self) -> float:
        """λ."""
        return self.lam

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


class SaturatingState(Generic[Array]):
    """What is covered is needed no more: need · Π_{i<t} (1 − λ · E_z(z_i)), element by element.

    The first coordinates stand for structures: E_x says how much each is needed, E_c and E_z which of them an example
    has (0 to 1). With λ = 1 the inner product with E_c(c) is the need that c would newly cover, so that greedy decoding
    is greedy expected coverage; covering twice costs nothing. Further coordinates, those of text, compose as in Eq. 4.

    Args:
        lam: λ, how much of a need a pick that has the structure takes away; 0: picks don't matter.
        structures: how many coordinates stand for structures.
    """

    name = "saturating"
    linear = None

    def __init__(self, lam: float, structures: int) -> None:
        self.lam, self.structures = float(lam), structures
        self._vector: Array | None = None

    def _with(self, vector: Array) -> SaturatingState[Array]:
        state: SaturatingState[Array] = SaturatingState(self.lam, self.structures)
        state._vector = vector
        return state

    def start(self, query: Array) -> SaturatingState[Array]:
        """All that the query needs, (B, D)."""
        return self._with(query)

    def update(self, context: Array) -> SaturatingState[Array]:
        """Take away what each row's pick covers, and add λ · E_z of the text; `context` is (B, D)."""
        vector: Any = self.vector()
        taken: Any = context
        taken = self.lam * taken
        if vector.shape[-1] == self.structures:
            return self._with(vector * (1 - taken))
        is_structure = vector[:1] != vector[:1]  # all False, of the arrays' own kind
        is_structure[:, : self.structures] = True
        return self._with(vector * (1 - is_structure * taken) + taken * ~is_structure)

    def vector(self) -> Array:
        """What is still needed, (B, D)."""
        if self._vector is None:
            msg = "start(query) comes before update and vector"
            raise RuntimeError(msg)
        return self._vector


STATES = (AdditiveState.name, SaturatingState.name)
"""The states that there are."""


def make_state(name: str, lam: float, structures: int = 0) -> State[Any]:
    """A fresh state by the name that a checkpoint stores.

    Args:
        name: one of `STATES`.
        lam: λ.
        structures: how many of the coordinates stand for structures; 0: none, the vectors are those of texts.

    Raises:
        CheckpointError: no such state in this version, or not for these vectors.
    """
    if name == AdditiveState.name:
        return AdditiveState(lam)
    if name != SaturatingState.name:
        known = " and ".join(f"'{known}'" for known in STATES)
        msg = f"unknown state '{name}': this version of langchain-rcr knows {known}"
        raise CheckpointError(msg)
    if not structures:
        msg = f"the state '{name}' is for the structure family, whose vectors say which structures an example has"
        raise CheckpointError(msg)
    return SaturatingState(lam, structures)
