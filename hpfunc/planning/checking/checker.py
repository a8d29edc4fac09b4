"""`check`: proves before a run that a schedule is safe: no race, no deadlock, no leak, and the right gradients.

There are three questions, each with its own module. Is the schedule well formed (here)? Does every timing give the
result of the issue order (`planning.checking.races`)? Does the issue order compute the program
(`planning.checking.symbolic_run`)?

The checker uses the declarations of ops in `planning.ops`: fields, `reads`, `writes` and sizes. Everything that it
proves it defines a second time: which ops give memory away, the orders this needs, and the values that ops leave.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..._errors import ScheduleError, message
from .. import ops
from ..ops import Op, Region, Slot
from ..program import COMPUTES
from ..schedule import Schedule
from .races import hidden_launches, unsafe_ops
from .room import crowded
from .symbolic_run import num_ranks, wrong_meanings
from .symbols import Axes


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of a schedule: the op, buffer or weight, and the reason."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The costs of a schedule for one rank.

    Attributes:
        peak_bytes: most bytes in buffers at one time, each rounded up to 512. The caller's shards do not count.
            Delivered gradients count until the end of the step.
        peak_at: the op at which the peak is first reached.
        max_whole_units: most units that are whole, or being gathered, at one time.
        max_whole_bytes: most bytes at one time in whole weights and in the messages that they are unpacked from.
        launches: number of launches, by collective.
        hidden_launches: number of launches that may be in flight while a unit computes.
        sent_bytes: bytes that a rank sends, by collective.
        local_bytes: bytes that a rank writes in its own memory, by kind of `Local`.
    """

    peak_bytes: int
    peak_at: str
    max_whole_units: int
    max_whole_bytes: int
    launches: Mapping[str, int]
    hidden_launches: int
    sent_bytes: Mapping[str, int]
    local_bytes: Mapping[str, int]


def check(schedule: Schedule, *, communicators: int | None = None) -> Report:
    """Proves that a schedule is safe to run with any timing, and computes its costs.

    Args:
        schedule: any schedule, from the planner or not.
        communicators: how many collectives a device has room for at one time. None means the number in the schedule's
            policy; if that is None, too, any number.

    Returns:
        The costs for one rank.

    Raises:
        ScheduleError: the schedule is not safe. The message lists every violation.

    >>> from hpfunc.planning.planner import plan
    >>> from hpfunc.planning.policy import Policy
    >>> from hpfunc.planning.program import Event, Program, Unit, Weight
    >>> weight = Weight("w", 64, *["float32"] * 4, ("shard",), 4, (), 1, divisor=4)
    >>> kinds = ("forward", "backward")
    >>> events = (*(Event(kind, 0) for kind in kinds), Event("end_backward"), Event("end_step"))
    >>> report = check(plan(Program((weight,), (Unit("layer", (0,)),), events), Policy()))
    >>> report.peak_bytes, report.peak_at, dict(report.sent_bytes)
    (2048, 'backward layer', {'all_gather': 768, 'reduce_scatter': 768})
    """
    if violations := find_violations(schedule, communicators=communicators):
        raise ScheduleError(message("hpfunc.check", "the schedule is not safe to run", map(str, violations)))
    return report(schedule)


def find_violations(schedule: Schedule, *, communicators: int | None = None) -> tuple[Violation, ...]:
    """Returns all violations of a schedule; none if it is safe. See `check`."""
    malformed = tuple(Violation(*found) for found in _malformed(schedule))
    if malformed:
        return malformed  # the other checks need a well formed schedule
    room = communicators or schedule.policy.communicators
    hanging = crowded(schedule, room) if room is not None else ()
    return tuple(Violation(*found) for found in [*unsafe_ops(schedule), *hanging, *wrong_meanings(schedule)])


# --------------------------------------------------------------------------------------------------------- well formed


