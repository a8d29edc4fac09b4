"""Whether every timing of a schedule shows what its order means, and whether every buffer is given back once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from ._schedule import Compute, Deliver, Free, Launch, Local, Op, Region, Schedule, Stream

# Note [Happens before]
# Op a happens before op b if both are on one stream and a is issued first, if b waits for a, or through a third op.
# Each op has a *clock*: how many ops of each stream happen before it or are it. So a happens before b exactly if b's
# clock for a's stream has reached a's position there. Two ops that touch one element, one of them writing, must be
# ordered so; then no timing can show another result than the issue order. A `Free` or `Deliver` writes all that it
# gives away, and a buffer's first write brings it to life: it must happen before every other use.

Problem = tuple[str, str]


Clock = list[int]
_LANES: dict[Stream, int] = {stream: lane for lane, stream in enumerate(get_args(Stream))}


class _Use(NamedTuple):
    """An access of an op to a region: the op is number `position` of stream `lane`."""

    region: Region
    op: Op
    writes: bool
    lane: int
    position: int


@dataclass(slots=True)
class _Life:
    """What has happened to a buffer so far."""

    uses: list[_Use] = field(default_factory=list)
    born: Op | None = None
    freed: Op | None = None
    delivered: list[_Use] = field(default_factory=list)


def unsafe_ops(schedule: Schedule) -> Iterator[Problem]:
    """Yields the name of each op that races with an earlier one, or misuses a buffer, and why."""
    clocks = _clocks(schedule)
    lives = [_Life() for _ in schedule.buffers]
    for op in schedule.ops:
        clock = clocks[op.name]
        for use in _uses(schedule, op, clock):
            life = lives[use.region.buffer]
            for text in _misuse(schedule, use, life):
                yield op.name, text
            for earlier in _races(use, life, clock):
                name = schedule.name(use.region)
                yield op.name, f"uses {name}, but is not ordered after {earlier.name}"
            _record(use, life)
    for buffer, life in zip(schedule.buffers, lives, strict=True):
        if buffer.kind != "shard" and life.born is None:
            yield buffer.name, "this buffer is never written"
        elif buffer.kind != "shard" and life.freed is None and not life.delivered:
            yield buffer.name, "this buffer is neither freed nor delivered"


def _clocks(schedule: Schedule) -> dict[str, Clock]:
    clocks: dict[str, Clock] = {}
    last: list[Clock] = [[0] * len(_LANES) for _ in _LANES]
    for op in schedule.ops:
        lane = _LANES[op.stream]
        clock = last[lane].copy()
        for name in op.waits:
            clock = list(map(max, clock, clocks[name]))
        clock[lane] += 1
        clocks[op.name] = last[lane] = clock
    return clocks


def hidden_launches(schedule: Schedule) -> int:
    """Returns how many launches may still be under way while a unit computes that is issued after them."""
    clocks = _clocks(schedule)
    count, waiting = 0, list[Launch]()
    for op in schedule.ops:
        if isinstance(op, Launch):
            waiting.append(op)
        elif isinstance(op, Compute):
            clock, lanes = clocks[op.name], [(launch.name, _LANES[launch.stream]) for launch in waiting]
            count += sum(clock[lane] < clocks[name][lane] for name, lane in lanes)
            waiting = []
    return count


def _uses(schedule: Schedule, op: Op, clock: Clock) -> list[_Use]:
    lane = _LANES[op.stream]
    match op:
        case Free():
            region = Region(op.buffer, 0, schedule.buffers[op.buffer].numel)
            return [_Use(region, op, True, lane, clock[lane])]
        case Deliver():
            return [_Use(op.region, op, True, lane, clock[lane])]
        case _:
            reads = [_Use(region, op, False, lane, clock[lane]) for region in op.reads]
            return reads + [_Use(region, op, True, lane, clock[lane]) for region in op.writes]


def _misuse(schedule: Schedule, use: _Use, life: _Life) -> Iterator[str]:
    op, buffer = use.op, schedule.buffers[use.region.buffer]
    if buffer.kind == "shard":
        if use.writes:
            verb = "frees" if isinstance(op, Free) else "delivers" if isinstance(op, Deliver) else "writes"
            yield f"{verb} {buffer.name}, which belongs to the caller"
        return
    if life.freed:
        yield f"uses {buffer.name} after {life.freed.name}"
    for given in life.delivered:
        if isinstance(op, Free) or use.region.overlaps(given.region):
            yield f"uses {schedule.name(use.region)} after {given.op.name}"
            break
    if use.writes:
        yield from _miswrite(schedule, use, life)


def _miswrite(schedule: Schedule, use: _Use, life: _Life) -> Iterator[str]:
    op, buffer = use.op, schedule.buffers[use.region.buffer]
    if not life.born and isinstance(op, (Free, Deliver)):
        yield f"gives {buffer.name} away, which nobody has written"
    elif (isinstance(op, Free) or not life.born) and op.stream != buffer.stream:
        verb = "frees" if isinstance(op, Free) else "begins"
        yield f"{verb} {buffer.name} on stream {op.stream}, which belongs to stream {buffer.stream}"
    if isinstance(op, (Compute, Launch, Local)) and not _in_place(op):
        same = isinstance(op, Local) and op.kind == "accumulate"  # may add to one of its reads
        others = (region for region in op.reads if region.overlaps(use.region) and not (same and region == use.region))
        if any(others) or sum(region.overlaps(use.region) for region in op.writes) > 1:
            yield f"writes {schedule.name(use.region)}, which it also reads, or writes it twice"


def _in_place(op: Compute | Launch | Local) -> bool:
    return (isinstance(op, Launch) and op.collective == "all_reduce") or (isinstance(op, Local) and op.kind == "scale")


def _races(use: _Use, life: _Life, clock: Clock) -> list[Op]:
    """Returns the earlier ops that conflict with a use and do not happen before it, as the clock of its op says."""
    found: dict[str, Op] = {}
    for region, op, writes, lane, position in life.uses:
        if clock[lane] >= position:
            continue  # happens before, or is the same op
        if op is life.born or isinstance(use.op, Free) or ((use.writes or writes) and use.region.overlaps(region)):
            found[op.name] = op
    return list(found.values())


def _record(use: _Use, life: _Life) -> None:
    life.uses.append(use)
    if isinstance(use.op, Free):
        life.freed = life.freed or use.op
    elif isinstance(use.op, Deliver):
        life.delivered.append(use)
    elif use.writes and life.born is None:
        life.born = use.op
