"""Whether more collectives may be in flight at one time than a device has room for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile
from typing import NamedTuple

from ..ops import Compute, Launch, Op
from ..schedule import Schedule
from .races import COMPUTE, LANES, Clock, Problem, clocks

# Note [Room for collectives]
# On a device a collective is a kernel, which keeps its place until all ranks of its group have begun it. If more
# collectives are ready than there are places, one rank may begin some and another rank others, and all wait for ever.
# If never more than `communicators` are ready, each that is ready has a place. Then the first one in issue order that
# some rank has not completed is ready on all of its ranks, so it completes: there is no deadlock.
#
# Two collectives may be ready at one time exactly if neither happens before the other (Note [Happens before]), so the
# question is how many there are of which no one happens before another. It is assumed that all ranks issue the same
# ops, that a stream runs in order, and that a wait is for the end of an op.
#
# The caller's own collectives (`psum`) run on the compute stream. One that follows a compute event may be called inside
# of the unit: then it precedes the ops after the event, and has waited only for ops that were issued before these. Or
# it is called by the step, after them. Both are counted.


class _Collective(NamedTuple):
    """A collective in flight: number `position` of stream `lane`. Its clock says what happens before it."""

    name: str
    lane: int
    position: int
    clock: Clock


def crowded(schedule: Schedule, communicators: int) -> Iterator[Problem]:
    """Yields sets of collectives that may be in flight at one time, of more than `communicators`."""
    by_lane: defaultdict[int, list[_Collective]] = defaultdict(list)
    for collective in _collectives(schedule):
        by_lane[collective.lane].append(collective)
    for lanes in combinations(sorted(by_lane), communicators + 1):
        if found := _at_one_time([by_lane[lane] for lane in lanes]):
            *others, last = [collective.name for collective in found]
            yield last, f"may be in flight together with {', '.join(others)}, but there is room for {communicators}"


def _at_one_time(lanes: Sequence[Sequence[_Collective]]) -> list[_Collective] | None:
    """Returns one collective of each lane, none of which happens before another; None if there are no such ones."""
    places = [0] * len(lanes)
    while all(place < len(lane) for place, lane in zip(places, lanes, strict=True)):
        found = [lane[place] for place, lane in zip(places, lanes, strict=True)]
        past = next((i for i, one in enumerate(found) if any(_precedes(one, other) for other in found)), None)
        if past is None:
            return found
        places[past] += 1  # it precedes all later ones of the other's lane, too
    return None


def _precedes(one: _Collective, other: _Collective) -> bool:
    return one is not other and other.clock[one.lane] >= one.position


def _collectives(schedule: Schedule) -> Iterator[_Collective]:
    """Yields the schedule's collectives and the caller's, those of one stream in order."""
    known, events = clocks(schedule).known, schedule.program.events
    slots = {(slot.event, slot.when): slot.ops for slot in schedule.slots}
    last: Clock = [0] * len(LANES)  # of the compute stream
    issued = set[str]()

    def issue(ops: Sequence[Op]) -> Iterator[_Collective]:
        nonlocal last
        for op in ops:
            issued.add(op.name)
            last = known[op.name] if op.stream == "compute" else last
            if isinstance(op, Launch):
                lane = LANES[op.stream]
                yield _Collective(op.name, lane, known[op.name][lane], known[op.name])

    for index, event in enumerate(events):
        before = slots.get((index, "before"), ())
        yield from issue(before)
        if event.kind == "collective":
            waited = [known[name] for op in before for name in op.waits]
            yield _of_caller(event.name, list(map(max, last, *waited)) if waited else last)
        if before and isinstance(before[-1], Compute):
            inner = takewhile(lambda i: events[i].kind == "collective", range(index + 1, len(events)))
            for i in inner:
                waited = [known[w] for op in slots.get((i, "before"), ()) for w in op.waits if w in issued]
                last = list(map(max, last, *waited)) if waited else last
                yield _of_caller(events[i].name, last)
        yield from issue(slots.get((index, "after"), ()))


def _of_caller(name: str, last: Clock) -> _Collective:
    """Returns a collective that the caller launches after the latest op of the compute stream."""
    return _Collective(f"the caller's {name}", COMPUTE, last[COMPUTE] + 1, last)
