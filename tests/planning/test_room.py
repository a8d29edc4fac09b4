"""Room for collectives: what `check` accepts for so many at one time does not hang on a machine with that much room."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpfunc._errors import PolicyError, ScheduleError
from hpfunc.planning.checking.checker import check, find_violations
from hpfunc.planning.ops import Launch, Slot
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.program import COMPUTES, Event, Program
from hpfunc.planning.schedule import Schedule
from tests.planning.programs import Case, cases, edge_cases, three_units
from tests.planning.room_machine import hangs

SIZES = {"replicate": 2, "shard": 2}
CALL = Event("collective", name="psum over ('tp',)")


def planned(program: Program, communicators: int | None) -> Schedule:
    return plan(program, Policy(pack_below_bytes=0, communicators=communicators))


@settings(max_examples=60, deadline=None)
@given(cases() | edge_cases(), st.none() | st.integers(1, 3), st.integers(0, 1 << 20))
def test_what_is_accepted_does_not_hang(case: Case, communicators: int | None, timing: int) -> None:
    schedule = plan(case.program, replace(case.policy, communicators=communicators), case.traits)
    rng = random.Random(timing)
    for room in (1, 2, 3):
        accepted = not find_violations(schedule, communicators=room)
        assert accepted or communicators is None or room < communicators, "the planner keeps its own bound"
        assert not (accepted and hangs(schedule, case.mesh_sizes, room, rng)), str(schedule)


@pytest.mark.parametrize("room", [1, 2])
def test_three_collectives_at_one_time_need_room_for_three(room: int) -> None:
    schedule = planned(three_units(SIZES), None)
    check(schedule, communicators=3)
    with pytest.raises(ScheduleError, match=f"in flight together with .*, but there is room for {room}"):
        check(schedule, communicators=room)


def test_a_schedule_that_is_refused_hangs_for_some_timing() -> None:
    schedule = planned(three_units(SIZES), None)
    assert any(hangs(schedule, SIZES, 1, random.Random(timing)) for timing in range(50))
    assert not any(hangs(schedule, SIZES, 3, random.Random(timing)) for timing in range(50))


@pytest.mark.parametrize("communicators", [1, 2, 3])
def test_the_number_in_the_policy_is_what_is_checked(communicators: int) -> None:
    schedule = planned(three_units(SIZES), communicators)
    check(schedule)
    assert schedule.policy.communicators == communicators
    assert Schedule.parse(str(schedule)) == schedule


def test_a_wait_that_is_missing_is_found() -> None:
    schedule = planned(three_units(SIZES), 1)
    launches = [op for op in schedule.ops if isinstance(op, Launch)]
    chained = 0
    for launch in launches:
        others = [name for name in launch.waits if any(name == other.name for other in launches)]
        for name in others:
            cut = replace(launch, waits=tuple(wait for wait in launch.waits if wait != name))
            slots = [replace(s, ops=tuple(cut if op is launch else op for op in s.ops)) for s in schedule.slots]
            found = find_violations(replace(schedule, slots=tuple(slots)))
            chained += any("there is room for 1" in violation.text for violation in found)
    assert chained > 3


def with_call(place: int) -> Program:
    """Three units, and a collective of the caller at a place."""
    program = three_units(SIZES)
    return replace(program, events=(*program.events[:place], CALL, *program.events[place:]))


@pytest.mark.parametrize("place", [1, 2, 5, 6])
def test_the_callers_collectives_need_room_too(place: int) -> None:
    with pytest.raises(ScheduleError, match=re.escape("the caller's psum over ('tp',)")):
        check(planned(with_call(place), None), communicators=1)


@pytest.mark.parametrize("place", range(8))
def test_the_callers_collectives_wait_wherever_they_are(place: int) -> None:
    program = with_call(place)
    for communicators in (1, 2, 3):
        schedule = planned(program, communicators)
        check(schedule)
        assert not any(hangs(schedule, SIZES, communicators, random.Random(timing)) for timing in range(20))


def called_inside(schedule: Schedule) -> Schedule:
    """Returns a schedule without the waits that are not there if collectives are called inside of their units."""
    late, slots, events = set[str](), list[Slot](), schedule.program.events
    for slot in schedule.slots:
        kind = events[slot.event].kind
        if kind == "collective":
            ops = tuple(replace(op, waits=tuple(name for name in op.waits if name not in late)) for op in slot.ops)
            slots.append(replace(slot, ops=ops))
            continue
        late = {op.name for op in slot.ops} if slot.when == "after" and kind in COMPUTES else set()
        slots.append(slot)
    return replace(schedule, slots=tuple(slots))


def assert_ordered_inside(schedule: Schedule) -> None:
    found = find_violations(called_inside(schedule))
    assert not [violation.text for violation in found if "there is room for" not in violation.text]


@pytest.mark.parametrize("place", range(8))
def test_nothing_relies_on_a_wait_that_a_call_inside_of_a_unit_misses(place: int) -> None:
    """Weights that are cut along their columns are packed on a stream of its own, out of memory of autograd."""
    program = with_call(place)
    weights = tuple(replace(weight, direct=False) for weight in program.weights)
    schedule = planned(replace(program, weights=weights), 1)
    assert_ordered_inside(schedule)
    assert (called_inside(schedule) != schedule) == (place in (4, 5, 6)), str(schedule)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_nothing_relies_on_a_wait_that_a_call_misses(case: Case) -> None:
    assert_ordered_inside(plan(case.program, replace(case.policy, communicators=1), case.traits))


def test_without_a_number_the_backend_decides() -> None:
    program = three_units(SIZES)
    assert plan(program, Policy(), Traits(communicators=1)).policy.communicators == 1
    assert plan(program, Policy(communicators=3), Traits(communicators=1)).policy.communicators == 3
    assert plan(program, Policy()).policy.communicators is None


@pytest.mark.parametrize("communicators", [0, -1, True, 1.5, "1"])
def test_a_number_that_is_not_one_is_refused(communicators: object) -> None:
    with pytest.raises(PolicyError, match="communicators must be an integer >= 1"):
        Policy(communicators=communicators)
