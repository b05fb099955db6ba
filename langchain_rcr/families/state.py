"""How the picks compose into the vector that searches for the next one.

To add another, subclass `State` in this file: it takes a name, a summary and `compose`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Self, TypeVar

from langchain_rcr.errors import InputError

Array = TypeVar("Array")
"""numpy.ndarray while serving, torch.Tensor while training: states use plain arithmetic only."""
STATES: dict[str, type[State[Any]]] = {}
"""The states by name."""
_TINY = 1e-12
"""Added under the square root, whose slope at 0 is infinite."""


class State(ABC, Generic[Array]):
    """A batch of partly built contexts [x, z_1, …, z_{t-1}]. A value: `update` returns a new one.

    `lam` is λ, the weight of the picks so far; `fade` is p, how fast covered needs fade (None: at once).
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """A phrase for help texts."""
    needs_structures: ClassVar[bool] = False
    """Whether coordinates must stand for structures (`Family.structured`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        taken = STATES.get(cls.name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):  # a notebook's cell runs again
            raise InputError(f"the state '{cls.name}' is {taken.__qualname__}: give {cls.__qualname__} another name")
        STATES[cls.name] = cls

    def __init__(self, lam: float, fade: float | None = None) -> None:
        # A NumPy scalar would turn float32 vectors into float64.
        self.lam, self.fade = float(lam), None if fade is None else float(fade)
        self._query: Array | None = None
        self._vector: Array | None = None
        self._kept: Any = None  # what `compose` caches about a query for its next step

    @abstractmethod
    def compose(self, query: Any, vector: Any, context: Any) -> Any:
        """The vectors after a pick, from E_x, the vectors before it, and E_z of each row's pick; all (B, D)."""

    def sql(self) -> str:
        """`compose` in SQL, for an engine that takes all steps in one round trip; "": there is no such expression.

        It uses pgvector's vectors {query}, {needs} (the query clipped at 0), {vector} and {context}, of length {dim}.
        """
        return ""

    def start(self, query: Array) -> Self:
        """The state before the first pick, from E_x(x) (B, D)."""
        state = type(self)(self.lam, self.fade)
        state._query = state._vector = query
        return state

    def update(self, context: Array) -> Self:
        """The state after a pick, from E_z (B, D) of each row's pick."""
        state = type(self)(self.lam, self.fade)
        state._vector = self.compose(self._query, self.vector(), context)
        state._query, state._kept = self._query, self._kept
        return state

    def take(self, rows: Any) -> Self:
        """The states of some rows (M,), in that order."""
        state, query, vector = type(self)(self.lam, self.fade), self._query, self.vector()
        state._query, state._vector = query[rows], vector[rows]  # type: ignore[index]
        return state

    def vector(self) -> Array:
        """The vectors (B, D) whose inner products with E_c(c) are the logits of Eq. 4."""
        if self._vector is None:
            raise RuntimeError("start(query) comes before update and vector")
        return self._vector


class AdditiveState(State[Array]):
    """The paper's state (Eq. 4): E_x(x) + λ · Σ_{i<t} E_z(z_i)."""

    name = "additive"
    summary = "Eq. 4, the query plus λ times the picks"

    def compose(self, query: Any, vector: Any, context: Any) -> Any:
        """See `State.compose`."""
        return vector + self.lam * context

    def sql(self) -> str:
        """See `State.sql`."""
        return f"{{vector}} + {_filled(self.lam)} * {{context}}"


class SaturatingState(State[Array]):
    """What a pick covers becomes less needed: x_t = x_{t−1} − λ · E_z(z_t) ⊙ (x_{t−1} − ρ_t · x_0), element by element.

    Coordinates stand for structures: E_x says how much each is needed, E_c and E_z which of them an example has (0 to
    1). Of what pick z_t covers, the share ρ_t = cos(x_0⁺, E_z(z_t))^p stays needed: the closer the whole pick is to
    what is needed, the more it pays to show it again in another question. Language models answer more questions
    correctly that way than if every pick must cover something new.

    Little stays needed if no program resembles what is needed, and nothing if p is None. With λ = 1 the inner product
    with E_c(c) is then the need that c newly covers, and greedy decoding is greedy expected coverage.
    """

    name = "saturating"
    summary = "what a pick covers is needed less (only for vectors of structures)"
    needs_structures = True

    def compose(self, query: Any, vector: Any, context: Any) -> Any:
        """See `State.compose`."""
        if self.fade is None:
            return vector * (1 - self.lam * context)
        if self._kept is None:
            needs = query * (query > 0)
            self._kept = needs, _dots(needs, needs)
        needs, length = self._kept
        share = (_dots(needs, context) / (length * _dots(context, context) + _TINY) ** 0.5) ** self.fade
        return vector - self.lam * context * (vector - share * query)

    def sql(self) -> str:
        """See `State.sql`. A share below 1e-9 is 0 there: pgvector refuses products too small for float32."""
        covered = f"{_filled(self.lam)} * {{context}}"
        if self.fade is None:
            return f"{{vector}} * ({_filled(1)} - {covered})"
        squares = f"({{needs}} <#> {{needs}}) * ({{context}} <#> {{context}}) + {_TINY}"
        share = f"power(greatest(-({{needs}} <#> {{context}}), 0) / sqrt({squares}), {self.fade!r})"
        share = f"CASE WHEN {share} < 1e-9 THEN 0 ELSE {share} END"
        return f"{{vector}} - {covered} * ({{vector}} - {_filled(share)} * {{query}})"


def _dots(left: Any, right: Any) -> Any:
    """The inner products (B, 1) of rows (B, D)."""
    return (left[..., None, :] @ right[..., None])[..., 0]


def _filled(number: float | str) -> str:
    """A pgvector vector that repeats one number."""
    return f"array_fill(({number})::real, ARRAY[{{dim}}])::vector"


def make_state(name: str, lam: float, fade: float | None = None) -> State[Any]:
    """A fresh state, by the name in `STATES` that settings and checkpoints use, or an `InputError`."""
    if name not in STATES:
        known = " and ".join(f"'{known}'" for known in STATES)
        raise InputError(f"unknown state '{name}': this version of langchain-rcr knows {known}")
    return STATES[name](lam, fade)
