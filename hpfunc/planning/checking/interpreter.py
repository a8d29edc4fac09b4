"""`interpret`: runs a schedule on numpy data, for all ranks in one process, with random timings.

This is the executable specification: its results must equal those of `reference`. It is meant for tests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from ..._errors import ScheduleError, message
from ..ops import Caller, Communicator, Compute, Deliver, Free, Launch, Local, Op, Region
from ..program import Weight, segments
from ..schedule import Schedule
from .reference import Array, Outcome, World, cut_blocks, join_blocks

# Note [A machine that hides nothing]
# Every rank has its own streams. A stream runs its ops in issue order, and starts an op when the ops it waits for are
# complete. It reads and writes region by region, with random pauses, some of them thousands of times longer than
# others. A collective starts when all its ranks have started it, and each rank's part ends at a random time. The host
# is infinitely fast: allocations and frees take effect in issue order, before any op has run, as with a caching
# allocator. So a later buffer of the same stream reuses memory as early as possible. A freed buffer is filled with NaN
# when its stream reaches the `Free`.
# The caller writes its shards at each `Caller`, and NaN at the end. It reads a delivered gradient at once, and again as
# late as possible before the compute stream continues. It drops every other delivered gradient (or all) at once, so
# that the memory is reused, and keeps the rest to detect writes into them. Before each event it overwrites all free
# memory of the compute stream. Several steps run one after another, and no stream waits for the end of a step.

Steps = Iterator[Hashable | None]
"""The work of a stream. It yields None where it pauses, or what it waits for."""


def interpret(schedule: Schedule, world: World, timing: int = 0, num_steps: int = 1) -> list[Outcome]:
    """Runs a schedule for all ranks. See Note [A machine that hides nothing].

    Args:
        schedule: what to run, safe or not.
        world: the ranks and their numbers.
        timing: seed of the pauses.
        num_steps: number of runs, one after another.

    Returns:
        The outcome of each rank in each step. If the schedule is safe, it agrees with `reference(world)`, repeated for
        each step, for every timing.

    Raises:
        ScheduleError: no stream can continue, or ranks have met in different collectives.

    >>> from hpfunc.planning import Event, Policy, Program, Unit, Weight, World, plan, reference
    >>> weight = Weight("w", 4, *["float32"] * 4, ("shard",), 2, (), 1, divisor=2)
    >>> events = Event("forward", 0), Event("backward", 0), Event("end_backward"), Event("end_step")
    >>> schedule = plan(Program((weight,), (Unit("layer", (0,)),), events), Policy(pack_below_bytes=0))
    >>> world = World(schedule.program, {"shard": 2})
    >>> [seen.agrees(right) for seen, right in zip(interpret(schedule, world, timing=7), reference(world))]
    [True, True]
    """
    machine = _Machine(schedule, world, random.Random(timing), num_steps)
    machine.run()
    return machine.outcomes()


class _Place(NamedTuple):
    """The rank and the step at which an op runs."""

    rank: int
    step: int


@dataclass(slots=True)
class _Meeting:
    """One collective of one group, with the data that its ranks have sent."""

    op: str
    group: tuple[int, ...]
    arrived: int = 0
    brought: dict[tuple[int, int], Array] = field(default_factory=dict)


class _Machine:
    """All ranks, their memory and their streams."""

    def __init__(self, schedule: Schedule, world: World, rng: random.Random, num_steps: int) -> None:
        self._schedule, self._world, self._rng, self._num_steps = schedule, world, rng, num_steps
        self._allocator = _Allocator(schedule, num_steps, lets_go=rng.random() < 0.5)
        self._memory = [[np.full(size, np.nan) for size in self._allocator.sizes] for _ in range(world.num_ranks)]
        self._outcomes = [[Outcome() for _ in range(world.num_ranks)] for _ in range(num_steps)]
        self._handed: list[tuple[Array, Array]] = []
        self._done: set[Hashable] = set()
        self._asleep: defaultdict[Hashable, list[tuple[Steps, float]]] = defaultdict(list)
        self._awake: list[tuple[float, int, Steps, float]] = []
        self._tickets = count()
        self._meetings: dict[tuple[Communicator, tuple[int, ...], int], _Meeting] = {}
        self._launches: defaultdict[tuple[int, Communicator], int] = defaultdict(int)
        self._now = 0.0

    @cached_property
    def _segments(self) -> dict[str, int]:
        events = list(segments(self._world.program))
        return {op.name: events[slot.event][0] for slot in self._schedule.slots for op in slot.ops}

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes of the ranks, step after step. A kept gradient that was overwritten becomes NaN."""
        for memory, delivered in self._handed:
            if not np.array_equal(memory, delivered):
                delivered[:] = np.nan
        return [outcome for outcomes in self._outcomes for outcome in outcomes]

    # ---------------------------------------------------------------------------------------------------------- timing

    def run(self) -> None:
        streams: dict[tuple[int, str], list[Op | int]] = defaultdict(list)
        for rank in range(self._world.num_ranks):
            for slot in self._schedule.slots:
                if slot.when == "before":
                    streams[rank, "compute"].append(slot.event)
                for op in slot.ops:
                    streams[rank, op.stream].append(op)
        for (rank, _), ops in streams.items():
            self._push(self._steps(rank, ops), 10 ** self._rng.uniform(-1.5, 1.5))
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

    def _steps(self, rank: int, ops: list[Op | int]) -> Steps:
        for step in range(self._num_steps):
            yield from self._stream(_Place(rank, step), ops)

    def _stream(self, at: _Place, ops: list[Op | int]) -> Steps:
        for op in ops:
            if isinstance(op, int):
                yield from self._caller_works(at, op)
                continue
            for name in op.waits:
                yield (at, name)
            yield
            match op:
                case Compute():
                    yield from self._compute(at, op)
                case Caller():
                    yield from self._caller(at, op)
                case Launch():
                    yield from self._launch(at, op)
                case Local():
                    yield from self._local(at, op)
                case Free():
                    self._view(at, Region(op.buffer, 0, self._schedule.buffers[op.buffer].numel))[:] = np.nan
                case Deliver():
                    yield from self._deliver(at, op)
            self._finish((at, op.name))

    # ------------------------------------------------------------------------------------------------------------ ops

    def _view(self, at: _Place, region: Region) -> Array:
        return self._memory[at.rank][self._allocator.places[at.step][region.buffer]][region.start : region.stop]

    def _read(self, at: _Place, regions: tuple[Region, ...], into: list[Array]) -> Steps:
        for region in regions:
            into.append(self._view(at, region).copy())
            yield

    def _write(self, at: _Place, regions: tuple[Region, ...], values: list[Array]) -> Steps:
        for region, value in zip(regions, values, strict=True):
            yield
            self._view(at, region)[:] = value

    def _caller_works(self, at: _Place, event: int) -> Steps:
        """Overwrites all memory of the compute stream that is free before an event."""
        used = [self._memory[at.rank][place] for place in self._allocator.free[at.step].get(event, ())]
        for memory in used:
            memory[:] = np.inf
            yield
        if not all(np.isinf(memory).all() for memory in used):
            self._outcomes[at.step][at.rank].observations[-1 - event] = math.nan  # not a unit's; equals nothing

    def _caller(self, at: _Place, op: Caller) -> Steps:
        """Writes the shards. Writes NaN to those that it has written before, because the step is over."""
        for region in op.writes:
            weight = self._schedule.buffers[region.buffer].weight
            yield
            again = (at, region.buffer) in self._done
            self._view(at, region)[:] = np.nan if again or weight is None else self._world.shard(weight, at.rank)
            self._finish((at, region.buffer))

    def _compute(self, at: _Place, op: Compute) -> Steps:
        """Reads the weights at its start and at its end: they must not change."""
        first: list[Array] = []
        second: list[Array] = []
        yield from self._read(at, op.reads, first)
        yield from self._read(at, op.reads, second)
        program = self._world.program
        event = program.events[op.event]
        same = all(map(np.array_equal, first, second))
        observed = self._world.observe(first) if same else math.nan
        observations = self._outcomes[at.step][at.rank].observations
        observations[op.event] = observed if op.event not in observations else math.nan
        if event.kind == "backward":
            members = enumerate(program.unit_of(event).weights)
            positions = [position for position, weight in members if program.weights[weight].trainable]
            values = [self._world.gradient(at.rank, op.event, position, first) for position in positions]
            yield from self._write(at, op.writes, values)

    def _launch(self, at: _Place, op: Launch) -> Steps:
        rank = at.rank
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
            meeting.brought[pair, rank] = self._view(at, op.reads[pair]).copy()
            if all((pair, other) in meeting.brought for other in group):
                self._finish((key, pair))
            yield
        for pair in pairs:
            yield (key, pair)
            messages = [meeting.brought[pair, other] for other in group]
            self._view(at, op.writes[pair])[:] = _received(op, messages, group.index(rank))
            yield

    def _local(self, at: _Place, op: Local) -> Steps:
        reads: list[Array] = []
        yield from self._read(at, op.reads, reads)
        weights = [self._world.program.weights[weight] for weight in op.weights]
        yield from self._write(at, op.writes, _RESULTS[op.kind](op, weights, reads))

    def _deliver(self, at: _Place, op: Deliver) -> Steps:
        """Reads a gradient twice: work of the caller may still be queued when the caller drops the gradient."""
        memory = self._view(at, op.region)
        delivered = memory.copy()
        yield
        yield
        if not np.array_equal(memory, delivered):
            delivered[:] = np.nan
        gradients = self._outcomes[at.step][at.rank].gradients
        gradients.setdefault((self._segments[op.name], op.weight), []).append(delivered)
        if op.region.buffer not in self._allocator.dropped:
            self._handed.append((memory, delivered))


