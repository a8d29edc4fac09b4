"""The `Schedule`: every collective, copy, wait and free of a step, as a value that can be printed and checked.

An `Op` runs on one stream. Ops of a stream run in the order in which they are issued; between streams only `waits`
order them. The order in which the schedule lists its ops (all slots, one after another) is the order in which every
rank issues them, and read as a sequential program it *is* the meaning of the schedule: `check` proves that no timing
can show another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from .policy import Policy
from .program import Program

Stream = Literal["compute", "gather", "reduce_scatter", "all_reduce"]
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
LocalKind = Literal[
    "pack_shards", "unpack_wholes", "accumulate", "pack_gradients", "zero", "sum_parts", "own", "copy", "scale"
]
BufferKind = Literal[
    "shard", "send", "gathered", "whole", "gradient", "total", "staging", "reduce", "carry", "part", "output"
]

ALIGN_BYTES = 512


@cache
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element; the first number in a dtype's name is its bits.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("complex64"), itemsize("bool")
    (2, 1, 8, 1)
    """
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with a lifetime. It begins with the first op that writes it and ends with its `Free` or `Deliver`.

    A ``shard`` is the caller's, who writes it (`Caller`); everybody else only reads it. A ``gradient`` is borrowed from
    autograd: the backward's `Compute` writes it, and it may have any strides, or share its memory with others, so
    nothing else may write it, nor deliver it. Everything else is the runtime's. A ``total`` is the sum of the whole
    gradients of several uses.

    Attributes:
        stream: the stream from whose memory it is taken, and to which it goes back; its `Free` is on it. See Note
            [Whose memory].
        weight: the weight that it belongs to, where it is one's alone.
    """

    name: str
    kind: BufferKind
    numel: int
    dtype: str
    stream: Stream
    weight: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that the buffer's elements take."""
        return self.numel * itemsize(self.dtype)


class Region(NamedTuple):
    """Elements ``start`` to ``stop`` of a buffer (an index into `Schedule.buffers`)."""

    buffer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the region."""
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Returns whether the two regions share an element."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Communicator:
    """A group of ranks that one kind of collective has for itself: two kinds on one would queue behind each other."""

    purpose: Literal["gather", "reduce_scatter", "all_reduce"]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.purpose}@{'*'.join(self.axes)}"


@dataclass(frozen=True, slots=True)
class Compute:
    """A use of a unit: the caller's code. It reads whole weights and, backward, writes whole gradients.

    `writes` has one region per trainable weight in a ``backward``, in the order of the unit's weights, else none.
    `reads` has one region per weight of the unit: a ``whole`` buffer or, where nothing cuts the weight, its ``shard``.
    """

    name: str
    event: int
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"


@dataclass(frozen=True, slots=True)
class Caller:
    """What the caller has done on the compute stream up to here: among other things, it has written some shards.

    A step begins with one that writes the shards of the step's arguments, and ends with one that writes all of them
    again: from then on the caller may overwrite or drop them. Others stand before the first use of arrays that the step
    itself makes, and where Note [Whose memory] asks for one.
    """

    name: str
    writes: tuple[Region, ...] = ()
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"


@dataclass(frozen=True, slots=True)
class Launch:
    """Collectives over one communicator that go out together: ``reads[i]`` is sent, ``writes[i]`` received.

    ``all_gather``: (n) to (ranks * n). ``all_to_all``: (ranks * n) to the same size, part r comes from rank r.
    ``reduce_scatter``: (ranks * n) to (n), a sum. ``all_reduce``: in place, a sum; `reads` equals `writes`.
    """

    name: str
    collective: Collective
    communicator: Communicator
    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Local:
    """Work of one rank on its own memory.

    pack_shards: the shards of `weights` (short ones padded with zeros), cast to their `dtype`, one after another
        into one message.
    unpack_wholes: a gathered message (ranks * blocks of `weights`) into one whole weight per write.
    accumulate: ``reads[2i] + reads[2i + 1]`` into ``writes[i]``, the earlier one first, each cast to the dtype of the
        write before; in place where the write is one of the two. With `weights` it is of whole gradients.
    pack_gradients: whole gradients of `weights`, cut into blocks, cast to the message's dtype and divided by `divisor`
        before the cast, into one message (ranks * blocks of `weights`).
    zero: zeros into every write.
    sum_parts: ``reads[i]`` holds `parts` equal parts; their sum in that order into ``writes[i]``.
    own: the whole gradients of `weights` into ``writes[i]``, divided by `divisor`; the executor need not copy one that
        nobody else has.
    copy: ``reads[i]`` into ``writes[i]``, cast if their dtypes differ.
    scale: every write, in place, divided by `divisor`; `reads` equals `writes`.
    """

    name: str
    kind: LocalKind
    stream: Stream
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    waits: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    parts: int = 1
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class Free:
    """Gives a buffer back; `waits` names the last ops on other streams that use it."""

    name: str
    buffer: int
    stream: Stream
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hands the gradient of a weight to the caller, who owns the memory from then on."""

    name: str
    weight: int
    region: Region
    waits: tuple[str, ...] = ()
    stream: Stream = "compute"


Op: TypeAlias = Compute | Caller | Launch | Local | Free | Deliver

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
