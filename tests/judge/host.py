"""What is wrong with a schedule whatever the timing: the host stumbles over it, or gives memory back wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hpfunc.planning.ops import Compute, Deliver, Free, Launch, Local, Op, Region
from hpfunc.planning.schedule import Schedule
from tests.judge.works import in_order
from tests.judge.world import COMPUTES, World


def unrunnable(schedule: Schedule, world: World, *, borrowed: bool) -> Iterator[str]:
    """Yields what is wrong with a schedule whatever the timing.

    Args:
        schedule: of one rank.
        world: of its program.
        borrowed: gradients are autograd's: nobody else may write into them, or hand them over.
    """
    yield from _bad_form(schedule, world)
    walk = _Walk(schedule, world, borrowed)
    for event, slot, op in in_order(schedule):
        yield from walk.step(event, slot.when, op)
    yield from walk.end()


def _bad_form(schedule: Schedule, world: World) -> Iterator[str]:
    """Yields what keeps the host from issuing the ops at all."""
    events = world.program.events
    names = Counter(op.name for op in schedule.ops)
    yield from (f"two ops are {name}" for name, count in names.items() if count > 1)
    keys = [(slot.event, slot.when == "after") for slot in schedule.slots]
    if keys != sorted(set(keys)) or any(not 0 <= event < len(events) for event, _ in keys):
        yield "slots are not those of the events, in order"
        return
    computes = [(slot.event, slot.when, op.event) for slot in schedule.slots for op in slot.ops if type(op) is Compute]
    due = [(index, "before", index) for index, event in enumerate(events) if event.kind in COMPUTES]
    if computes != due:
        yield "events and computes are not one to one"
    issued: set[str] = set()
    for _, _, op in in_order(schedule):
        yield from (f"{op.name} waits for {name}, which is not issued" for name in op.waits if name not in issued)
        issued.add(op.name)
        if isinstance(op, (Compute, Deliver)) and op.stream != "compute":
            yield f"{op.name} is the caller's, whose stream is compute"


class _Walk:
    """The host's handles of buffers, while it issues one op after another."""

    def __init__(self, schedule: Schedule, world: World, borrowed: bool) -> None:
        self._schedule, self._world, self._borrowed = schedule, world, borrowed
        self._written: set[int] = set()
        self._freed: set[int] = set()
        self._delivered: set[int] = set()
        self._gradients: Counter[tuple[int, int]] = Counter()

    def step(self, event: int, when: str, op: Op) -> Iterator[str]:
        touched = self._touched(op)
        if any(not 0 <= region.buffer < len(self._schedule.buffers) for region in touched):
            yield f"{op.name} names a buffer that does not exist"
            return
        for region in touched:
            buffer = self._schedule.buffers[region.buffer]
            if not 0 <= region.start <= region.stop <= buffer.numel:
                yield f"{op.name} reaches beyond {buffer.name}"
            if region.buffer in self._freed:
                yield f"{op.name} uses {buffer.name}, which is given back"
        match op:
            case Free():
                yield from self._free(op)
            case Deliver():
                yield from self._deliver(op, self._world.segment(event, when))
            case Compute() | Launch() | Local():
                yield from self._reads(event, op)
                yield from self._writes(op)

    @staticmethod
    def _touched(op: Op) -> list[Region]:
        match op:
            case Free():
                return [Region(op.buffer, 0, 0)]
            case Deliver():
                return [op.region]
            case Compute() | Launch() | Local():
                return [*op.reads, *op.writes]
            case _:
                return []

    def _free(self, op: Free) -> Iterator[str]:
        if op.buffer not in self._written or op.buffer in self._delivered:
            yield f"{op.name} gives back what is not there, or is the caller's"
        self._freed.add(op.buffer)

    def _deliver(self, op: Deliver, segment: int) -> Iterator[str]:
        buffer = self._schedule.buffers[op.region.buffer]
        if not 0 <= op.weight < len(self._world.program.weights):
            yield f"{op.name} is of a weight that does not exist"
        elif buffer.dtype != self._world.program.weights[op.weight].accum_dtype:
            yield f"{op.name} hands {buffer.dtype} over"
        if buffer.kind == "shard" or (self._borrowed and buffer.kind == "gradient"):
            yield f"{op.name} hands over what is the caller's already"
        if op.region.buffer not in self._written:
            yield f"{op.name} hands over what nobody has written"
        self._delivered.add(op.region.buffer)
        self._gradients[segment, op.weight] += 1

    def _reads(self, event: int, op: Compute | Launch | Local) -> Iterator[str]:
        weights = self._world.program.weights
        for region in op.reads:
            buffer = self._schedule.buffers[region.buffer]
            if buffer.kind == "shard" and buffer.weight is not None:
                made = weights[buffer.weight].origin is None
                if made and event < self._world.first_uses.get(buffer.weight, 0):
                    yield f"{op.name} reads {buffer.name}, which is not made yet"
            elif region.buffer not in self._written:
                yield f"{op.name} reads {buffer.name}, which nobody has written"

    def _writes(self, op: Compute | Launch | Local) -> Iterator[str]:
        yield from self._torn(op)
        for region in op.writes:
            buffer = self._schedule.buffers[region.buffer]
            if buffer.kind == "shard":
                yield f"{op.name} writes {buffer.name}, which is the caller's"
            if self._borrowed and (buffer.kind == "gradient") != isinstance(op, Compute):
                yield f"{op.name} writes {buffer.name}: gradients are autograd's, and nothing else is"
            self._written.add(region.buffer)

    @staticmethod
    def _torn(op: Compute | Launch | Local) -> Iterator[str]:
        """Yields what an op writes while it reads or writes it itself. Element by element it may."""
        action = op.collective if isinstance(op, Launch) else op.kind if isinstance(op, Local) else ""
        step = {"all_reduce": 1, "scale": 1, "accumulate": 2}.get(action, 0)
        for j, write in enumerate(op.writes):
            reads = enumerate(op.reads)
            others = [read for i, read in reads if not (step and i // step == j and read == write)]
            if any(write.overlaps(other) for other in (*others, *op.writes[:j])):
                yield f"{op.name} writes what it reads, or twice"

    def end(self) -> Iterator[str]:
        for index in sorted(self._written - self._freed - self._delivered):
            yield f"{self._schedule.buffers[index].name} is never given back"
        if self._gradients != Counter(self._world.expected(0).keys()):
            yield "some gradient is handed over never, twice, or too late"