def _malformed(schedule: Schedule) -> Iterator[tuple[str, str]]:
    yield from _bad_names(schedule)
    yield from _bad_slots(schedule)
    ranks = num_ranks(schedule.program)
    yield from _bad_communicators(schedule, ranks)
    for op in schedule.ops:
        for text in _bad_regions(schedule, op):
            yield op.name, text
        if isinstance(op, ops.Launch):
            for text in _bad_sizes(schedule, op, ranks.get(op.communicator.axes, 1)):
                yield op.name, text
        elif isinstance(op, ops.Local) and not op.fits:
            sizes = f"{len(op.reads)} reads and {len(op.writes)} writes of these sizes"
            yield op.name, f"{op.kind} cannot have {sizes}"


def _bad_names(schedule: Schedule) -> Iterator[tuple[str, str]]:
    for name, count in Counter(buffer.name for buffer in schedule.buffers).items():
        if count > 1:
            yield name, f"{count} buffers have this name"
    issued: set[str] = set()
    for op in schedule.ops:
        if op.name in issued:
            yield op.name, "two ops have this name"
        for name in op.waits:
            if name not in issued:
                yield op.name, f"waits for {name!r}, which is not issued before it: it would wait forever"
        issued.add(op.name)


def _bad_slots(schedule: Schedule) -> Iterator[tuple[str, str]]:
    events = schedule.program.events
    keys = [(slot.event, slot.when == "after") for slot in schedule.slots]
    if sorted(set(keys)) != keys or any(not 0 <= event < len(events) for event, _ in keys):
        yield "slots", "are not in the order of the events, each at most once"
        return
    last: dict[int, Op] = {}
    for slot in schedule.slots:
        for op in slot.ops:
            if isinstance(op, (ops.Compute, ops.Caller, ops.Deliver)) and op.stream != "compute":
                yield op.name, f"is on stream {op.stream}, not on compute"
            if isinstance(op, ops.Compute) and (op is not slot.ops[-1] or not _belongs(schedule, op, slot)):
                yield op.name, "is not the last op before its event"
        if slot.ops and slot.when == "before":
            last[slot.event] = slot.ops[-1]
    for index, event in enumerate(events):
        if event.kind in COMPUTES and not isinstance(last.get(index), ops.Compute):
            yield schedule.program.describe(event), "has no Compute before it"


def _belongs(schedule: Schedule, op: ops.Compute, slot: Slot) -> bool:
    return (op.event, "before") == (slot.event, slot.when) and schedule.program.events[op.event].kind in COMPUTES


def _bad_communicators(schedule: Schedule, ranks: Mapping[Axes, int]) -> Iterator[tuple[str, str]]:
    streams: dict[ops.Communicator, str] = {}
    for op in schedule.ops:
        if not isinstance(op, ops.Launch):
            continue
        stream = streams.setdefault(op.communicator, op.stream)
        if stream != op.stream:
            yield op.name, f"uses {op.communicator} on stream {op.stream}, which is used on stream {stream} before"
        if op.communicator.axes not in ranks:
            yield op.name, f"uses {op.communicator}, over whose axes no weight is cut or reduced"


def _bad_regions(schedule: Schedule, op: Op) -> Iterator[str]:
    for region in (Region(op.buffer, 0, 0),) if isinstance(op, ops.Free) else (*op.reads, *op.writes):
        if not 0 <= region.buffer < len(schedule.buffers):
            yield f"names buffer {region.buffer}, which does not exist"
        elif not 0 <= region.start <= region.stop <= schedule.buffers[region.buffer].numel:
            yield f"reaches beyond its buffer: {schedule.name(region)}"
    weights = op.weights if isinstance(op, ops.Local) else (op.weight,) if isinstance(op, ops.Deliver) else ()
    for weight in weights:
        if not 0 <= weight < len(schedule.program.weights):
            yield f"names weight {weight}, which does not exist"


