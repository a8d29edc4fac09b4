"""A machine that runs a schedule on numpy data, for all ranks in one process, with random timings.

This is the executable specification: what it shows must equal `reference`. It is meant for tests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import numpy as np

from ._errors import ScheduleError, message
from ._program import Weight, segments
from ._reference import Array, Outcome, World, cut_blocks, join_blocks
from ._schedule import Communicator, Compute, Deliver, Free, Launch, Local, Op, Region, Schedule

# Note [A machine that hides nothing]
# Every rank has its streams. A stream takes its ops in issue order, starts one when those it waits for are complete,
# and takes its time: it reads and writes region by region, with random pauses, some thousands of times longer than
# others. A collective begins when all its ranks have begun it, and each rank's part ends when it likes. The host is
# infinitely fast: allocating and freeing take effect in issue order, before anything has run, as with a caching
# allocator. So memory is reused early, by a later buffer of the same stream; and a freed buffer is filled with NaN when
# its stream gets to the `Free`.

Steps = Generator[Hashable | None, None, None]
"""The work of a stream. It yields None where it pauses, or what it waits for."""


def interpret(schedule: Schedule, world: World, timing: int = 0) -> list[Outcome]:
    """Runs a schedule for all ranks. See Note [A machine that hides nothing].

    Args:
        schedule: what to run, safe or not.
        world: the ranks and their numbers.
        timing: seed of the pauses.

    Returns:
        What each rank has seen: equal to `reference(world)`, whatever the timing, if the schedule is safe.

    Raises:
        ScheduleError: no stream can go on, or ranks have met in different collectives.
    """
    machine = _Machine(schedule, world, random.Random(timing))
    machine.run()
    return machine.outcomes()


@dataclass(slots=True)
class _Meeting:
    """One collective of one group: what its ranks have brought."""

    op: str
    group: tuple[int, ...]
    arrived: int = 0
    brought: dict[tuple[int, int], Array] = field(default_factory=dict)


class _Machine:
    """All ranks, their memory and their streams."""

    def __init__(self, schedule: Schedule, world: World, rng: random.Random) -> None:
        self._schedule, self._world, self._rng = schedule, world, rng
        self._places, sizes = _allocate(schedule)
        self._memory = [[np.full(size, np.nan) for size in sizes] for _ in range(world.num_ranks)]
        self._outcomes = [Outcome() for _ in range(world.num_ranks)]
        self._handed: list[tuple[Array, Array]] = []
        self._done: set[Hashable] = set()
        self._asleep: defaultdict[Hashable, list[tuple[Steps, float]]] = defaultdict(list)
        self._awake: list[tuple[float, int, Steps, float]] = []
        self._tickets = count()
        self._meetings: dict[tuple[Communicator, tuple[int, ...], int], _Meeting] = {}
        self._launches: defaultdict[tuple[int, Communicator], int] = defaultdict(int)
        self._now = 0.0
        for index, buffer in enumerate(schedule.buffers):
            if buffer.kind == "shard" and buffer.weight is not None:
                for rank in range(world.num_ranks):
                    self._view(rank, Region(index, 0, buffer.numel))[:] = world.shard(buffer.weight, rank)

    @cached_property
    def _segments(self) -> dict[str, int]:
        events = list(segments(self._world.program))
        return {op.name: events[slot.event][0] for slot in self._schedule.slots for op in slot.ops}

    def outcomes(self) -> list[Outcome]:
        """Returns what the ranks have seen; whatever wrote into a delivered gradient shows."""
        for memory, delivered in self._handed:
            if not np.array_equal(memory, delivered):
                delivered[:] = np.nan
        return self._outcomes

    # ---------------------------------------------------------------------------------------------------------- timing

    def run(self) -> None:
        streams: dict[tuple[int, str], list[Op]] = defaultdict(list)
        for rank in range(self._world.num_ranks):
            for op in self._schedule.ops:
                streams[rank, op.stream].append(op)
        for (rank, _), ops in streams.items():
            self._push(self._stream(rank, ops), 10 ** self._rng.uniform(-1.5, 1.5))
        with np.errstate(invalid="ignore"):
            while self._awake:
                self._now, _, steps, pace = heapq.heappop(self._awake)
                self._advance(steps, pace)
        if stuck := [key for key, waiting in self._asleep.items() if waiting]:
            raise ScheduleError(message("hpfunc.interpret", "no stream can go on; they wait for", map(str, stuck)))

    def _push(self, steps: Steps, pace: float) -> None:
        pause = pace * self._rng.random() ** 4
        heapq.heappush(self._awake, (self._now + pause, next(self._tickets), steps, pace))

    def _advance(self, steps: Steps, pace: float) -> None:
        try:
            key = next(steps)
        except StopIteration:
            return
        if key is None or key in self._done:
            self._push(steps, pace)
        else:
            self._asleep[key].append((steps, pace))

    def _finish(self, key: Hashable) -> None:
        self._done.add(key)
        for steps, pace in self._asleep.pop(key, ()):
            self._push(steps, pace)

    def _stream(self, rank: int, ops: list[Op]) -> Steps:
        for op in ops:
            for name in op.waits:
                yield (rank, name)
            yield
            match op:
                case Compute():
                    yield from self._compute(rank, op)
                case Launch():
                    yield from self._launch(rank, op)
                case Local():
                    yield from self._local(rank, op)
                case Free():
                    self._view(rank, Region(op.buffer, 0, self._schedule.buffers[op.buffer].numel))[:] = np.nan
                case Deliver():
                    self._deliver(rank, op)
            self._finish((rank, op.name))

    # ------------------------------------------------------------------------------------------------------------ ops

    def _view(self, rank: int, region: Region) -> Array:
        return self._memory[rank][self._places[region.buffer]][region.start : region.stop]

    def _read(self, rank: int, regions: tuple[Region, ...], into: list[Array]) -> Steps:
        for region in regions:
            into.append(self._view(rank, region).copy())
            yield

    def _write(self, rank: int, regions: tuple[Region, ...], values: list[Array]) -> Steps:
        for region, value in zip(regions, values, strict=True):
            yield
            self._view(rank, region)[:] = value

    def _compute(self, rank: int, op: Compute) -> Steps:
        """Reads the weights twice, when it starts and when it ends: they have to stay."""
        first: list[Array] = []
        second: list[Array] = []
        yield from self._read(rank, op.reads, first)
        yield from self._read(rank, op.reads, second)
        program = self._world.program
        event = program.events[op.event]
        same = all(map(np.array_equal, first, second))
        observed = self._world.observe(first) if same else math.nan
        self._outcomes[rank].observations[op.event] = (
            observed if op.event not in self._outcomes[rank].observations else math.nan
        )
        if event.kind == "backward":
            members = enumerate(program.unit_of(event).weights)
            positions = [position for position, weight in members if program.weights[weight].trainable]
            values = [self._world.gradient(rank, op.event, position, first) for position in positions]
            yield from self._write(rank, op.writes, values)

    def _launch(self, rank: int, op: Launch) -> Steps:
        group = self._world.group(op.communicator.axes, rank)
        turn = self._launches[rank, op.communicator]
        self._launches[rank, op.communicator] += 1
        key = (op.communicator, group, turn)
        meeting = self._meetings.setdefault(key, _Meeting(op.name, group))
        if meeting.op != op.name:
            raise ScheduleError(message("hpfunc.interpret", f"ranks meet in {meeting.op} and {op.name}"))
        meeting.arrived += 1
        if meeting.arrived == len(group):
            self._finish(key)
        yield key
        pairs = list(range(len(op.reads)))
        self._rng.shuffle(pairs)
        for pair in pairs:
            meeting.brought[pair, rank] = self._view(rank, op.reads[pair]).copy()
            if all((pair, other) in meeting.brought for other in group):
                self._finish((key, pair))
            yield
        for pair in pairs:
            yield (key, pair)
            messages = [meeting.brought[pair, other] for other in group]
            self._view(rank, op.writes[pair])[:] = _received(op, messages, group.index(rank))
            yield

    def _local(self, rank: int, op: Local) -> Steps:
        reads: list[Array] = []
        yield from self._read(rank, op.reads, reads)
        yield from self._write(rank, op.writes, self._results(op, reads))

    def _results(self, op: Local, reads: list[Array]) -> list[Array]:
        weights = [self._world.program.weights[weight] for weight in op.weights]
        return _RESULTS[op.kind](op, weights, reads)

    def _deliver(self, rank: int, op: Deliver) -> None:
        memory = self._view(rank, op.region)
        delivered = memory.copy()
        self._handed.append((memory, delivered))
        self._outcomes[rank].gradients.setdefault((self._segments[op.name], op.weight), []).append(delivered)


def _received(op: Launch, messages: list[Array], index: int) -> Array:
    """Returns what the rank at an index of its group gets from the messages of all."""
    if op.collective == "all_gather":
        return np.concatenate(messages)
    if op.collective == "all_reduce":
        return np.sum(messages, axis=0)
    parts = [sent.reshape(len(messages), -1)[index] for sent in messages]
    return np.concatenate(parts) if op.collective == "all_to_all" else np.sum(parts, axis=0)


def _unpacked(op: Local, weights: list[Weight], reads: list[Array]) -> list[Array]:
    rows = reads[0].reshape(weights[0].num_shards, -1)
    stops = np.cumsum([weight.block_numel for weight in weights])
    blocks = np.split(rows, stops[:-1], axis=1)
    return [join_blocks(weight, block) for weight, block in zip(weights, blocks, strict=True)]


def _packed(op: Local, weights: list[Weight], reads: list[Array]) -> list[Array]:
    rows = [cut_blocks(weight, whole) for weight, whole in zip(weights, reads, strict=True)]
    return [np.concatenate(rows, axis=1).reshape(-1) / op.divisor]


_RESULTS: dict[str, Callable[[Local, list[Weight], list[Array]], list[Array]]] = {
    "pack_shards": lambda op, weights, reads: [np.concatenate(reads)],
    "unpack_wholes": _unpacked,
    "accumulate": lambda op, weights, reads: [a + b for a, b in zip(reads[::2], reads[1::2], strict=True)],
    "pack_gradients": _packed,
    "zero": lambda op, weights, reads: [np.zeros(region.numel) for region in op.writes],
    "sum_parts": lambda op, weights, reads: [read.reshape(op.parts, -1).sum(axis=0) for read in reads],
    "copy": lambda op, weights, reads: reads,
    "scale": lambda op, weights, reads: [read / op.divisor for read in reads],
}


def _allocate(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Returns which storage each buffer gets, and the size of each storage: a caching allocator, in issue order."""
    places: dict[int, int] = {}
    sizes: list[int] = []
    pools: defaultdict[str, list[int]] = defaultdict(list)

    def take(buffer: int, pool: list[int]) -> None:
        numel = schedule.buffers[buffer].numel
        fitting = [place for place in reversed(pool) if sizes[place] >= numel]
        if fitting:
            pool.remove(fitting[0])
        else:
            sizes.append(numel)
        places[buffer] = fitting[0] if fitting else len(sizes) - 1

    for index, buffer in enumerate(schedule.buffers):
        if buffer.kind == "shard":
            take(index, [])
    for op in schedule.ops:
        written = op.writes if isinstance(op, (Compute, Launch, Local)) else ()
        for buffer in dict.fromkeys(region.buffer for region in written if region.buffer not in places):
            take(buffer, pools[schedule.buffers[buffer].stream])
        if isinstance(op, Free) and op.buffer in places:
            pools[schedule.buffers[op.buffer].stream].append(places[op.buffer])
    for index in set(range(len(schedule.buffers))) - places.keys():
        take(index, [])
    return [places[index] for index in range(len(schedule.buffers))], sizes
