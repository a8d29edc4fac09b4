"""`Planned`: the driver that follows a `Schedule` op by op. It makes no scheduling decisions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from .._values.layout import Gather
from .._values.mesh import Mesh
from ..planning.checking.symbolic_run import scattered
from ..planning.leaving import to_finish
from ..planning.ops import Caller, Communicator, Compute, Deliver, Free, Launch, Local, Op, Purpose, Region
from ..planning.schedule import Schedule
from .blocks import Copy, gradient_copy, local_view, shard_copy, whole_copies, whole_view
from .channel import comm
from .context import current_timeline
from .session import Session
from .timeline import Timeline
from .use import Unreduced, Use

Tensor = Any
_WHOLE_GRADIENTS = ("gradient", "total")
"""The kinds of buffers that have the shape of a whole weight, and no padding."""


class Prepared:
    """A schedule, and its tables for the executor, computed once.

    Attributes:
        works: for each op, the method of `Planned` that runs it; None for a `Compute`.
        slots: the indices of the ops before and after each event.
        waits: for each op, the ops to wait for.
        waited: the ops that another op waits for.
        compute: the `Compute` of each event.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops: list[Op] = list(schedule.ops)
        self.works = [_work(op) for op in self.ops]
        number = {op.name: i for i, op in enumerate(self.ops)}
        self.waits = [[number[name] for name in op.waits] for op in self.ops]
        self._add_stream_order()
        self.waited = {other for waits in self.waits for other in waits}
        self.slots: dict[tuple[int, str], range] = {}
        self.compute: dict[int, int] = {}
        start = 0
        for slot in schedule.slots:
            self.slots[slot.event, slot.when] = range(start, start + len(slot.ops))
            start += len(slot.ops)
        for i, op in enumerate(self.ops):
            if isinstance(op, Compute):
                self.compute[op.event] = i

    def _add_stream_order(self) -> None:
        # A device runs a stream in order. gloo does not: an op that touches a region of an earlier launch on the same
        # stream must wait for that launch. On a device these waits cost nothing.
        launched: dict[int, list[tuple[Region, int]]] = {}
        for i, op in enumerate(self.ops):
            touched = (*op.reads, *op.writes)
            for region in touched:
                before = launched.get(region.buffer, ())
                self.waits[i] += [j for other, j in before if other.overlaps(region) and j not in self.waits[i]]
            if isinstance(op, Launch):
                for region in touched:
                    launched.setdefault(region.buffer, []).append((region, i))


def _work(op: Op) -> Callable[[Planned, Any], Any] | None:
    name = op.kind if isinstance(op, Local) else type(op).__name__.lower()
    return None if isinstance(op, Compute) else getattr(Planned, f"_{name}")


def make_groups(schedule: Schedule, mesh: Mesh) -> None:
    """Makes the groups of a schedule, on all ranks in one order, before a collective of it is in flight.

    Communication: on a device one small all-reduce for each new group.
    """
    for communicator in dict.fromkeys(op.communicator for op in schedule.ops if isinstance(op, Launch)):
        comm(mesh, communicator.axes, communicator.purpose).group()


