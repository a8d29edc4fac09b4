"""Small edits of a schedule. Ops and buffers are found by globs for their names."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from hpfunc.planning.ops import Compute, Op, Region
from hpfunc.planning.schedule import Schedule
from tests.planning.mutants import flat, put, rebuilt


def place_of(schedule: Schedule, pattern: str) -> int:
    """Returns the place among `flat` of the first op whose name a glob fits."""
    places = [place for place, (_, op) in enumerate(flat(schedule)) if fnmatchcase(op.name, pattern)]
    assert places, f"no op is named {pattern!r}: {[op.name for op in schedule.ops]}"
    return places[0]


def named(schedule: Schedule, pattern: str) -> Any:
    """Returns the first op whose name a glob fits."""
    return flat(schedule)[place_of(schedule, pattern)][1]


def region(schedule: Schedule, pattern: str) -> Region:
    """Returns all of the first buffer whose name a glob fits."""
    index = buffer_of(schedule, pattern)
    return Region(index, 0, schedule.buffers[index].numel)


def buffer_of(schedule: Schedule, pattern: str) -> int:
    """Returns the index of the first buffer whose name a glob fits."""
    found = [index for index, buffer in enumerate(schedule.buffers) if fnmatchcase(buffer.name, pattern)]
    assert found, f"no buffer is named {pattern!r}: {[buffer.name for buffer in schedule.buffers]}"
    return found[0]


def changed(schedule: Schedule, pattern: str, /, **fields: Any) -> Schedule:
    """Returns the schedule with other fields in an op."""
    place = place_of(schedule, pattern)
    return put(schedule, place, replace(flat(schedule)[place][1], **fields))


def rebuffered(schedule: Schedule, pattern: str, /, **fields: Any) -> Schedule:
    """Returns the schedule with other fields in a buffer."""
    index = buffer_of(schedule, pattern)
    buffers = list(schedule.buffers)
    buffers[index] = replace(buffers[index], **fields)
    return replace(schedule, buffers=tuple(buffers))


def left_out(schedule: Schedule, pattern: str) -> Schedule:
    """Returns the schedule without an op, with the waits that the others need."""
    place = place_of(schedule, pattern)
    return rebuilt(schedule, [one for index, one in enumerate(flat(schedule)) if index != place], waits=True)


def inserted(schedule: Schedule, before: str, op: Op, *, waits: bool) -> Schedule:
    """Returns the schedule with one more op; with the waits that the order needs if `waits`, else with its own."""
    ops, place = flat(schedule), place_of(schedule, before)
    return rebuilt(schedule, [*ops[:place], (ops[place][0], op), *ops[place:]], waits=waits)


def moved(schedule: Schedule, pattern: str, *, after: str, waits: bool = False) -> Schedule:
    """Returns the schedule in which an op is issued right after another one.

    With the waits that this order needs if `waits`. Else with the old ones, but for those that would wait for
    something that is not issued yet.
    """
    ops = flat(schedule)
    _, op = ops.pop(place_of(schedule, pattern))
    target = next(place for place, (_, other) in enumerate(ops) if fnmatchcase(other.name, after))
    slot = ops[target][0] + isinstance(ops[target][1], Compute)  # nothing follows a Compute in its slot
    ops.insert(target + 1, (slot, op))
    issued: set[str] = set()
    kept = []
    for index, other in ops:
        kept.append((index, replace(other, waits=tuple(name for name in other.waits if name in issued))))
        issued.add(other.name)
    return rebuilt(schedule, kept, waits=waits)