def _bad_sizes(schedule: Schedule, op: ops.Launch, ranks: int) -> Iterator[str]:
    if len(op.reads) != len(op.writes) or not op.reads:
        yield f"sends {len(op.reads)} messages and receives {len(op.writes)}"
        return
    for read, write in zip(op.reads, op.writes, strict=True):
        if not ops.COLLECTIVES[op.collective].fits(read, write, ranks):
            yield f"{op.collective} over {ranks} ranks from {schedule.name(read)} into {schedule.name(write)} cannot be"
        elif _dtype(schedule, read) != _dtype(schedule, write):
            yield f"sends {_dtype(schedule, read)} and receives {_dtype(schedule, write)}"


def _dtype(schedule: Schedule, region: Region) -> str:
    return schedule.buffers[region.buffer].dtype


# --------------------------------------------------------------------------------------------------------------- costs


def report(schedule: Schedule) -> Report:
    """Returns the costs of a safe schedule for one rank. See `Report`."""
    ranks = num_ranks(schedule.program)
    launches, sent, written = Counter[str](), Counter[str](), Counter[str]()
    for op in schedule.ops:
        if isinstance(op, ops.Launch):
            launches[op.collective] += 1
            size_bytes = _size_bytes(schedule, op.reads)
            sent[op.collective] += ops.COLLECTIVES[op.collective].sent_bytes(size_bytes, ranks[op.communicator.axes])
        elif isinstance(op, ops.Local):
            written[op.kind] += _size_bytes(schedule, op.writes)
    hidden = hidden_launches(schedule)
    return Report(*_peaks(schedule), dict(launches), hidden, dict(sent), dict(written))


def _peaks(schedule: Schedule) -> tuple[int, str, int, int]:
    """Returns the first four attributes of a `Report`."""
    units = _units_of_buffers(schedule)
    aligned = [-(-buffer.size_bytes // ops.ALIGN_BYTES) * ops.ALIGN_BYTES for buffer in schedule.buffers]
    live, live_bytes, peak_bytes, peak_at = set[int](), 0, 0, ""
    whole, whole_bytes, max_whole_units, max_whole_bytes = Counter[int](), 0, 0, 0
    for op in schedule.ops:
        if isinstance(op, ops.Free):
            live.discard(op.buffer)
            live_bytes -= aligned[op.buffer]
            whole_bytes -= _whole_bytes(schedule, op.buffer)
            for unit in units.get(op.buffer, ()):
                whole[unit] -= 1
                if not whole[unit]:
                    del whole[unit]
        elif not isinstance(op, (ops.Caller, ops.Deliver)):
            begun = {region.buffer for region in op.writes} - live
            live |= begun
            live_bytes += sum(aligned[buffer] for buffer in begun)
            whole_bytes += sum(_whole_bytes(schedule, buffer) for buffer in begun)
            whole.update(unit for buffer in begun for unit in units.get(buffer, ()))
            if live_bytes > peak_bytes:
                peak_bytes, peak_at = live_bytes, op.name
            max_whole_units, max_whole_bytes = max(max_whole_units, len(whole)), max(max_whole_bytes, whole_bytes)
    return peak_bytes, peak_at, max_whole_units, max_whole_bytes


def _whole_bytes(schedule: Schedule, buffer: int) -> int:
    found = schedule.buffers[buffer]
    return found.size_bytes if found.kind in ("whole", "gathered") else 0


def _size_bytes(schedule: Schedule, regions: Iterable[Region]) -> int:
    return sum(region.numel * ops.itemsize(_dtype(schedule, region)) for region in regions)


def _units_of_buffers(schedule: Schedule) -> dict[int, set[int]]:
    """Returns for each buffer the units whose whole weights it holds, or whose messages they are unpacked from."""
    units: defaultdict[int, set[int]] = defaultdict(set)
    for op in schedule.ops:
        if isinstance(op, ops.Compute):
            unit = schedule.program.events[op.event].unit
            for region in op.reads:
                if unit is not None and schedule.buffers[region.buffer].kind == "whole":
                    units[region.buffer].add(unit)
    for op in schedule.ops:
        if isinstance(op, ops.Local) and op.kind == "unpack_wholes":
            for region in op.reads:
                units[region.buffer] |= {unit for write in op.writes for unit in units[write.buffer]}
    return units
