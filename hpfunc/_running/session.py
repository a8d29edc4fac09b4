"""One step as it happens: a `Session` names its weights, units and events, and a driver moves the data.

There are two drivers: `eager.Eager`, the reference, and `planned.Planned`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from .. import backends
from .._values.array import Owner, ShardedArray, Step, describe
from .._values.layout import Gather
from .._values.mesh import Mesh
from .._values.numerics import Numerics
from ..backends import Inside
from ..planning.program import Event, Program, Unit, Weight
from .agreement import Control, control
from .blocks import block_numel
from .channel import finish_block, gather_whole, scatter_whole
from .eager import Eager
from .writes import refuse_written

Tensor = Any
_session: ContextVar[Session | None] = ContextVar("hpfunc_session", default=None)


def current_session() -> Session | None:
    """Returns the session of the enclosing `sharded` step, if any."""
    return _session.get()


@contextmanager
def session_scope(session: Session) -> Iterator[None]:
    """Makes `session` the one of the enclosing step."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


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

    def after_backward(self, use: Use, gradients: Sequence[Tensor | None]) -> None:
        """The backward of a use has ended."""
        ...

    def pin(self, index: int) -> None:
        """The caller's own collective follows."""
        ...

    def end_backward(self, index: int) -> None:
        """All gradients of a run must be in `Session.gradients` on return."""
        ...

    def end_step(self, index: int) -> None:
        """The step is over."""
        ...

    def leave(self) -> None:
        """Brings what is under way to an end, and hands unreduced gradients to the session: another driver goes on."""
        ...


@lru_cache(maxsize=65536)
def weight_record(
    gather: Gather,
    shard_dtype: str,
    numerics: Numerics,
    num_backwards: int,
    trainable: bool,
    origin: int | None,
    rows: tuple[int, ...],
    name: str,
) -> Weight:
    """Returns the planner's view of one array that is gathered so; equal arguments give the same object."""
    dtype, layout = numerics.param_dtype or shard_dtype, gather.layout
    num_terms = layout.mesh.axis_size(layout.mesh.data_axes) * num_backwards
    return Weight(
        name=name,
        block_numel=block_numel(gather),
        dtype=dtype,
        shard_dtype=shard_dtype,
        reduce_dtype=numerics.reduce_dtype or dtype,
        accum_dtype=numerics.accum_dtype or shard_dtype,
        gather_axes=gather.axes,
        num_shards=gather.num_blocks,
        reduce_axes=layout.reduce_axes,
        num_replicas=layout.mesh.axis_size(layout.reduce_axes),
        divisor=num_terms if numerics.reduce_op == "mean" else 1,
        even=layout.is_even,
        direct=gather.is_direct,
        trainable=trainable,
        origin=origin,
        rows=rows,
    )


class _Members(NamedTuple):
    """What is known of the weights of a unit, in their order; `trained` are the indices of those that train."""

    trainable: list[bool]
    released: list[bool]
    names: list[str]
    trained: list[int]


class Use:
    """One call of a unit: what the backend's VJP nodes and the driver know of it."""

    __slots__ = (
        "arrays", "backward_index", "changed", "index", "inside", "names", "needs_backward", "num_recomputes",
        "number", "released", "remat", "run", "scope", "session", "trainable", "trained", "unit", "weights",
    )  # fmt: skip

    def __init__(self, session: Session, run: Any, arrays: Sequence[ShardedArray], unit: int) -> None:
        self.session, self.run, self.arrays, self.unit = session, run, arrays, unit
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
        self.index = self.session.emit(Event("forward", self.unit, self.number), self)
        return self.session.driver.before_forward(self)

    def after_forward(self) -> None:
        """Releases them, as the driver decides."""
        if self.needs_backward:
            self.run.expect(self)
        self.session.driver.after_forward(self)

    @property
    def label(self) -> str:
        """The name of the unit."""
        return self.session.units[self.unit].name

    def inner(self) -> Use | None:
        """See `UnitUse`."""
        return Use(self.session, self.run, self.arrays, self.unit) if self.run.state == "forward" else None

    def dismiss(self) -> None:
        """See `UnitUse`."""
        self.run.settle(self, ())

    def whole(self, index: int) -> Tensor:
        """See `UnitUse`."""
        return self.session.driver.whole(self, index)

    def before_recompute(self) -> list[Tensor]:
        """See `UnitUse`."""
        self.index = self.session.emit(Event("recompute", self.unit, self.number), self)
        return self.session.driver.before_forward(self)

    def after_recompute(self) -> None:
        """See `UnitUse`."""
        self.session.driver.after_forward(self)

    def before_backward(self) -> None:
        """See `UnitUse`."""
        self.run.check_alive()
        self.backward_index = self.session.emit(Event("backward", self.unit, self.number), self)
        self.session.driver.before_backward(self)

    def after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """See `UnitUse`."""
        self.run.check_alive()
        self.run.settle(self, gradients)
        self.session.driver.after_backward(self, gradients)


