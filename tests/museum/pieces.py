"""How a piece of the museum is made from a schedule, and how it is shown.

A piece has a schedule that is safe (the *mended* one: what `plan` returns, now and then with one more edit) and the
same after one small edit (the *broken* one: what was published of another system, in our ops). `judge` shows that the
checker tells them apart, and that the machine of `planning.checking.interpreter` shows wrong numbers, or a deadlock,
for the broken one under some timing.

Edits find ops and buffers by globs for their names, and the planner's own order of all others stays. So a piece lives
on when the planner puts something else between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from hpfunc._errors import ScheduleError
from hpfunc.planning.checking.checker import check, find_violations
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import Outcome, World, reference
from hpfunc.planning.ops import Compute, Op, Region
from hpfunc.planning.program import Carry, Event, Program
from hpfunc.planning.schedule import Schedule
from tests.planning.mutants import NUM_STEPS, flat, put, rebuilt, renamed, without_wait
from tests.planning.programs import STEP, stack, weight

FSDP = {"shard": 4}
HSDP = {"replicate": 2, "shard": 2}

Shown = Literal["right", "wrong", "stuck", "torn"]
"""What a timing shows: the right numbers, wrong ones, a deadlock, or ranks that meet in different collectives."""


def micro_batches(count: int, carry: Carry, mesh_sizes: Mapping[str, int], numels: Sequence[int] = (64, 64)) -> Program:
    """Returns the program of some layers that are passed several times for one gradient.

    With a carry of "" they are passed for as many gradients.
    """
    program = stack(*((weight(f"w{index}", numel, mesh_sizes),) for index, numel in enumerate(numels)))
    events: list[Event] = []
    for use in range(count):
        events += [Event("forward", layer, use) for layer in range(len(numels))]
        events += [Event("backward", layer, use) for layer in reversed(range(len(numels)))]
        events.append(Event("end_backward", carry=carry))
    return replace(program, events=(*events[:-1], *STEP))


# ------------------------------------------------------------------------------------------------------------- finding


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


# --------------------------------------------------------------------------------------------------------------- edits


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


def happens_before(schedule: Schedule) -> dict[str, set[str]]:
    """Returns for each op those that happen before it: by order on a stream, by waits, or through other ops."""
    before: dict[str, set[str]] = {}
    last: dict[str, str] = {}
    for op in schedule.ops:
        direct = [*op.waits, *([last[op.stream]] if op.stream in last else [])]
        before[op.name] = set().union(*({name} | before[name] for name in direct))
        last[op.stream] = op.name
    return before


def not_ordered(schedule: Schedule, pattern: str, *, after: str) -> Schedule:
    """Returns the schedule without the waits that order an op after another one: its own, or those of its stream."""
    first, second, before = named(schedule, after), named(schedule, pattern), happens_before(schedule)
    assert first.stream != second.stream
    assert first.name in before[second.name]
    ops, end = flat(schedule), place_of(schedule, pattern)
    for place, (index, op) in enumerate(ops[: end + 1]):
        if op.stream == second.stream:
            kept = tuple(name for name in op.waits if name != first.name and first.name not in before[name])
            ops[place] = (index, replace(op, waits=kept))
    broken = rebuilt(schedule, ops)
    assert first.name not in happens_before(broken)[second.name]
    return broken


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


def sharing(schedule: Schedule, kept: str, lost: str, *, freed: str = "") -> Schedule:
    """Returns the schedule that uses one buffer for what another one was for; without an op that frees it between."""
    one, two = buffer_of(schedule, kept), buffer_of(schedule, lost)
    ops = [(index, renamed(op, two, one)) for index, op in flat(schedule) if not freed or op.name != freed]
    ops = [(index, without_wait(op, freed)) for index, op in ops] if freed else ops
    return rebuilt(schedule, ops)


# ------------------------------------------------------------------------------------------------------------- showing


def shown(schedule: Schedule, mesh_sizes: Mapping[str, int], timing: int) -> Shown:
    """Returns what one timing of several steps shows."""
    world = World(schedule.program, dict(mesh_sizes))
    try:
        found = interpret(schedule, world, timing, NUM_STEPS)
    except ScheduleError as error:
        return "stuck" if "no stream can go on" in str(error) else "torn"
    return "right" if all(map(Outcome.agrees, found, reference(world) * NUM_STEPS)) else "wrong"


def judge(
    mended: Schedule,
    broken: Schedule,
    mesh_sizes: Mapping[str, int],
    says: str,
    shows: Shown = "wrong",
    num_timings: int = 100,
) -> None:
    """Fails unless the checker accepts one and rejects the other, in these words, and some timing shows why.

    In `says` a ``*`` stands for any words.
    """
    check(mended)
    assert {shown(mended, mesh_sizes, timing) for timing in range(10)} == {"right"}
    texts = [str(violation) for violation in find_violations(broken)]
    pattern = re.compile(".*".join(map(re.escape, says.split("*"))))
    assert any(map(pattern.fullmatch, texts)), texts
    found = (shown(broken, mesh_sizes, timing) for timing in range(num_timings))
    assert shows in found, f"no timing of {num_timings} shows {shows!r}"
