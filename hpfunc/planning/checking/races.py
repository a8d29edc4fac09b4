"""Race check: every timing of a schedule gives the result of its issue order, and every buffer is released once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from ..ops import Caller, Compute, Deliver, Free, Launch, Local, Op, Region, Stream
from ..program import COMPUTES, Program
from ..schedule import Schedule

# Note [Happens before]
# Op a happens before op b if both are on one stream and a is issued first, if b waits for a, or through a third op.
# Each op has a *clock*: for each stream, the number of ops that happen before it, itself included. So a happens before
# b exactly if b's clock for a's stream has reached a's position there. If two ops touch one element and one of them
# writes it, one must happen before the other: then every timing gives the result of the issue order. A `Free` or
# `Deliver` writes all that it gives away. A buffer's first write begins its life, and must precede every other use.
#
# A collective of the caller that follows a compute event may be called inside of the unit, before the ops after that
# event are issued. What precedes it then waits for none of these, so nothing is ordered by such a wait.
#
# Between two events the caller issues its own work on the compute stream, which is not in the schedule: it counts as
# one more op there, and may read any delivered buffer. Once the caller drops a buffer, its memory returns to its
# stream. So only memory of the compute stream may be delivered, and an op of another stream that is the first to write
# such memory must happen after everything that was issued on the compute stream before it.

Problem = tuple[str, str]


Clock = list[int]
LANES: dict[Stream, int] = {stream: lane for lane, stream in enumerate(get_args(Stream))}
COMPUTE = LANES["compute"]


class _Use(NamedTuple):
    """An access of an op to a region. The op is number `position` of stream `lane`."""

    region: Region
    op: Op
    writes: bool
    lane: int
    position: int


@dataclass(slots=True)
class _Life:
    """The history of a buffer so far. The life of a shard ends when the caller writes it again."""

    uses: list[_Use] = field(default_factory=list)
    born: Op | None = None
    freed: Op | None = None
    delivered: list[_Use] = field(default_factory=list)


class Clocks(NamedTuple):
    """For each op its clock, and the position of the compute stream when the op was issued."""

    known: dict[str, Clock]
    computed: dict[str, int]


def unsafe_ops(schedule: Schedule) -> Iterator[Problem]:
    """Yields name and reason for each op that races with an earlier one or misuses a buffer."""
    known, computed = clocks(schedule)
    lives = [_Life() for _ in schedule.buffers]
    first = next(schedule.ops, None)
    if not isinstance(first, Caller):
        first = None
        yield "begin", "the first op is not the caller's"
    for slot in schedule.slots:
        for op in slot.ops:
            clock = known[op.name]
            if first is not None and clock[COMPUTE] < known[first.name][COMPUTE]:
                yield op.name, "is not ordered after the beginning of the step"
            for use in _uses(schedule, op, clock):
                life = lives[use.region.buffer]
                for text in _misuse(schedule, use, life, computed[op.name], clock):
                    yield op.name, text
                for earlier in _races(use, life, clock):
                    name = schedule.name(use.region)
                    yield op.name, f"uses {name}, but is not ordered after {earlier.name}"
                _record(use, life)
    yield from _leaks(schedule, lives)


def _leaks(schedule: Schedule, lives: Sequence[_Life]) -> Iterator[Problem]:
    for buffer, life in zip(schedule.buffers, lives, strict=True):
        if life.born is None:
            yield buffer.name, "this buffer is never written"
        elif life.freed is None and not life.delivered:
            due = "not handed back to the caller" if buffer.kind == "shard" else "neither freed nor delivered"
            yield buffer.name, f"this buffer is {due}"


def clocks(schedule: Schedule) -> Clocks:
    """Returns what happens before each op of a well formed schedule."""
    found = Clocks({}, {})
    last: list[Clock] = [[0] * len(LANES) for _ in LANES]
    after = {slot.event: slot.ops for slot in schedule.slots if slot.when == "after"}
    for slot in schedule.slots:
        missed = _missed(schedule.program, slot.event, after)
        if slot.when == "before":
            last[COMPUTE] = last[COMPUTE].copy()
            last[COMPUTE][COMPUTE] += 1  # the caller's own work
        for op in slot.ops:
            found.computed[op.name] = last[COMPUTE][COMPUTE]
            lane = LANES[op.stream]
            clock = last[lane].copy()
            for name in (name for name in op.waits if name not in missed):
                clock = list(map(max, clock, found.known[name]))
            clock[lane] += 1
            found.known[op.name] = last[lane] = clock
    return found


def _missed(program: Program, event: int, after: Mapping[int, Sequence[Op]]) -> set[str]:
    """Returns the ops that are issued later than those before `event`, if that is a collective called in a unit."""
    around = event
    while around >= 0 and program.events[around].kind == "collective":
        around -= 1
    is_inside = around != event and around >= 0 and program.events[around].kind in COMPUTES
    return {op.name for op in after.get(around, ())} if is_inside else set()


def hidden_launches(schedule: Schedule) -> int:
    """Returns the number of launches that may still be in flight while the next compute op runs."""
    known = clocks(schedule).known
    count, waiting = 0, list[Launch]()
    for op in schedule.ops:
        if isinstance(op, Launch):
            waiting.append(op)
        elif isinstance(op, Compute):
            clock, lanes = known[op.name], [(launch.name, LANES[launch.stream]) for launch in waiting]
            count += sum(clock[lane] < known[name][lane] for name, lane in lanes)
            waiting = []
    return count


def _uses(schedule: Schedule, op: Op, clock: Clock) -> list[_Use]:
    lane = LANES[op.stream]
    freed = (Region(op.buffer, 0, schedule.buffers[op.buffer].numel),) if isinstance(op, Free) else ()
    uses = [_Use(region, op, False, lane, clock[lane]) for region in op.reads]
    return uses + [_Use(region, op, True, lane, clock[lane]) for region in freed or op.writes]


def _misuse(schedule: Schedule, use: _Use, life: _Life, computed: int, clock: Clock) -> Iterator[str]:
    """Yields the faults of a use. `computed` is the position of the compute stream when its op was issued."""
    op, buffer = use.op, schedule.buffers[use.region.buffer]
    if isinstance(op, Caller) != (buffer.kind == "shard") and use.writes:
        owner = "the caller" if buffer.kind == "shard" else "the schedule"
        yield f"{_verb(op)} {buffer.name}, which belongs to {owner}"
    elif buffer.kind == "gradient" and use.writes and not isinstance(op, (Compute, Free)):
        yield f"{_verb(op)} {buffer.name}, which is only borrowed from autograd"
    elif isinstance(op, Compute) and use.writes and buffer.kind != "gradient":
        yield f"writes {buffer.name}, which autograd does not write"
    if life.freed:
        yield f"uses {buffer.name} after {life.freed.name}"
    for given in life.delivered:
        if isinstance(op, Free) or use.region.overlaps(given.region):
            yield f"uses {schedule.name(use.region)} after {given.op.name}"
            break
    if isinstance(op, Deliver) and buffer.stream != "compute":
        yield f"delivers {buffer.name}, which is memory of stream {buffer.stream}: the caller drops it unseen by that"
    if use.writes:
        yield from _miswrite(schedule, use, life, computed, clock)
    elif life.born is None and 0 == use.region.numel < buffer.numel:  # `wrong_meanings` reports all others
        yield f"reads {buffer.name}, which nobody has written"


def _verb(op: Op) -> str:
    return "frees" if isinstance(op, Free) else "delivers" if isinstance(op, Deliver) else "writes"


def _miswrite(schedule: Schedule, use: _Use, life: _Life, computed: int, clock: Clock) -> Iterator[str]:
    op, buffer = use.op, schedule.buffers[use.region.buffer]
    if not life.born and isinstance(op, (Free, Deliver)):
        yield f"gives {buffer.name} away, which nobody has written"
    elif isinstance(op, Free) and op.stream != buffer.stream:
        yield f"frees {buffer.name} on stream {op.stream}, which belongs to stream {buffer.stream}"
    elif not life.born and op.stream != buffer.stream:
        if buffer.stream != "compute":
            yield f"begins {buffer.name} on stream {op.stream}, which belongs to stream {buffer.stream}"
        elif clock[COMPUTE] < computed:
            yield f"begins {buffer.name} on stream {op.stream}, but is not ordered after what the caller has done"
    if isinstance(op, (Compute, Launch, Local)) and not _in_place(op):
        same = isinstance(op, Local) and op.kind == "accumulate"  # may add to one of its reads
        others = (region for region in op.reads if region.overlaps(use.region) and not (same and region == use.region))
        if any(others) or sum(region.overlaps(use.region) for region in op.writes) > 1:
            yield f"writes {schedule.name(use.region)}, which it also reads, or writes it twice"


def _in_place(op: Compute | Launch | Local) -> bool:
    return (isinstance(op, Launch) and op.collective == "all_reduce") or (isinstance(op, Local) and op.kind == "scale")


def _races(use: _Use, life: _Life, clock: Clock) -> list[Op]:
    """Returns the earlier ops that conflict with a use and, by the clock of its op, do not happen before it."""
    found: dict[str, Op] = {}
    for region, op, writes, lane, position in life.uses:
        if clock[lane] >= position:
            continue  # happens before, or is the same op
        if op is life.born or isinstance(use.op, Free) or ((use.writes or writes) and use.region.overlaps(region)):
            found[op.name] = op
    return list(found.values())


def _record(use: _Use, life: _Life) -> None:
    life.uses.append(use)
    if isinstance(use.op, Free) or (isinstance(use.op, Caller) and life.born is not None):
        life.freed = life.freed or use.op
    elif isinstance(use.op, Deliver):
        life.delivered.append(use)
    elif use.writes and life.born is None:
        life.born = use.op
