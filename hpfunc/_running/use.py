"""`Use`, one call of a unit, and the protocols that it notifies: `Recorder`, `Driver`, `Differentiating`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

from .._values.array import Owner, ShardedArray
from .._values.layout import Gather
from .._values.mesh import Mesh
from .._values.numerics import Numerics
from ..backends import Backend, Inside
from ..planning.program import Carry, Event, Unit, Weight

Tensor = Any
_event = lru_cache(maxsize=65536)(Event)
"""Equal events are one object: they are those of the plan, and need not be compared field by field."""


@dataclass(slots=True)
class Unreduced:
    """Gradients of a backward that has not ended, by weight.

    Attributes:
        wholes: whole gradients, to which further uses will add.
        blocks: scattered gradients, to which a later backward will add.
        finished: reduced gradients, which wait for the end of the backward.
    """

    wholes: dict[int, Tensor] = field(default_factory=dict)
    blocks: dict[int, Tensor] = field(default_factory=dict)
    finished: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Backwards:
    """The backwards that make one gradient: a single one, or those of `accumulate`. See Note [Carried gradients].

    Attributes:
        count: number of backwards.
        carry: what all but the last backward carry to the next.
        left: number of backwards that remain, including the present one.
        first_run: number of the first run in its step.
        direct: sums of the gradients of local parts and plain tensors, by place among the differentiated leaves.
    """

    count: int = 1
    carry: Carry = ""
    left: int = 1
    first_run: int | None = None
    direct: dict[int, Tensor] = field(default_factory=dict)


class Driver(Protocol):
    """Moves the data of a session."""

    def before_forward(self, use: Use) -> list[Tensor]:
        """Returns the whole weights of a use before its forward or recomputation, whose event is ``use.index``."""
        ...

    def after_forward(self, use: Use) -> None:
        """The use, or the call that repeats it, has computed its forward."""
        ...

    def before_backward(self, use: Use) -> None:
        """The backward of a use begins."""
        ...

    def whole(self, use: Use, index: int) -> Tensor:
        """Returns one of the whole weights of a use whose backward has begun."""
        ...

    def after_backward(self, use: Use, gradients: Sequence[Tensor]) -> None:
        """The backward of a use has ended, with the whole gradients of the weights in `Use.trained`."""
        ...

    def pin(self, index: int) -> None:
        """The caller's own collective follows."""
        ...

    def end_backward(self, index: int) -> dict[int, Tensor]:
        """The backward of a run has ended. Returns the reduced gradients by weight, which the driver forgets."""
        ...

    def end_step(self, index: int) -> None:
        """The step is over."""
        ...

    def leave(self) -> Unreduced:
        """Finishes operations in flight, and returns the gradients with which another driver continues."""
        ...


class Differentiating(Protocol):
    """One differentiation, as the weights and uses of a step see it.

    Attributes:
        state: ``"forward"``, ``"backward"`` or ``"done"``.
        backwards: those that make one gradient.
        carry: what its backward carries to the next of them.
        uses_left: for each weight, the number of uses whose backward has not run yet.
        weights: the weights of the program by array: key () is the whole array, (i,) its row i.
    """

    state: str
    numerics: Numerics
    backwards: Backwards
    carry: Carry
    uses_left: dict[int, int]
    weights: dict[Owner, dict[tuple[int, ...], int]]

    def key(self, array: ShardedArray, rows: tuple[int, ...], origin: int | None) -> object:
        """Returns the key under which an array or row is one weight of the program."""
        ...

    def expect(self, use: Use) -> None:
        """Registers a use that will have a backward."""
        ...

    def settle(self, use: Use, gradients: Sequence[Tensor | None]) -> None:
        """Registers that the backward of a use has run."""
        ...

    def check_alive(self) -> None:
        """Raises UsageError if the graph is used outside of its backward."""
        ...


class Members(NamedTuple):
    """Facts about the weights of a unit, in their order. `trained` has the indices of those that train."""

    trainable: list[bool]
    released: list[bool]
    names: list[str]
    trained: list[int]


class Recorder(Protocol):
    """The step that a use belongs to. See `Session`."""

    mesh: Mesh
    backend: Backend
    driver: Driver
    weights: list[Weight]
    arrays: list[ShardedArray]
    gathers: list[Gather]
    units: list[Unit]
    members: list[Members]

    def count_use(self, unit: int) -> int:
        """Returns the number of the next use of a unit."""
        ...

    def emit(self, event: Event, use: Use | None = None) -> int:
        """Records an event, and returns its index."""
        ...


class Use:
    """One call of a unit, as the backend's VJP nodes (see `UnitUse`) and the driver see it."""

    __slots__ = (
        "arrays", "backward_index", "changed", "index", "inside", "names", "needs_backward", "num_recomputes",
        "number", "released", "remat", "run", "scope", "session", "trainable", "trained", "unit", "weights",
    )  # fmt: skip

    def __init__(
        self, session: Recorder, run: Differentiating | None, arrays: Sequence[ShardedArray], unit: int
    ) -> None:
        self.session, self.arrays, self.unit = session, arrays, unit
        self.run = cast(Differentiating, run)  # a use without backward has none
        self.weights = session.units[unit].weights
        self.trainable, self.released, self.names, self.trained = session.members[unit]
        self.needs_backward = self.remat = False
        self.inside: Inside | None = None
        self.changed: list[Any] = []
        self.scope: object = None
        self.num_recomputes = 0
        self.number = self.index = self.backward_index = -1

    def before_forward(self) -> list[Tensor]:
        """Returns the whole weights."""
        self.number = self.session.count_use(self.unit)
        self.index = self.session.emit(_event("forward", self.unit, self.number), self)
        return self.session.driver.before_forward(self)

    def after_forward(self) -> None:
        """Releases the whole weights if the driver decides so."""
        if self.needs_backward:
            self.run.expect(self)
        self.session.driver.after_forward(self)

    @property
    def label(self) -> str:
        """The name of the unit."""
        return self.session.units[self.unit].name

    def inner(self) -> Use | None:
        return Use(self.session, self.run, self.arrays, self.unit) if self.run.state == "forward" else None

    def dismiss(self) -> None:
        self.run.settle(self, ())

    def whole(self, index: int) -> Tensor:
        return self.session.driver.whole(self, index)

    def before_recompute(self) -> list[Tensor]:
        self.index = self.session.emit(_event("recompute", self.unit, self.number), self)
        return self.session.driver.before_forward(self)

    def after_recompute(self) -> None:
        self.session.driver.after_forward(self)

    def before_backward(self) -> None:
        self.run.check_alive()
        self.backward_index = self.session.emit(_event("backward", self.unit, self.number), self)
        self.session.driver.before_backward(self)

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self.run.check_alive()
        self.run.settle(self, gradients)
        wanted = zip(self.trained, itertools.compress(gradients, self.trainable), strict=True)
        filled = [self._zeros(w) if gradient is None else gradient for w, gradient in wanted]
        self.session.driver.after_backward(self, filled)

    def _zeros(self, weight: int) -> Tensor:
        session = self.session
        shape = session.gathers[weight].whole_shape(session.mesh.coordinate)
        device = session.backend.device_of(session.arrays[weight]._value)
        return session.backend.empty(shape, session.weights[weight].dtype, device, zero=True)
