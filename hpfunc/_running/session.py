"""`Session`: one step while it runs. It numbers weights, units and events; a driver moves the data.

There are two drivers: `eager.Eager`, the reference, and `planned.Planned`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, get_args
from weakref import WeakKeyDictionary

from .. import backends
from .._values.array import Owner, ShardedArray, Step, describe
from .._values.layout import Gather
from .._values.mesh import Mesh
from .._values.numerics import Numerics
from ..planning.ops import Purpose
from ..planning.program import Event, Program, Unit, Weight
from .agreement import Control, control
from .use import Differentiating, Driver, Members, Unreduced, Use
from .weights import weight_record
from .writes import refuse_written

_unit = lru_cache(maxsize=65536)(Unit)
"""As `use._event`."""


def _equal(planned: object, recorded: object) -> bool:
    return planned is recorded or planned == recorded


def _nothing(*_: Any) -> None:
    """Work that is none."""


class Session:
    """One step on one rank: it numbers weights, units and events as they appear, and follows a plan while it fits.

    Attributes:
        driver: moves the data: by the plan, or without a plan `reference`.
        arrays: the array of each weight; `gathers` has its `Gather`.
        debug: compare values that must be the same on several ranks; see `_running.comparisons`.
        plan: the program that the step is expected to run; None once it does not.
        names: the path of each argument, by `Weight.origin`.
        paths: the path of each array that is not an argument of a step, while the array lives.
        step: identifies this step in the `_origin` of its arguments.
        has_updates: whether weights were updated in it.
    """

    def __init__(
        self,
        mesh: Mesh,
        reference: Callable[[Session, Unreduced], Driver],
        *,
        is_abstract: bool = False,
        debug: bool = False,
    ) -> None:
        self.mesh = mesh
        self.backend = backends.get(mesh.framework)
        self.control: Control = control(mesh)
        self.is_abstract, self.debug = is_abstract, debug
        self._reference = reference
        self.driver = reference(self, Unreduced())
        self.plan: Program | None = None
        self.names: dict[int, str] = {}
        self.paths: MutableMapping[Owner, str] = WeakKeyDictionary()
        self.step, self.has_updates = Step(), False
        self.weights: list[Weight] = []
        self.arrays: list[ShardedArray] = []
        self.gathers: list[Gather] = []
        self.units: list[Unit] = []
        self.members: list[Members] = []
        self.events: list[Event] = []
        self._weight_index: dict[object, int] = {}
        self._unit_index: dict[tuple[str, tuple[int, ...]], int] = {}
        self._unit_uses: list[int] = []
        self._name_uses: dict[str, int] = {}
        self.run_numbers = itertools.count()
        if not is_abstract:
            self.control.begin_step()

    @property
    def program(self) -> Program:
        """The program that has been recorded so far."""
        return Program(tuple(self.weights), tuple(self.units), tuple(self.events))

    # --- naming -----------------------------------------------------------------------------------------------------
    def use(self, name: str, arrays: Sequence[ShardedArray], run: Differentiating | None, axes: tuple[str, ...]) -> Use:
        """Returns a use of the unit with this name and arrays, gathered over `axes`. Numbers new weights and units."""
        weights = tuple(self._weight(array, run, axes) for array in arrays)
        key = (name, weights)
        unit = self._unit_index.get(key)
        if unit is None:
            unit = self._unit_index[key] = len(self.units)
            nth = self._name_uses[name] = self._name_uses.get(name, -1) + 1
            self.units.append(_unit(f"{name}.{nth}", weights))
            self.members.append(self._members(weights))
            self._unit_uses.append(0)
        return Use(self, run, arrays, unit)

    def _members(self, weights: Sequence[int]) -> Members:
        records = [self.weights[w] for w in weights]
        trainable = [record.trainable for record in records]
        released = [not record.shard_is_whole for record in records]
        return Members(trainable, released, [r.name for r in records], list(itertools.compress(weights, trainable)))

    def _weight(self, array: ShardedArray, run: Differentiating | None, axes: tuple[str, ...]) -> int:
        # An array is the same weight in all of a step, and in all backwards that make one gradient.
        root, rows = array._root()
        origin = self.origin_of(root)
        key = (root._owner if origin is None else origin, rows) if run is None else run.key(root, rows, origin)
        index = self._weight_index.get(key)
        if index is None:
            if origin is None:  # a step checks its arguments
                refuse_written("hpfunc.unit", [array], lambda: [self.name_of(array) or "an array that the step made"])
            index = self._weight_index[key] = len(self.weights)
            self.gathers.append(array.layout.gather(axes))
            self.weights.append(self._record(array, run, index))
            self.arrays.append(array)
        if run is not None:
            run.weights[root._owner][rows] = index
        return index

    def _record(self, array: ShardedArray, run: Differentiating | None, index: int) -> Weight:
        root, rows = array._root()
        numerics, num_backwards = (Numerics(), 1) if run is None else (run.numerics, run.backwards.count)
        shard_dtype = self.backend.dtype_name(array._value)
        if not self.backend.is_floating(shard_dtype):
            numerics = Numerics(reduce_op=numerics.reduce_op)
        name = self.name_of(array) or f"array {index} {describe(array)}"
        known = {"name": name, "origin": self.origin_of(root), "rows": rows}
        trainable = run is not None and array._tracker is run
        return weight_record(self.gathers[index], shard_dtype, numerics, num_backwards, trainable=trainable, **known)

    def name_of(self, array: ShardedArray) -> str:
        """Returns the path of an array, "" if it is unknown."""
        root, rows = array._root()
        origin = self.origin_of(root)
        name = self.paths.get(root._owner) if origin is None else self.names.get(origin)
        return name + "".join(f"[{row}]" for row in rows) if name else self.paths.get(array._owner, "")

    def origin_of(self, array: ShardedArray) -> int | None:
        """Returns which argument of this step an array is; None if it is not one, or is one of an earlier step."""
        origin = array._origin
        return origin[0] if origin is not None and origin[1] is self.step else None

    def count_use(self, unit: int) -> int:
        """Returns the number of the next use of a unit."""
        self._unit_uses[unit] += 1
        return self._unit_uses[unit] - 1

    def last_use(self, unit: int) -> int:
        """Returns the number of the last use of a unit."""
        return self._unit_uses[unit] - 1

    # --- events -----------------------------------------------------------------------------------------------------
    def emit(self, event: Event, use: Use | None = None) -> int:
        """Records an event, leaves the plan if the event does not fit, and returns its index."""
        index = len(self.events)
        self.events.append(event)
        self.control.standing.position = index
        if self.plan is not None and not self._fits(index, event, use):
            self.leave(index)
        return index

    def _fits(self, index: int, event: Event, use: Use | None) -> bool:
        plan = self.plan
        assert plan is not None
        if index >= len(plan.events) or not _equal(plan.events[index], event):
            return False
        if use is None or event.kind != "forward":
            return True
        if not _equal(plan.units[use.unit], self.units[use.unit]):
            return False
        return all(_equal(plan.weights[w], self.weights[w]) for w in use.weights)

    def follow(self, program: Program, driver: Driver) -> None:
        """Follows a plan from here on."""
        self.plan, self.driver = program, driver

    def abandon(self) -> None:
        """Drops everything in flight: the step has failed."""
        with suppress(Exception):  # of a device that is broken: that is what the step has failed with
            self._join_streams()
        self._drop()

    def _join_streams(self) -> None:
        """Makes all streams wait for one another: each may still use memory of another one that is dropped now."""
        streams, purposes = self.backend.streams(self.mesh.device), get_args(Purpose)
        ends = [streams.issue("failed", stream, (), _nothing, _nothing) for stream in purposes]
        now = streams.issue("failed", "compute", ends, _nothing, _nothing)
        for stream in purposes:
            streams.issue("failed", stream, (now,), _nothing, _nothing, is_awaited=False)

    def _drop(self) -> None:
        self.plan, self.driver = None, self._reference(self, Unreduced())

    def close(self) -> None:
        """Releases arrays and buffers: the step is over, and may be in a cycle that the collector finds late."""
        self._drop()
        self.arrays.clear()
        self._weight_index.clear()
        del self.driver

    @contextmanager
    def running(self) -> Iterator[Session]:
        """A context for the step: an error of the body fails the step on all ranks. Closes the session."""
        try:
            yield self
        except BaseException as error:
            self.abandon()
            self.control.fail(error)
            raise
        finally:
            self.close()

    def leave(self, index: int) -> None:
        """Continues without the plan: awaits and drops prefetched weights, and finishes reductions in flight."""
        assert self.plan is not None
        planned = self.plan.spell(self.plan.events[index]) if index < len(self.plan.events) else "the end"
        self.control.leave(f"event {index} is {self.program.spell(self.events[index])}, planned was {planned}")
        self.plan, self.driver = None, self._reference(self, self.driver.leave())

    def pin(self, name: str) -> None:
        """Records a collective of the caller."""
        index = self.emit(Event("collective", name=name))  # it may replace the driver
        self.driver.pin(index)

    def end(self) -> None:
        """Ends the step."""
        index = self.emit(Event("end_step"))  # it may replace the driver
        self.driver.end_step(index)
