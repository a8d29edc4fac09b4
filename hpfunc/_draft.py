"""A `Schedule` while it is written: a sequential program, whose waits are derived when it is complete.

The planner says only what happens, in which order and on which stream. Which stream must wait for which follows from
the regions that the ops touch, and is found here, once, for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from ._policy import Policy
from ._program import Event, Program
from ._schedule import (
    Buffer,
    BufferKind,
    Collective,
    Communicator,
    Compute,
    Deliver,
    Free,
    Launch,
    Local,
    LocalKind,
    Op,
    Region,
    Schedule,
    Slot,
    Stream,
)


class Draft:
    """Collects buffers and ops in the order in which they are to be issued, and gives them readable, unique names."""

    def __init__(self, program: Program, policy: Policy, *, ordered_sums: bool) -> None:
        self.program = program
        self.policy = policy
        self.ordered_sums = ordered_sums
        self._buffers: list[Buffer] = []
        self._slots: list[tuple[int, Literal["before", "after"], list[Op]]] = []
        self._shards: dict[int, Region] = {}
        self._names: Counter[str] = Counter()
        self._units = _labels([unit.name for unit in program.units])
        self._weights = _labels([weight.name for weight in program.weights])

    def at(self, event: int, when: Literal["before", "after"]) -> None:
        """Says where the ops that follow belong."""
        self._slots.append((event, when, []))

    def unit(self, index: int) -> str:
        return self._units[index]

    def weight(self, index: int) -> str:
        return self._weights[index]

    @property
    def reduced(self) -> Stream:
        """The stream of reduce buffers and of the local ops that fill them.

        Where sums are formed locally it is not that of the reduce-scatters: one more of these is launched before the
        last one is summed, and nothing should wait for it.
        """
        return "all_reduce" if self.ordered_sums else "reduce_scatter"

    def dtype(self, region: Region) -> str:
        return self._buffers[region.buffer].dtype

    def shard(self, weight: int) -> Region:
        """Returns the caller's shard of a weight."""
        if weight not in self._shards:
            w = self.program.weights[weight]
            buffer = Buffer(f"shard {self.weight(weight)}", "shard", w.block_numel, w.shard_dtype, "gather", weight)
            self._shards[weight] = self._add(buffer)
        return self._shards[weight]

    def buffer(
        self, kind: BufferKind, of: str, numel: int, dtype: str, stream: Stream, weight: int | None = None
    ) -> Region:
        """Returns the whole of a new buffer."""
        return self._add(Buffer(self._unique(f"{kind} {of}"), kind, numel, dtype, stream, weight))

    def compute(self, event: Event, index: int, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        name = f"{event.kind} {self.unit(event.unit or 0)}{f'#{event.use}' if event.use else ''}"
        self._issue(Compute(self._unique(name), index, tuple(reads), tuple(writes)))

    def launch(
        self,
        name: str,
        collective: Collective,
        communicator: Communicator,
        reads: Sequence[Region],
        writes: Sequence[Region],
    ) -> None:
        """Issues collectives on the stream of the communicator's purpose, so that it is never on two."""
        stream = communicator.purpose
        self._issue(Launch(self._unique(name), collective, communicator, stream, tuple(reads), tuple(writes)))

    def local(
        self,
        name: str,
        kind: LocalKind,
        stream: Stream,
        reads: Sequence[Region],
        writes: Sequence[Region],
        *,
        weights: tuple[int, ...] = (),
        parts: int = 1,
        divisor: int = 1,
    ) -> None:
        unique = self._unique(name)
        self._issue(Local(unique, kind, stream, tuple(reads), tuple(writes), (), weights, parts, divisor))

    def free(self, region: Region) -> None:
        """Frees the region's buffer, on the buffer's own stream."""
        buffer = self._buffers[region.buffer]
        self._issue(Free(f"free {buffer.name}", region.buffer, buffer.stream))

    def deliver(self, weight: int, region: Region) -> None:
        self._issue(Deliver(self._unique(f"deliver {self.weight(weight)}"), weight, region))

    def schedule(self) -> Schedule:
        """Returns the schedule, with the waits that its order needs."""
        ops = iter(derive_waits((op for _, _, ops in self._slots for op in ops), len(self._buffers)))
        slots = (Slot(event, when, tuple(islice(ops, len(drafts)))) for event, when, drafts in self._slots if drafts)
        return Schedule(self.program, self.policy, tuple(self._buffers), tuple(slots))

    def _add(self, buffer: Buffer) -> Region:
        self._buffers.append(buffer)
        return Region(len(self._buffers) - 1, 0, buffer.numel)

    def _issue(self, op: Op) -> None:
        self._slots[-1][2].append(op)

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        return name if self._names[name] == 1 else self._unique(f"{name}#{self._names[name]}")


def _labels(names: Sequence[str]) -> list[str]:
    """Returns the names, those that occur more than once with their index."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}[{index}]" for index, name in enumerate(names)]


# Note [Waits follow from regions]
# The flat list of ops, read one after another, is what a schedule means. Streams may run ahead of one another as long
# as nobody can tell: an op has to wait for an earlier op of another stream exactly if both touch one element and one of
# them writes it, or if one of them begins or ends the buffer that both touch. Of these the latest on each stream is
# enough, as a stream keeps its order, and none is needed for which an op before it on its own stream, or another of its
# waits, has waited already. Both are read off a vector clock: for each op, how many ops of every stream are known to
# be complete when it is, itself included.

Clock = dict[Stream, int]


def derive_waits(ops: Iterable[Op], num_buffers: int) -> list[Op]:
    """Returns the ops with the fewest waits that order each after everything before it with which it conflicts."""
    waits = _Waits(num_buffers)
    return [waits.add(op) for op in ops]


@dataclass(slots=True)
class _Uses:
    """The ops that have touched a buffer, by issue index."""

    reads: list[tuple[Region, int]] = field(default_factory=list)
    writes: list[tuple[Region, int]] = field(default_factory=list)


class _Waits:
    """The ops so far, what they touch, and when."""

    def __init__(self, num_buffers: int) -> None:
        self._uses = [_Uses() for _ in range(num_buffers)]
        self._ops: list[Op] = []
        self._clocks: list[Clock] = []
        self._last: defaultdict[Stream, Clock] = defaultdict(Clock)

    def add(self, op: Op) -> Op:
        clock = Clock(self._last[op.stream])
        waits: list[str] = []
        # The latest first: it may have waited for the others.
        for index in sorted(self._conflicts(op), reverse=True):
            other = self._ops[index]
            if other.stream != op.stream and not self._covers(clock, index):
                waits.append(other.name)
                _merge(clock, self._clocks[index])
        clock[op.stream] = clock.get(op.stream, 0) + 1
        self._last[op.stream] = clock
        found = tuple(reversed(waits))
        self._ops.append(op if op.waits == found else replace(op, waits=found))
        self._clocks.append(clock)
        self._remember(op)
        return self._ops[-1]

    def _covers(self, clock: Clock, index: int) -> bool:
        stream = self._ops[index].stream
        return clock.get(stream, 0) >= self._clocks[index][stream]

    def _conflicts(self, op: Op) -> set[int]:
        if isinstance(op, Free):
            uses = self._uses[op.buffer]
            return {index for _, index in uses.reads + uses.writes}
        reads, writes = _accesses(op)
        found = {index for region in (*reads, *writes) for _, index in self._uses[region.buffer].writes[:1]}
        for region in reads:
            found |= {index for other, index in self._uses[region.buffer].writes if region.overlaps(other)}
        for region in writes:
            uses = self._uses[region.buffer]
            found |= {index for other, index in uses.reads + uses.writes if region.overlaps(other)}
        return found

    def _remember(self, op: Op) -> None:
        if isinstance(op, Free):
            return
        index = len(self._ops) - 1
        reads, writes = _accesses(op)
        for region in reads:
            self._uses[region.buffer].reads.append((region, index))
        for region in writes:
            self._uses[region.buffer].writes.append((region, index))


def _accesses(op: Compute | Launch | Local | Deliver) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Returns what an op reads and writes. Whoever gets a gradient may do anything with it: a write."""
    return ((), (op.region,)) if isinstance(op, Deliver) else (op.reads, op.writes)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)