class Session:
    """One step on one rank: it numbers weights, units and events as they appear, and follows a plan while it fits.

    Attributes:
        gradients: reduced gradients by weight index, written by the driver.
        accumulated: whole gradients of which further uses are to come.
        carried: scattered gradients to which those of a later backward are to be added.
        arrays: the array of each weight, and `gathers` how its shards are put together.
        debug: compare values that must be the same on several ranks; see `_running.comparisons`.
        plan: the program that the step is expected to run, for as long as it does.
        names: the path of each argument, by `Weight.origin`.
        paths: that of arrays which are no arguments of a step, for as long as they live.
        step: stands for this step in the `_origin` of its arguments.
        review: called with the program so far when a backward has ended that no plan led; may refuse it.
    """

    def __init__(self, mesh: Mesh, *, is_abstract: bool = False, debug: bool = False) -> None:
        self.mesh = mesh
        self.backend = backends.get(mesh.framework)
        self.control: Control = control(mesh)
        self.is_abstract, self.debug = is_abstract, debug
        self.driver: Driver = Eager(self)
        self.plan: Program | None = None
        self.names: dict[int, str] = {}
        self.paths: MutableMapping[Owner, str] = WeakKeyDictionary()
        self.step = Step()
        self.review: Callable[[Program], None] = lambda program: None
        self.weights: list[Weight] = []
        self.arrays: list[ShardedArray] = []
        self.gathers: list[Gather] = []
        self.units: list[Unit] = []
        self.members: list[_Members] = []
        self.events: list[Event] = []
        self.gradients: dict[int, Tensor] = {}
        self.accumulated: dict[int, Tensor] = {}
        self.carried: dict[int, Tensor] = {}
        self._weight_index: dict[object, int] = {}
        self._unit_index: dict[tuple[str, tuple[int, ...]], int] = {}
        self._unit_uses: list[int] = []
        self._name_uses: dict[str, int] = {}
        self._num_runs = 0
        if not is_abstract:
            self.control.begin_step()

    @property
    def program(self) -> Program:
        """What has been recorded so far."""
        return Program(tuple(self.weights), tuple(self.units), tuple(self.events))

    # --- naming -----------------------------------------------------------------------------------------------------
    def use(self, name: str, arrays: Sequence[ShardedArray], run: Any, axes: tuple[str, ...]) -> Use:
        """Returns a use of the unit that `name` and its arrays make, gathered over `axes`, numbering what is new."""
        weights = tuple(self._weight(array, run, axes) for array in arrays)
        key = (name, weights)
        unit = self._unit_index.get(key)
        if unit is None:
            unit = self._unit_index[key] = len(self.units)
            nth = self._name_uses[name] = self._name_uses.get(name, -1) + 1
            self.units.append(Unit(f"{name}.{nth}", weights))
            self.members.append(self._members(weights))
            self._unit_uses.append(0)
        return Use(self, run, arrays, unit)

    def _members(self, weights: Sequence[int]) -> _Members:
        members = _Members([], [], [], [])
        for w in weights:
            record = self.weights[w]
            members.trainable.append(record.trainable)
            members.released.append(record.num_shards > 1 or record.dtype != record.shard_dtype)
            members.names.append(record.name)
            if record.trainable:
                members.trained.append(w)
        return members

    def _weight(self, array: ShardedArray, run: Any, axes: tuple[str, ...]) -> int:
        # The arrays of a step, and those of the backwards that make one gradient, are the same weight in each of them.
        root, rows = array._root()
        origin = self.origin_of(root)
        key = (root._owner if origin is None else origin, rows) if run is None else run.key(root, rows, origin)
        index = self._weight_index.get(key)
        if index is None:
            if origin is None:  # a step looks at its arguments
                refuse_written("hpfunc.unit", [array], lambda: [self.name_of(array) or "an array that the step made"])
            index = self._weight_index[key] = len(self.weights)
            self.gathers.append(array.layout.gather(axes))
            self.weights.append(self._record(array, run, index))
            self.arrays.append(array)
        if run is not None:
            run.weights[root._owner][rows] = index
        return index

    def _record(self, array: ShardedArray, run: Any, index: int) -> Weight:
        root, rows = array._root()
        numerics, num_backwards = (Numerics(), 1) if run is None else (run.numerics, run.backwards.count)
        shard_dtype = self.backend.dtype_name(array._value)
        if not self.backend.is_floating(shard_dtype):
            numerics = Numerics(reduce_op=numerics.reduce_op)
        name = self.name_of(array) or f"array {index} {describe(array)}"
        trainable = run is not None and array._tracker is run
        return weight_record(
            self.gathers[index], shard_dtype, numerics, num_backwards, trainable, self.origin_of(root), rows, name
        )

    def name_of(self, array: ShardedArray) -> str:
        """Returns the path of an array, "" if none is known."""
        root, rows = array._root()
        origin = self.origin_of(root)
        name = self.paths.get(root._owner) if origin is None else self.names.get(origin)
        return name + "".join(f"[{row}]" for row in rows) if name else self.paths.get(array._owner, "")

    def origin_of(self, array: ShardedArray) -> int | None:
        """Returns which argument of this step an array is, if any: one that was kept from an earlier step is none."""
        origin = array._origin
        return origin[0] if origin is not None and origin[1] is self.step else None

    def new_run(self) -> int:
        """Returns the number of the next differentiation."""
        self._num_runs += 1
        return self._num_runs - 1

    def count_use(self, unit: int) -> int:
        """Returns the number of the next use of a unit."""
        self._unit_uses[unit] += 1
        return self._unit_uses[unit] - 1

    def last_use(self, unit: int) -> int:
        """Returns the number of the last use of a unit."""
        return self._unit_uses[unit] - 1

    # --- events -----------------------------------------------------------------------------------------------------
    def emit(self, event: Event, use: Use | None = None) -> int:
        """Writes an event down, leaves the plan if it does not fit, and returns its index."""
        index = len(self.events)
        self.events.append(event)
        self.control.standing.position = index
        if self.plan is not None and not self._fits(index, event, use):
            self.leave(index)
        return index

    def _fits(self, index: int, event: Event, use: Use | None) -> bool:
        plan = self.plan
        assert plan is not None
        if index >= len(plan.events) or plan.events[index] != event:
            return False
        if use is None or event.kind != "forward":
            return True
        assert event.unit is not None
        if plan.units[event.unit] != self.units[event.unit]:
            return False
        return all(plan.weights[w] is self.weights[w] or plan.weights[w] == self.weights[w] for w in use.weights)

    def follow(self, program: Program, driver: Driver) -> None:
        """Runs by a plan from here on."""
        self.plan, self.driver = program, driver

    def abandon(self) -> None:
        """Drops whatever is in flight: the step has failed."""
        self.plan, self.driver = None, Eager(self)
        for held in (self.gradients, self.accumulated, self.carried):
            held.clear()

    def close(self) -> None:
        """Lets go of arrays and buffers: the step is over, and may stand in a circle that the collector finds late."""
        self.abandon()
        self.arrays.clear()
        self._weight_index.clear()
        del self.driver

    def leave(self, index: int) -> None:
        """Goes on without the plan: what was prefetched is awaited and dropped, what was being reduced is finished."""
        assert self.plan is not None
        planned = self.plan.spell(self.plan.events[index]) if index < len(self.plan.events) else "the end"
        self.control.leave(f"event {index} is {self.program.spell(self.events[index])}, planned was {planned}")
        planned_driver, self.plan, self.driver = self.driver, None, Eager(self)
        planned_driver.leave()

    def pin(self, name: str) -> None:
        """Notes a collective of the caller."""
        index = self.emit(Event("collective", name=name))  # it may replace the driver
        self.driver.pin(index)

    def end(self) -> None:
        """Ends the step."""
        index = self.emit(Event("end_step"))  # it may replace the driver
        self.driver.end_step(index)

    def agree(self, index: int) -> None:
        """Compares with all ranks what comes next; see Note [Agreement]."""
        if not self.is_abstract:
            self.control.agree("hpfunc.sharded", lambda: self._facts(index))

    def _facts(self, index: int) -> str:
        event = self.events[index]
        lines = [f"event {index} is {self.program.spell(event)}"]
        if event.unit is not None:
            lines += [f"event {index} uses {self.weights[w]}" for w in self.units[event.unit].weights]
        return "\n".join(lines)

    # --- data -------------------------------------------------------------------------------------------------------
    def gather(self, weight: int) -> Tensor:
        """Returns a whole weight, awaited.

        Communication: an all-gather over its `gather_axes`.
        """
        record, array = self.weights[weight], self.arrays[weight]
        local = self.backend.detach(array._value)
        if record.num_shards == 1 and record.dtype == record.shard_dtype:
            return local
        return gather_whole(local, self.gathers[weight], "gather", record.dtype)

    def zeros(self, weight: int) -> Tensor:
        """Returns a zero gradient of a whole weight, which autograd did not reach."""
        shape = self.gathers[weight].whole_shape(self.mesh.coordinate)
        device = self.backend.device_of(self.arrays[weight]._value)
        return self.backend.empty(shape, self.weights[weight].dtype, device, zero=True)

    def scatter(self, weight: int, gradient: Tensor) -> Tensor:
        """Returns this rank's block of a whole gradient, summed over `gather_axes` and awaited.

        Communication: a reduce-scatter over `gather_axes`.
        """
        record, gather = self.weights[weight], self.gathers[weight]
        return scatter_whole(gradient, gather, "reduce_scatter", record.reduce_dtype, record.divisor)

    def finish(self, weight: int, block: Tensor) -> Tensor:
        """Returns the gradient of a weight from its scattered block; may write into the block.

        Communication: an all-reduce over `reduce_axes`.
        """
        w, gather = self.weights[weight], self.gathers[weight]
        return finish_block(block, gather, w.reduce_axes, "all_reduce", w.reduce_dtype, w.divisor, w.accum_dtype)
