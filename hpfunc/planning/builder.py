"""`Draft`: builds a `Schedule` as a sequential program, and derives the waits of its ops.

The planner chooses only the ops, their order and their streams. The waits between streams follow from the regions that
the ops touch, and are derived here for all ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from . import ops
from .ops import Buffer, BufferKind, Op, Region, Slot, Stream
from .policy import Policy
from .program import Event, Program
from .queues import Queues, calls_share_queue, may_call_inside
from .schedule import Schedule

Regions = Sequence[Region]


class Draft:
    """Collects buffers and ops in issue order, and gives them readable, unique names.

    Attributes:
        buffers: the buffers so far, which a `Region` names by index.
        units: the name of each unit, unique among the units.
        weights: the name of each weight, unique among the weights.
    """

    def __init__(self, program: Program, policy: Policy, *, ordered_sums: bool) -> None:
        self.program = program
        self.policy = policy
        self.ordered_sums = ordered_sums
        self.units = _labels([unit.name for unit in program.units])
        self.weights = _labels([weight.name for weight in program.weights])
        self.buffers: list[Buffer] = []
        self._slots: list[tuple[int, Literal["before", "after"], list[Op]]] = []
        self._shards: dict[int, Region] = {}
        self._names: dict[str, int] = {}
        self._begun: set[int] = set()
        self._knows_caller = False  # whether an op of the compute stream follows all work of the caller so far
        self._shares_calls = calls_share_queue(program, policy.communicators)
        self._follows_calls = False

    def at(self, event: int, when: Literal["before", "after"]) -> None:
        """Sets the slot of the ops that follow."""
        self._slots.append((event, when, []))
        inside = self._shares_calls and when == "after" and may_call_inside(self.program, event)
        self._follows_calls |= inside
        self._knows_caller &= when == "after" and not inside

    @property
    def reduced(self) -> Stream:
        """The stream of the local ops that fill reduce buffers.

        If sums are formed locally it is not the stream of the reduce-scatters: the next reduce-scatter is launched
        before the previous one is summed, and the sum must not wait for it.
        """
        return "all_reduce" if self.ordered_sums else "reduce_scatter"

    def shard(self, weight: int) -> Region:
        """Returns the caller's shard of a weight."""
        if weight not in self._shards:
            w = self.program.weights[weight]
            buffer = Buffer(f"shard {self.weights[weight]}", "shard", w.block_numel, w.shard_dtype, "compute", weight)
            self._shards[weight] = self._add(buffer)
        return self._shards[weight]

    def buffer(
        self, kind: BufferKind, of: str, numel: int, dtype: str, stream: Stream, weight: int | None = None
    ) -> Region:
        """Makes a buffer, and returns all of it."""
        return self._add(Buffer(self._unique(f"{kind} {of}"), kind, numel, dtype, stream, weight))

    def compute(self, event: Event, index: int, reads: Regions, writes: Regions) -> None:
        """Issues the unit's own work at an event."""
        name = self._unique(f"{event.kind} {self.units[event.unit or 0]}{f'#{event.use}' if event.use else ''}")
        self._issue(ops.Compute(name, index, tuple(reads), tuple(writes)))

    def caller(self, name: str, weights: Iterable[int] = ()) -> None:
        """Issues a `Caller`: the caller has written the shards of some weights, or may write them from now on."""
        self._issue(ops.Caller(self._unique(name), tuple(map(self.shard, weights))))

    def call(self) -> None:
        """Issues what precedes a collective of the caller. See Note [Queues of collectives]."""
        if self._shares_calls:
            self.caller("call")
            self._follows_calls = True

    def launch(
        self, name: str, collective: ops.Collective, communicator: ops.Communicator, reads: Regions, writes: Regions
    ) -> None:
        """Issues collectives on the stream of the communicator's purpose, so that no communicator is on two streams."""
        stream = communicator.purpose
        if self._follows_calls and not self._knows_caller:
            self.caller("now")
        self._follows_calls = False
        self._issue(ops.Launch(self._unique(name), collective, communicator, stream, tuple(reads), tuple(writes)))

    def local(
        self, name: str, kind: ops.LocalKind, stream: Stream, reads: Regions, writes: Regions, **numbers: Any
    ) -> None:
        """Issues local work. `numbers` are fields of `Local`: `weights`, `parts`, `divisor`."""
        self._issue(ops.Local(self._unique(name), kind, stream, tuple(reads), tuple(writes), **numbers))

    def free(self, region: Region) -> None:
        """Frees the region's buffer, on the buffer's own stream."""
        buffer = self.buffers[region.buffer]
        self._issue(ops.Free(f"free {buffer.name}", region.buffer, buffer.stream))

    def deliver(self, weight: int, region: Region) -> None:
        """Hands a region to the caller, as the gradient of a weight."""
        self._issue(ops.Deliver(self._unique(f"deliver {self.weights[weight]}"), weight, region))

    def schedule(self) -> Schedule:
        """Returns the schedule."""
        slots = [Slot(event, when, tuple(issued)) for event, when, issued in self._slots if issued]
        queues = Queues(self.program, self.policy.communicators)
        return Schedule(self.program, self.policy, tuple(self.buffers), derive_waits(slots, self.buffers, queues))

    @property
    def shards(self) -> tuple[int, ...]:
        """The weights whose shards are in use."""
        return tuple(sorted(self._shards))

    def _add(self, buffer: Buffer) -> Region:
        self.buffers.append(buffer)
        return Region(len(self.buffers) - 1, 0, buffer.numel)

    def _issue(self, op: Op) -> None:
        """Issues an op. Inserts a `Caller` before it if it needs one: see Note [Whose memory]."""
        owners = _owners(op, self.buffers, self._begun)
        assert owners <= {"compute"}, f"{op.name} begins memory that nobody hands over"
        if owners and not self._knows_caller:
            self.caller("now")
        self._slots[-1][2].append(op)
        self._begun |= {region.buffer for region in (*op.reads, *op.writes)}
        self._knows_caller |= op.stream == "compute"

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else self._unique(f"{name}#{count}")