class Planned:
    """The `Driver` that follows a schedule for one step.

    Args:
        session: the step.
        prepared: the schedule of the program that the step is expected to run.
        arrays: the step's sharded arguments by leaf index (`Weight.origin`).
        poison: fill freed buffers with NaN, to reveal a use after free.
    """

    def __init__(self, session: Session, prepared: Prepared, arrays: dict[int, Any], *, poison: bool = False) -> None:
        self.session, self.prepared, self.arrays, self.poison = session, prepared, arrays, poison
        self.schedule = schedule = prepared.schedule
        self.backend, self.mesh = session.backend, session.mesh
        self.streams = self.backend.streams(self.mesh.device)
        self.at_once = self.streams.runs_at_once()
        self.coordinate = self.mesh.coordinate
        self.groups: dict[Communicator, Any] = {}
        self.rows: dict[int, Any] = {}
        self.buffers: list[Tensor | None] = [None] * len(schedule.buffers)
        self.pending: list[Any] = [None] * len(self.prepared.ops)
        self.issued = [False] * len(self.prepared.ops)
        self.delivered: dict[int, Tensor] = {}
        self.left: Any = None  # what the next op waits for, once the plan was left
        self.timeline: Timeline | None = current_timeline()

    # --- events -----------------------------------------------------------------------------------------------------
    def before_forward(self, use: Use) -> list[Tensor]:
        self._begin(use.index)
        return [self._whole(use, use.index, index) for index in range(len(use.weights))]

    def after_forward(self, use: Use) -> None:
        self._end(use.index)

    def before_backward(self, use: Use) -> None:
        self._begin(use.backward_index)

    def whole(self, use: Use, index: int) -> Tensor:
        return self._whole(use, use.index if use.backward_index < 0 else use.backward_index, index)

    def after_backward(self, use: Use, gradients: Sequence[Tensor]) -> None:
        compute = self.prepared.ops[self.prepared.compute[use.backward_index]]
        assert isinstance(compute, Compute)
        for region, gradient in zip(compute.writes, gradients, strict=True):
            self.buffers[region.buffer] = gradient
        self._end(use.backward_index)

    def pin(self, index: int) -> None:
        self._run(index, "before")

    def end_backward(self, index: int) -> dict[int, Tensor]:
        self._run(index, "before")
        delivered, self.delivered = self.delivered, {}
        return delivered

    def end_step(self, index: int) -> None:
        self._run(index, "before")
        self.buffers = []  # delivered tensors belong to the caller now

    def leave(self) -> Unreduced:
        """Finishes reductions that have begun, drops all else, and returns gradients. See Note [Leaving a plan]."""
        started = [pending for pending in self.pending if pending is not None]
        self.left = self.streams.issue("leave", "compute", started, lambda: None, self.session.control.poll)
        for i in to_finish(self.schedule, self.issued):
            self._issue(i)
        for i in range(len(self.pending)):
            self._wait(i)
        self.streams.wait(self.left, self.session.control.poll)
        left = Unreduced(finished=self.delivered)
        for buffer, tensor in zip(self.schedule.buffers, self.buffers, strict=True):
            if buffer.kind in _WHOLE_GRADIENTS and tensor is not None and buffer.weight is not None:
                left.wholes[buffer.weight] = tensor
        issued = {op.name for op, done in zip(self.prepared.ops, self.issued, strict=True) if done}
        for weight, region in scattered(self.schedule, issued).items():
            left.blocks[weight] = self._flat(region)
        self._wait_for_compute()
        self.buffers = [None] * len(self.buffers)
        return left

    def _wait_for_compute(self) -> None:
        """Makes all streams wait for the compute stream, which may still read memory of theirs that is dropped."""
        poll = self.session.control.poll
        now = self.streams.issue("left", "compute", (), lambda: None, poll)
        for stream in get_args(Purpose):
            self.streams.issue("left", stream, (now,), lambda: None, poll, is_awaited=False)

    # --- slots ------------------------------------------------------------------------------------------------------
    def _begin(self, event: int) -> None:
        self._run(event, "before")
        if self.timeline is not None:
            self.timeline.begin(self.prepared.ops[self.prepared.compute[event]].name, self.streams.mark())

    def _end(self, event: int) -> None:
        compute = self.prepared.compute[event]
        if self.timeline is not None:
            self.timeline.end(self.prepared.ops[compute].name, self.streams.mark())
        if compute in self.prepared.waited and not self.at_once:
            label = self.prepared.ops[compute].name
            self.pending[compute] = self.streams.issue(label, "compute", (), lambda: None, self.session.control.poll)
        self._run(event, "after")

    def _run(self, event: int, when: str) -> None:
        for i in self.prepared.slots.get((event, when), ()):
            self._issue(i)

    def _issue(self, i: int) -> None:
        op, work = self.prepared.ops[i], self.prepared.works[i]
        self.issued[i] = True
        if work is None or (self.at_once and not isinstance(op, Launch)):
            for other in self.prepared.waits[i]:
                self._wait(other)
            if work is not None:
                work(self, op)
            return
        waits = [self.pending[other] for other in self.prepared.waits[i] if self.pending[other] is not None]
        if self.left is not None:
            waits.append(self.left)
        is_launch, poll = isinstance(op, Launch), self.session.control.poll
        is_awaited = i in self.prepared.waited or self.left is not None
        is_timed = is_launch and self.timeline is not None
        pending = self.streams.issue(
            op.name, op.stream, waits, lambda: work(self, op), poll, is_awaited=is_awaited, is_timed=is_timed
        )
        if is_launch or is_awaited:
            self.pending[i] = pending
        if self.left is not None:
            self.left = pending  # one op after another: waits that skipped ops had implied are gone
        if self.timeline is not None and is_launch:
            self.timeline.launched(op.stream, op.name, pending)

    def _wait(self, i: int) -> None:
        if self.pending[i] is not None:
            self.streams.wait(self.pending[i], self.session.control.poll)

    # --- memory -----------------------------------------------------------------------------------------------------
    def _whole(self, use: Use, event: int, index: int) -> Tensor:
        compute = self.prepared.ops[self.prepared.compute[event]]
        assert isinstance(compute, Compute)
        region = compute.reads[index]
        if self.schedule.buffers[region.buffer].kind == "shard":
            return self.backend.detach(use.arrays[index]._value)
        return whole_view(self._flat(region), self._gather(use.weights[index]), self.coordinate)

    def _array(self, weight: int) -> Any:
        record = self.schedule.program.weights[weight]
        if record.origin is None:
            return self.session.arrays[weight]
        if not record.rows:
            return self.arrays[record.origin]
        if weight not in self.rows:
            self.rows[weight] = functools.reduce(lambda array, row: array[row], record.rows, self.arrays[record.origin])
        return self.rows[weight]

    def _gather(self, weight: int) -> Gather:
        return self._array(weight).layout.gather(self.schedule.program.weights[weight].gather_axes)

    def _shard(self, region: Region) -> Tensor:
        weight = self.schedule.buffers[region.buffer].weight
        assert weight is not None
        return self.backend.detach(self._array(weight)._value)

    def _flat(self, region: Region) -> Tensor:
        """Returns a region as a flat tensor. Allocates its buffer on the first write."""
        buffer = self.schedule.buffers[region.buffer]
        if buffer.kind == "shard":
            return self.backend.contiguous(self._shard(region)).reshape(-1)
        tensor = self.buffers[region.buffer]
        if tensor is None:
            assert buffer.kind not in _WHOLE_GRADIENTS, buffer
            with self.streams.memory(buffer.stream):
                tensor = self.backend.empty((buffer.numel,), buffer.dtype, self.mesh.device)
            self.buffers[region.buffer] = tensor
        elif buffer.kind in _WHOLE_GRADIENTS:
            return self.backend.contiguous(self.backend.detach(tensor)).reshape(-1)
        return tensor if region.stop - region.start == buffer.numel else tensor[region.start : region.stop]

    def _caller(self, op: Caller) -> None:
        """Does nothing: the caller runs this op. Only its place in the compute stream matters."""

    def _free(self, op: Free) -> None:
        tensor, self.buffers[op.buffer] = self.buffers[op.buffer], None
        if self.poison and self.schedule.buffers[op.buffer].kind != "gradient":  # a gradient is only borrowed
            self.backend.fill(tensor, math.nan)

    def _deliver(self, op: Deliver) -> None:
        if self.schedule.buffers[op.region.buffer].kind == "total":
            delivered = self.buffers[op.region.buffer]
        else:
            delivered = local_view(self._flat(op.region), self._gather(op.weight), self.coordinate)
        self.delivered[op.weight] = delivered

    # --- ops --------------------------------------------------------------------------------------------------------
    def _launch(self, op: Launch) -> Any:
        sends = [self._flat(region) for region in op.reads]
        receives = sends if op.collective == "all_reduce" else [self._flat(region) for region in op.writes]
        return self.backend.launch(op.collective, self._group(op.communicator), sends, receives)

    def _group(self, communicator: Communicator) -> Any:
        if communicator not in self.groups:
            self.groups[communicator] = comm(self.mesh, communicator.axes, communicator.purpose).group()
        return self.groups[communicator]

    def _pack_shards(self, op: Local) -> None:
        blocks = op.writes[0].split(self.schedule.program.weights[weight].block_numel for weight in op.weights)
        pieces = zip(op.weights, op.reads, map(self._flat, blocks), strict=True)
        copies = [shard_copy(self.backend, block, self._shard(r), self._gather(w)) for w, r, block in pieces]
        self.backend.copy_all(copies)

    def _parts(self, op: Local, message: Tensor) -> list[Tensor]:
        """Returns the columns of each weight in a message, which has one row for each rank."""
        records = [self.schedule.program.weights[weight] for weight in op.weights]
        rows = message.reshape((records[0].num_shards, sum(record.block_numel for record in records)))
        ends = itertools.accumulate((record.block_numel for record in records), initial=0)
        return [rows[:, start:stop] for start, stop in itertools.pairwise(ends)]

    def _unpack_wholes(self, op: Local) -> None:
        parts = self._parts(op, self._flat(op.reads[0]))
        pieces = zip(op.weights, parts, op.writes, strict=True)
        copies: list[Copy] = []
        for weight, part, region in pieces:
            copies += whole_copies(self._flat(region), part, self._gather(weight), self.coordinate)
        self.backend.copy_all(copies)

    def _pack_gradients(self, op: Local) -> None:
        parts = self._parts(op, self._flat(op.writes[0]))
        copies: list[Copy] = []
        for weight, part, region in zip(op.weights, parts, op.reads, strict=True):
            gradient = self.backend.detach(self.buffers[region.buffer])
            copies.append(gradient_copy(self.backend, part, gradient, self._gather(weight), op.divisor))
        self.backend.copy_all(copies)

    def _accumulate(self, op: Local) -> None:
        if op.weights:
            self._accumulate_wholes(op)
            return
        for earlier, later, total in zip(op.reads[::2], op.reads[1::2], op.writes, strict=True):
            other = later if total == earlier else earlier
            self.backend.accumulate(self._flat(total), self._flat(other))

    def _accumulate_wholes(self, op: Local) -> None:
        (earlier, later), (total,) = op.reads, op.writes
        if total == earlier:
            self.backend.accumulate(self.buffers[total.buffer], self.buffers[later.buffer])
        else:
            left, right = self.buffers[earlier.buffer], self.buffers[later.buffer]
            dtype = self.schedule.buffers[total.buffer].dtype
            self.buffers[total.buffer] = self.backend.add(left, right, dtype)

    def _own(self, op: Local) -> None:
        for weight, lent, region in zip(op.weights, op.reads, op.writes, strict=True):
            gradient = self.buffers[lent.buffer]
            adopted = self.backend.adopt(gradient)
            if adopted is None or adopted.shape[0] != region.numel:
                target = local_view(self._flat(region), self._gather(weight), self.coordinate)
                self.backend.copy(target, self.backend.detach(gradient), op.divisor)
                continue
            self.buffers[region.buffer] = adopted
            if op.divisor != 1:
                self.backend.divide(adopted, op.divisor)

    def _zero(self, op: Local) -> None:
        for region in op.writes:
            self.backend.fill(self._flat(region), 0.0)

    def _sum_parts(self, op: Local) -> None:
        for source, target in zip(op.reads, op.writes, strict=True):
            rows = self._flat(source).reshape((op.parts, -1))
            self.backend.sum_parts(self._flat(target), [rows[i] for i in range(op.parts)])

    def _copy(self, op: Local) -> None:
        copies: list[Copy] = []
        for source, region in zip(op.reads, op.writes, strict=True):
            buffer, target = self.schedule.buffers[source.buffer], self._flat(region)
            if buffer.kind == "shard":
                assert buffer.weight is not None
                copies.append((whole_view(target, self._gather(buffer.weight), self.coordinate), self._shard(source)))
            elif buffer.kind in _WHOLE_GRADIENTS:
                assert buffer.weight is not None
                gradient = self.backend.detach(self.buffers[source.buffer])
                part = target.reshape((1, -1))
                copies.append(gradient_copy(self.backend, part, gradient, self._gather(buffer.weight)))
            else:
                copies.append((target, self._flat(source)))
        self.backend.copy_all(copies)

    def _scale(self, op: Local) -> None:
        for region in op.writes:
            self.backend.divide(self._flat(region), op.divisor)
