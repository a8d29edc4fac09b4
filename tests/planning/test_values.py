"""Policies, programs and the small functions of schedules."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from hpfunc._errors import PolicyError
from hpfunc.planning.ops import (
    Buffer,
    Caller,
    Communicator,
    Compute,
    Deliver,
    Free,
    Launch,
    Local,
    Op,
    Region,
    itemsize,
)
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.program import Event, Program, Unit
from tests.planning.programs import layers, three_units, weight

FSDP = {"shard": 4}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prefetch": -1}, "hpfunc.Policy: prefetch must be an integer >= 0, got -1"),
        ({"prefetch": True}, "hpfunc.Policy: prefetch must be an integer >= 0, got True"),
        ({"prefetch": 1.5}, "hpfunc.Policy: prefetch must be an integer >= 0, got 1.5"),
        ({"release": "late"}, "hpfunc.Policy: release must be 'forward', 'backward' or 'never', got 'late'"),
        ({"pack_below_bytes": -1}, "hpfunc.Policy: pack_below_bytes must be a number >= 0, got -1"),
        ({"pack_below_bytes": math.nan}, "hpfunc.Policy: pack_below_bytes must be a number >= 0, got nan"),
        ({"pack_below_bytes": "all"}, "hpfunc.Policy: pack_below_bytes must be a number >= 0, got 'all'"),
        ({"pack_below_bytes": True}, "hpfunc.Policy: pack_below_bytes must be a number >= 0, got True"),
    ],
)
def test_a_policy_refuses_what_is_out_of_range(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**fields)
    assert str(caught.value).splitlines()[0] == text


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Policy().prefetch = 2  # pyright: ignore[reportAttributeAccessIssue] - it is refused
    with pytest.raises(AttributeError):
        Region(0, 0, 1).start = 1  # pyright: ignore[reportAttributeAccessIssue] - it is refused


def test_equal_programs_have_equal_fingerprints_and_plans() -> None:
    one, two = three_units(FSDP), three_units(FSDP)
    assert one.fingerprint == two.fingerprint
    assert plan(one, Policy()) == plan(two, Policy())
    other = replace(one, events=(*one.events[:-1], Event("collective", name="psum"), one.events[-1]))
    assert other.fingerprint != one.fingerprint


def test_programs_describe_their_events() -> None:
    program = Program((), (Unit("block", ()),), (Event("forward", 0, 2), Event("collective", name="psum")))
    assert [program.describe(event) for event in program.events] == ["forward block#2", "collective psum"]
    assert str(program).splitlines() == [
        "program of 1 units, 0 weights, 2 events",
        "    0 forward block#2",
        "    1 collective psum",
    ]


def test_traits_and_policy_change_the_fingerprint_of_a_schedule() -> None:
    program = layers(2, FSDP)
    plans = [plan(program, Policy(prefetch=depth), Traits(ordered)) for depth in (0, 1) for ordered in (False, True)]
    assert len({schedule.fingerprint for schedule in plans}) == 4


def test_regions_overlap_in_one_buffer_only() -> None:
    assert Region(0, 0, 4).overlaps(Region(0, 3, 5))
    assert not Region(0, 0, 4).overlaps(Region(0, 4, 5))
    assert not Region(0, 0, 4).overlaps(Region(1, 0, 4))
    assert Region(0, 2, 5).numel == 3


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("int8", 1), ("bool", 1), ("float8_e5m2", 1)],
)
def test_a_dtype_has_its_size_and_so_has_a_buffer(dtype: str, size: int) -> None:
    assert itemsize(dtype) == size
    assert Buffer("b", "send", 3, dtype, "gather").size_bytes == 3 * size


def test_communicators_say_what_they_are_for() -> None:
    assert str(Communicator("all_reduce", ("replicate", "context"))) == "all_reduce@replicate*context"


def test_equal_names_are_told_apart() -> None:
    program = Program(
        (weight("w", 8, FSDP), weight("w", 8, FSDP)),
        (Unit("block", (0,)), Unit("block", (1,))),
        (Event("forward", 0), Event("forward", 1), Event("end_step")),
    )
    names = [op.name for op in plan(program, Policy()).ops]
    assert len(set(names)) == len(names)
    assert "gather block[1]" in names


def test_every_op_declares_what_it_touches() -> None:
    whole, part = Region(0, 0, 4), Region(0, 1, 2)
    group = Communicator("gather", ("shard",))
    ops: list[Op] = [
        Compute("compute", 0, (part,), (whole,)),
        Launch("launch", "all_gather", group, "gather", (part,), (whole,)),
        Local("local", "copy", "gather", (part,), (whole,)),
    ]
    assert {(op.reads, op.writes, op.waits) for op in ops} == {((part,), (whole,), ())}
    given: list[Op] = [Caller("caller", (part,)), Deliver("deliver", 0, part)]
    assert {(op.reads, op.writes, op.stream) for op in given} == {((), (part,), "compute")}
    free = Free("free", 0, "gather")
    assert free.reads == ()
    assert all(free.writes[0].overlaps(region) for region in (whole, part, Region(0, 0, 0), Region(0, 4, 4)))
    assert not free.writes[0].overlaps(Region(1, 0, 4))
