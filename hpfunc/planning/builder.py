"""A `Schedule` while it is written: a sequential program, whose waits are derived as it grows.

The planner says only what happens, in which order and on which stream. Which stream must wait for which follows from
the regions that the ops touch, and is found here, once, for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from .policy import Policy
from .program import Event, Program
from .schedule import (
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
        waits = self._before(name, "compute", reads, writes)
        self._issue(Compute(name, index, tuple(reads), tuple(writes), waits))

    def caller(self, name: str, weights: Iterable[int] = ()) -> None:
        """Says that the caller has written the shards of some weights by now, or may write them from now on."""
        name, writes = self._unique(name), tuple(map(self.shard, weights))
        self._issue(Caller(name, writes, self._before(name, "compute", (), writes)))

    def launch(
        self,
        name: str,
        collective: Collective,
        communicator: Communicator,
        reads: Sequence[Region],
        writes: Sequence[Region],
    ) -> None:
        """Issues collectives on the stream of the communicator's purpose, so that it is never on two."""
        name, stream = self._unique(name), communicator.purpose
        waits = self._before(name, stream, reads, writes)
        self._issue(Launch(name, collective, communicator, stream, tuple(reads), tuple(writes), waits))

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
        name = self._unique(name)
        waits = self._before(name, stream, reads, writes)
        self._issue(Local(name, kind, stream, tuple(reads), tuple(writes), waits, weights, parts, divisor))

    def free(self, region: Region) -> None:
        """Frees the region's buffer, on the buffer's own stream."""
        buffer = self._buffers[region.buffer]
        name = f"free {buffer.name}"
        waits = self._waits.before_free(name, buffer.stream, region.buffer)
        self._issue(Free(name, region.buffer, buffer.stream, waits))

    def deliver(self, weight: int, region: Region) -> None:
        """Hands a region to the caller, as the gradient of a weight."""
        name = self._unique(f"deliver {self.weight(weight)}")
        # Whoever gets a gradient may do anything with it: a write.
        waits = self._waits.before(name, "compute", (), (region,))
        self._issue(Deliver(name, weight, region, waits))

    def schedule(self) -> Schedule:
        """Returns the schedule."""
        slots = (Slot(event, when, tuple(ops)) for event, when, ops in self._slots if ops)
        return Schedule(self.program, self.policy, tuple(self._buffers), tuple(slots))

    @property
    def shards(self) -> tuple[int, ...]:
        """The weights whose shards are in use."""
        return tuple(sorted(self._shards))

    def _before(self, name: str, stream: Stream, reads: Sequence[Region], writes: Sequence[Region]) -> tuple[str, ...]:
        """Returns what an op waits for; before it begins memory of another stream, that stream gets a `Caller`."""
        owners = self._waits.owners(stream, writes, self._buffers)
        assert owners <= {"compute"}, f"{name} begins memory that nobody hands over"
        if owners and not self._waits.knows_caller:
            self.caller("now")
        return self._waits.before(name, stream, reads, writes, after_compute=bool(owners))

    def _add(self, buffer: Buffer) -> Region:
        self._buffers.append(buffer)
        return Region(len(self._buffers) - 1, 0, buffer.numel)

    def _issue(self, op: Op) -> None:
        self._slots[-1][2].append(op)

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
        ops: list[Op] = []
        for op in slot.ops:
            writes = () if isinstance(op, (Free, Deliver)) else op.writes
            foreign = waits.owners(op.stream, writes, buffers)
            ops.append(replace(op, waits=waits.of(op, after_compute=bool(foreign))))
        derived.append(replace(slot, ops=tuple(ops)))
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

    def owners(self, stream: Stream, writes: Sequence[Region], buffers: Sequence[Buffer]) -> set[Stream]:
        """Returns the other streams to which the memory belongs that an op of `stream` begins."""
        begun: set[Stream] = {buffers[r.buffer].stream for r in writes if not self._uses.get(r.buffer)}
        begun.discard(stream)
        return begun

    def caller_works(self) -> None:
        """The caller does something of its own on the compute stream."""
        self._computed = None

    def of(self, op: Op, *, after_compute: bool) -> tuple[str, ...]:
        """Returns what an op has to wait for, which is issued now."""
        match op:
            case Free():
                return self.before_free(op.name, op.stream, op.buffer)
            case Deliver():
                return self.before(op.name, op.stream, (), (op.region,))
            case Caller():
                return self.before(op.name, op.stream, (), op.writes)
            case _:
                return self.before(op.name, op.stream, op.reads, op.writes, after_compute=after_compute)

    def before(
        self,
        name: str,
        stream: Stream,
        reads: Sequence[Region],
        writes: Sequence[Region],
        *,
        after_compute: bool = False,
    ) -> tuple[str, ...]:
        """Returns what an op has to wait for, which is issued now and reads and writes some regions.

        Args:
            name: of the op.
            stream: of the op.
            reads: what it reads.
            writes: what it writes.
            after_compute: it begins memory of the compute stream.
        """
        index = len(self._issued)
        conflicts = self._conflicts(index, reads, writes)
        if after_compute and self._computed is not None:
            conflicts.add(self._computed)
        return self._issue(name, stream, conflicts - {index})

    def _conflicts(self, index: int, reads: Sequence[Region], writes: Sequence[Region]) -> set[int]:
        """Returns the ops that have touched what an op touches, one of the two writing."""
        conflicts = set[int]()
        for regions, writing in ((reads, False), (writes, True)):
            for region in regions:
                uses = self._uses[region.buffer]
                for other, written, user in uses:
                    if (writing or written) and region.overlaps(other):
                        conflicts.add(user)
                if uses and uses[0][1]:
                    conflicts.add(uses[0][2])  # it has begun the buffer
                uses.append((region, writing, index))
        return conflicts

    def before_free(self, name: str, stream: Stream, buffer: int) -> tuple[str, ...]:
        """Returns what a `Free` has to wait for, which is issued now."""
        return self._issue(name, stream, {index for _, _, index in self._uses[buffer]})

    def _issue(self, name: str, stream: Stream, conflicts: set[int]) -> tuple[str, ...]:
        lane, waits = _LANES[stream], ()
        clock = self._last[lane].copy()
        if self._issued:
            conflicts.add(0)  # the beginning of the step, or what a stream begins with has waited for it
        if stream == "compute":
            self._computed = len(self._issued)
        # The latest first: it may have waited for the others.
        for index in sorted(conflicts, reverse=True):
            other = self._issued[index]
            if clock[other.lane] < other.clock[other.lane] and other.lane != lane:
                waits = (other.name, *waits)
                clock = list(map(max, clock, other.clock))
        clock[lane] += 1
        self._last[lane] = clock
        self._issued.append(_Issued(name, lane, clock))
        return waits