def _owners(op: Op, buffers: Sequence[Buffer], begun: Container[int]) -> set[Stream]:
    """Returns the streams, other than its own, whose memory an op is the first to touch."""
    owners: set[Stream] = {buffers[r.buffer].stream for r in op.writes if r.buffer not in begun}
    return owners - {op.stream}


def _labels(names: Sequence[str]) -> list[str]:
    """Returns the names; adds the index to names that occur more than once."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}[{index}]" for index, name in enumerate(names)]


# Note [Waits follow from regions]
# A schedule means its flat list of ops, run one after another. Streams may run ahead of one another if that does not
# change a result. So an op must wait for an earlier op of another stream exactly if both touch one element and one of
# them writes it, or if one of them begins or ends the buffer that both touch. A stream runs in order, so the latest
# such op on each stream is enough. A wait is redundant if an earlier op of the same stream, or another wait of the op,
# implies it. A vector clock answers both: for each op, the number of ops of every stream that are complete when it is,
# itself included. The edges of Note [Whose memory] are added to these waits.

Clock = list[int]
_LANES: dict[Stream, int] = {stream: lane for lane, stream in enumerate(get_args(Stream))}


def derive_waits(slots: Iterable[Slot], buffers: Sequence[Buffer], queues: Queues | None = None) -> tuple[Slot, ...]:
    """Returns the slots with the fewest waits that order each op after all earlier ops with which it conflicts.

    With `queues` launches also wait for those before them in their queue.
    """
    waits, derived = _Waits(buffers, queues), list[Slot]()
    for slot in slots:
        waits.enter(slot)
        derived.append(replace(slot, ops=tuple(map(waits.ordered, slot.ops))))
    return tuple(derived)


class _Issued(NamedTuple):
    """An op that was issued, with the index of its stream and its clock."""

    name: str
    lane: int
    clock: Clock


class _Waits:
    """The ops issued so far, with their regions and clocks."""

    def __init__(self, buffers: Sequence[Buffer], queues: Queues | None) -> None:
        self._buffers, self._queues = buffers, queues
        self._computed: int | None = None  # the last op of the compute stream, if the caller has done nothing since
        self._issued: list[_Issued] = []
        self._last: list[Clock] = [[0] * len(_LANES) for _ in _LANES]
        self._uses: defaultdict[int, list[tuple[Region, bool, int]]] = defaultdict(list)
        """By buffer: regions that were touched, whether they were written, and by which op."""

    def enter(self, slot: Slot) -> None:
        """The ops of a slot follow."""
        if slot.when == "before":
            self._computed = None
        if self._queues:
            self._queues.enter(slot)

    def ordered(self, op: Op) -> Op:
        """Issues an op, and returns it with its waits, which replace those that it has already."""
        index, lane, names, queues = len(self._issued), _LANES[op.stream], list[str](), self._queues
        follows_caller = bool(_owners(op, self._buffers, self._uses) or (queues and queues.follows_calls(op)))
        conflicts, queued = self._conflicts(index, op), queues.before(op) if queues else []
        missed = queues.missed(op) if queues else None
        if follows_caller and self._computed is not None:
            conflicts.add(self._computed)
        if self._issued:
            conflicts.add(0)  # the first op of the step; redundant after the first op of a stream
        if op.stream == "compute":
            self._computed = index
        clock = self._last[lane].copy()
        # The latest first: its clock may cover the others.
        for i in (*queued, *sorted(conflicts - {index, *queued}, reverse=True)):
            other = self._issued[i]
            if (i in queued or clock[other.lane] < other.clock[other.lane]) and other.lane != lane:
                names.append(other.name)
                clock = clock if i == missed else list(map(max, clock, other.clock))
        clock[lane] += 1
        self._last[lane] = clock
        self._issued.append(_Issued(op.name, lane, clock))
        if queues:
            queues.issued(op, index)
        waits = tuple(reversed(names))
        return op if op.waits == waits else replace(op, waits=waits)

    def _conflicts(self, index: int, op: Op) -> set[int]:
        """Returns the earlier ops that touch an element which this op touches, if one of the two writes it."""
        conflicts = set[int]()
        for regions, writing in ((op.reads, False), (op.writes, True)):
            for region in regions:
                uses = self._uses[region.buffer]
                for other, written, user in uses:
                    if (writing or written) and region.overlaps(other):
                        conflicts.add(user)
                if uses and uses[0][1]:
                    conflicts.add(uses[0][2])  # its first write begins the buffer
                uses.append((region, writing, index))
        return conflicts
