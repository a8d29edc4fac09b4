"""The `Schedule`: every collective, copy, wait and free of a step, as a value that can be printed and checked.

An `Op` runs on one stream. Ops of a stream run in the order in which they are issued; between streams only `waits`
order them. The order in which the schedule lists its ops (all slots, one after another) is the order in which every
rank issues them, and read as a sequential program it *is* the meaning of the schedule: `check` proves that no timing
can show another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .ops import Buffer, Caller, Compute, Deliver, Free, Launch, Local, Op, Region, itemsize
from .policy import Policy
from .program import Program

# Note [Whose memory]
# The allocator of a device keeps memory by stream. What was taken on a stream goes back to it as soon as the host drops
# it, and is given out again at once, in the order of that stream. Memory that only ops of the schedule use belongs to
# the stream of its first write, and its `Free` waits for the other streams. But a gradient that was delivered is
# dropped by the caller, at any time, while the caller's own work on the compute stream may still have to read it. So
# what is delivered is memory of the compute stream. If another stream writes it first, that stream waits for all work
# that the compute stream was given before, the caller's own work between two events included: for the latest op of the
# compute stream in the same slot, or for the `Compute` just before it, or for a `Caller` that is put there.
# And every other stream begins a step by waiting for the first op of the step.


@dataclass(frozen=True, slots=True)
class Slot:
    """The ops to issue before or after one event of the program.

    A compute event's `Compute` is the last op before it.
    """

    event: int
    when: Literal["before", "after"]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan for one program: buffers, and ops attached to the events of the program.

    `slots` are in issue order and name each (event, when) at most once. ``str(schedule)`` is its exact text form.
    """

    program: Program
    policy: Policy
    buffers: tuple[Buffer, ...]
    slots: tuple[Slot, ...]

    @property
    def ops(self) -> Iterator[Op]:
        """Every op, in issue order."""
        return (op for slot in self.slots for op in slot.ops)

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if they planned the same schedule."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def name(self, region: Region) -> str:
        """Returns a region for people: its buffer's name, and which elements if not all: ``reduce block[0:128]``."""
        buffer = self.buffers[region.buffer]
        whole = (region.start, region.stop) == (0, buffer.numel)
        return buffer.name if whole else f"{buffer.name}[{region.start}:{region.stop}]"

    def __str__(self) -> str:
        return "\n".join(_text(self))


# --------------------------------------------------------------------------------------------------------------- text
#
# Exact: schedules that differ have texts that differ. One line for a buffer, one for an op, so that `diff` shows what
# a change of policy changes.


def _text(schedule: Schedule) -> Iterator[str]:
    program, ops = schedule.program, tuple(schedule.ops)
    yield f"schedule of {len(program.events)} events: {len(schedule.buffers)} buffers, {len(ops)} ops"
    yield f"program {program.fingerprint}"
    yield str(schedule.policy)
    yield ""
    yield from _table([_buffer_row(index, buffer) for index, buffer in enumerate(schedule.buffers)])
    streams = max((len(op.stream) for op in ops), default=0)
    names = max((len(op.name) for op in ops), default=0)
    for slot in schedule.slots:
        event = program.events[slot.event]
        yield ""
        yield f"{slot.when} {program.describe(event)} (event {slot.event})"
        step = ""
        for op in slot.ops:
            previous, step = step, _step(schedule, op) if event.kind == "backward" and slot.when == "after" else ""
            comment = f"  # {step}" if step and step != previous else ""
            yield f"  {op.stream:{streams}}  {op.name:{names}}  {_describe(schedule, op)}{comment}"


def _buffer_row(index: int, buffer: Buffer) -> tuple[str, ...]:
    weight = "" if buffer.weight is None else f"weight {buffer.weight}"
    size = f"{buffer.size_bytes} bytes"
    return (str(index), buffer.name, buffer.kind, f"{buffer.numel} {buffer.dtype}", size, buffer.stream, weight)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _describe(schedule: Schedule, op: Op) -> str:
    waits = f", waits for {', '.join(op.waits)}" if op.waits else ""
    match op:
        case Free():
            what, size = f"free {op.buffer}", schedule.buffers[op.buffer].size_bytes
        case Deliver():
            what, size = f"deliver {schedule.name(op.region)} as weight {op.weight}", _size(schedule, (op.region,))
        case Caller():
            written = ", ".join(map(schedule.name, op.writes)) or "()"
            what, size = f"caller: -> {written}", _size(schedule, op.writes)
        case _:
            reads, writes = (", ".join(map(schedule.name, regions)) or "()" for regions in (op.reads, op.writes))
            what, size = f"{_action(op)}: {reads} -> {writes}", _size(schedule, op.writes or op.reads)
    return f"{what}, {size} bytes{waits}"


def _size(schedule: Schedule, regions: tuple[Region, ...]) -> int:
    return sum(region.numel * itemsize(schedule.buffers[region.buffer].dtype) for region in regions)


def _action(op: Compute | Launch | Local) -> str:
    match op:
        case Compute():
            return f"event {op.event}"
        case Launch():
            return f"{op.collective} over {op.communicator}"
        case Local():
            fields = [f"weights {', '.join(map(str, op.weights))}"] if op.weights else []
            fields += [f"{op.parts} parts"] if op.parts != 1 else []
            fields += [f"divisor {op.divisor}"] if op.divisor != 1 else []
            return f"{op.kind} ({'; '.join(fields)})" if fields else op.kind


def _step(schedule: Schedule, op: Op) -> str:
    """Returns which of the four steps of a backward an op belongs to: see Note [The four steps of a backward]."""
    kind = schedule.buffers[op.buffer].kind if isinstance(op, Free) else op.kind if isinstance(op, Local) else ""
    if op.stream == "gather" or kind == "accumulate":
        return ""
    fills = isinstance(op, Local) and all(schedule.buffers[region.buffer].kind == "reduce" for region in op.writes)
    if op.stream == "all_reduce" and not fills:
        return "step 4"
    if isinstance(op, Deliver) or kind in ("scale", "reduce") or (op.stream, kind) == ("compute", "copy"):
        return "step 3"
    return "step 2" if isinstance(op, Free) or kind == "sum_parts" else "step 1"