def _received(op: Launch, messages: list[Array], index: int) -> Array:
    """Returns the message that the rank at `index` of its group receives, from the messages of all ranks."""
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
    "own": lambda op, weights, reads: [read / op.divisor for read in reads],
    "sum_parts": lambda op, weights, reads: [read.reshape(op.parts, -1).sum(axis=0) for read in reads],
    "copy": lambda op, weights, reads: reads,
    "scale": lambda op, weights, reads: [read / op.divisor for read in reads],
}


class _Allocator:
    """A caching allocator that works in issue order: the storage of each buffer in each step.

    Args:
        schedule: the schedule whose buffers are allocated and freed.
        num_steps: number of runs.
        lets_go: whether the caller drops all delivered buffers at once, else every other one.

    Attributes:
        places: by step, the storage of each buffer.
        sizes: number of elements of each storage.
        free: by step and event, the storages of the compute stream that are free just before the event.
        dropped: the delivered buffers that the caller drops at once.
    """

    def __init__(self, schedule: Schedule, num_steps: int, *, lets_go: bool) -> None:
        self._schedule = schedule
        self._pools: defaultdict[str, list[int]] = defaultdict(list)
        self._delivers = Counter(op.region.buffer for op in schedule.ops if isinstance(op, Deliver))
        self.sizes: list[int] = []
        self.dropped = {buffer for nth, buffer in enumerate(self._delivers) if lets_go or nth % 2}
        self._shards = {i: self._new(i) for i, buffer in enumerate(schedule.buffers) if buffer.kind == "shard"}
        self.free: list[dict[int, list[int]]] = []
        self.places = [self._step() for _ in range(num_steps)]

    def _new(self, buffer: int) -> int:
        self.sizes.append(self._schedule.buffers[buffer].numel)
        return len(self.sizes) - 1

    def _take(self, buffer: int) -> int:
        found = self._schedule.buffers[buffer]
        pool = self._pools[found.stream]
        fitting = [place for place in reversed(pool) if self.sizes[place] >= found.numel]
        if not fitting:
            return self._new(buffer)
        place = min(fitting, key=self.sizes.__getitem__)
        pool.remove(place)
        return place

    def _step(self) -> list[int]:
        places, left = dict(self._shards), self._delivers.copy()
        self.free.append({})
        for slot in self._schedule.slots:
            if slot.when == "before":
                self.free[-1][slot.event] = list(self._pools["compute"])
            for op in slot.ops:
                self._issue(op, places, left)
        return [places[i] if i in places else self._new(i) for i in range(len(self._schedule.buffers))]

    def _issue(self, op: Op, places: dict[int, int], left: Counter[int]) -> None:
        gone: int | None = None
        if isinstance(op, Free):
            gone = op.buffer
        elif isinstance(op, Deliver):
            left[op.region.buffer] -= 1
            gone = op.region.buffer if not left[op.region.buffer] and op.region.buffer in self.dropped else None
        else:
            places |= {r.buffer: self._take(r.buffer) for r in op.writes if r.buffer not in places}
        if gone is not None and gone in places:
            self._pools[self._schedule.buffers[gone].stream].append(places[gone])
