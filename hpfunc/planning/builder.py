"""A `Schedule` while it is written: a sequential program, whose waits are derived as it grows.

The planner says only what happens, in which order and on which stream. Which stream must wait for which follows from
the regions that the ops touch, and is found here, once, for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from .ops import (
    Buffer,
    BufferKind,
    Caller,
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
    Slot,
    Stream,
)
from .policy import Policy
from .program import Event, Program
from .schedule import Schedule


class Draft:
    """Collects buffers and ops in the order in which they are to be issued, and gives them readable, unique names."""

    def __init__(self, program: Program, policy: Policy, *, ordered_sums: bool) -> None:
        self.program = program
        self.policy = policy
        self.ordered_sums = ordered_sums
        self._buffers: list[Buffer] = []
        self._slots: list[tuple[int, Literal["before", "after"], list[Op]]] = []
        self._shards: dict[int, Region] = {}
        self._names: dict[str, int] = {}
        self._units = _labels([unit.name for unit in program.units])
        self._weights = _labels([weight.name for weight in program.weights])
        self._waits = _Waits()

    def at(self, event: int, when: Literal["before", "after"]) -> None:
        """Says where the ops that follow belong."""
        self._slots.append((event, when, []))
        if when == "before":
            self._waits.caller_works()

    def unit(self, index: int) -> str:
        """Returns the name of a unit, unique among the units."""
        return self._units[index]

    def weight(self, index: int) -> str:
        """Returns the name of a weight, unique among the weights."""
        return self._weights[index]

    @property
    def reduced(self) -> Stream:
        """The stream of the local ops that fill reduce buffers.

        Where sums are formed locally it is not that of the reduce-scatters: one more of these is launched before the
        last one is summed, and nothing should wait for it.
        """
        return "all_reduce" if self.ordered_sums else "reduce_scatter"

    def dtype(self, region: Region) -> str:
        """Returns the dtype of a region's buffer."""
        return self._buffers[region.buffer].dtype

    def kind(self, region: Region) -> BufferKind:
        """Returns the kind of a region's buffer."""
        return self._buffers[region.buffer].kind

    def shard(self, weight: int) -> Region:
        """Returns the caller's shard of a weight."""
        if weight not in self._shards:
            w = self.program.weights[weight]
            buffer = Buffer(f"shard {self.weight(weight)}", "shard", w.block_numel, w.shard_dtype, "compute", weight)
            self._shards[weight] = self._add(buffer)
        return self._shards[weight]

    def buffer(
        self, kind: BufferKind, of: str, numel: int, dtype: str, stream: Stream, weight: int | None = None
    ) -> Region:
        """Returns the whole of a new buffer."""
        return self._add(Buffer(self._unique(f"{kind} {of}"), kind, numel, dtype, stream, weight))

    def compute(self, event: Event, index: int, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        """Writes down the unit's own work at an event."""
        name = self._unique(f"{event.kind} {self.unit(event.unit or 0)}{f'#{event.use}' if event.use else ''}")
        self._issue(Compute(name, index, tuple(reads), tuple(writes)))

    def caller(self, name: str, weights: Iterable[int] = ()) -> None:
        """Says that the caller has written the shards of some weights by now, or may write them from now on."""
        self._issue(Caller(self._unique(name), tuple(map(self.shard, weights))))

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
        """Writes down local work."""
        self._issue(Local(self._unique(name), kind, stream, tuple(reads), tuple(writes), (), weights, parts, divisor))

    def free(self, region: Region) -> None:
        """Frees the region's buffer, on the buffer's own stream."""
        buffer = self._buffers[region.buffer]
        self._issue(Free(f"free {buffer.name}", region.buffer, buffer.stream))

    def deliver(self, weight: int, region: Region) -> None:
        """Hands a region to the caller, as the gradient of a weight."""
        self._issue(Deliver(self._unique(f"deliver {self.weight(weight)}"), weight, region))

    def schedule(self) -> Schedule:
        """Returns the schedule."""
        slots = (Slot(event, when, tuple(ops)) for event, when, ops in self._slots if ops)
        return Schedule(self.program, self.policy, tuple(self._buffers), tuple(slots))

    @property
    def shards(self) -> tuple[int, ...]:
        """The weights whose shards are in use."""
        return tuple(sorted(self._shards))

    def _add(self, buffer: Buffer) -> Region:
        self._buffers.append(buffer)
        return Region(len(self._buffers) - 1, 0, buffer.numel)

    def _issue(self, op: Op) -> None:
        """Issues an op after what it waits for; before it begins memory of another stream, that gets a `Caller`."""
        owners = self._waits.owners(op, self._buffers)
        assert owners <= {"compute"}, f"{op.name} begins memory that nobody hands over"
        if owners and not self._waits.knows_caller:
            self.caller("now")
        self._slots[-1][2].append(self._waits.ordered(op, begins_foreign=bool(owners)))

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}#{count}")


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
# be complete when it is, itself included. On top come the edges of Note [Whose memory].

