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
from typing import Literal

from hpfunc._errors import ScheduleError
from hpfunc.planning.checking.checker import check, find_violations
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import Outcome, World, reference
from hpfunc.planning.program import Carry, Event, Program
from hpfunc.planning.schedule import Schedule
from tests.planning.edits import buffer_of, named, place_of
from tests.planning.mutants import NUM_STEPS, flat, rebuilt, renamed, without_wait
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


# --------------------------------------------------------------------------------------------------------------- edits


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