Clock = list[int]
_LANES: dict[Stream, int] = {stream: lane for lane, stream in enumerate(get_args(Stream))}


def derive_waits(slots: Iterable[Slot], buffers: Sequence[Buffer]) -> tuple[Slot, ...]:
    """Returns the slots with the fewest waits that order each op after everything before it with which it conflicts."""
    waits, derived = _Waits(), list[Slot]()
    for slot in slots:
        if slot.when == "before":
            waits.caller_works()
        ops = tuple(waits.ordered(op, begins_foreign=bool(waits.owners(op, buffers))) for op in slot.ops)
        derived.append(replace(slot, ops=ops))
    return tuple(derived)


class _Issued(NamedTuple):
    """An op that was issued: its stream, as an index, and its clock."""

    name: str
    lane: int
    clock: Clock


class _Waits:
    """The ops so far, what they touch, and when."""

    def __init__(self) -> None:
        self._issued: list[_Issued] = []
        self._last: list[Clock] = [[0] * len(_LANES) for _ in _LANES]
        self._uses: defaultdict[int, list[tuple[Region, bool, int]]] = defaultdict(list)
        """By buffer: what was touched, whether it was written, and by which op."""
        self._computed: int | None = None
        """The last op of the compute stream, if the caller has done nothing of its own since."""

    @property
    def knows_caller(self) -> bool:
        """Whether an op of the compute stream says what the caller has done so far."""
        return self._computed is not None

    def owners(self, op: Op, buffers: Sequence[Buffer]) -> set[Stream]:
        """Returns the other streams to which the memory belongs that an op begins."""
        begun: set[Stream] = {buffers[r.buffer].stream for r in op.writes if not self._uses.get(r.buffer)}
        begun.discard(op.stream)
        return begun

    def caller_works(self) -> None:
        """The caller does something of its own on the compute stream."""
        self._computed = None

    def ordered(self, op: Op, *, begins_foreign: bool) -> Op:
        """Returns an op, which is issued now, with what it has to wait for.

        Args:
            op: whose own waits do not count.
            begins_foreign: it begins memory of another stream, the compute stream.
        """
        index, lane, names = len(self._issued), _LANES[op.stream], list[str]()
        conflicts = self._conflicts(index, op)
        if begins_foreign and self._computed is not None:
            conflicts.add(self._computed)
        if self._issued:
            conflicts.add(0)  # the beginning of the step, or what a stream begins with has waited for it
        if op.stream == "compute":
            self._computed = index
        clock = self._last[lane].copy()
        # The latest first: it may have waited for the others.
        for other in (self._issued[i] for i in sorted(conflicts - {index}, reverse=True)):
            if clock[other.lane] < other.clock[other.lane] and other.lane != lane:
                names.append(other.name)
                clock = list(map(max, clock, other.clock))
        clock[lane] += 1
        self._last[lane] = clock
        self._issued.append(_Issued(op.name, lane, clock))
        waits = tuple(reversed(names))
        return op if op.waits == waits else replace(op, waits=waits)

    def _conflicts(self, index: int, op: Op) -> set[int]:
        """Returns the ops that have touched what an op touches, one of the two writing."""
        conflicts = set[int]()
        for regions, writing in ((op.reads, False), (op.writes, True)):
            for region in regions:
                uses = self._uses[region.buffer]
                for other, written, user in uses:
                    if (writing or written) and region.overlaps(other):
                        conflicts.add(user)
                if uses and uses[0][1]:
                    conflicts.add(uses[0][2])  # it has begun the buffer
                uses.append((region, writing, index))
        return conflicts
