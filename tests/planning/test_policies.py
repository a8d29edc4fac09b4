"""One readable case for each field of `Policy`: what it does to the schedule, and to nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpfunc.planning.checking.checker import check
from hpfunc.planning.ops import Launch
from hpfunc.planning.planner import plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.schedule import Schedule
from tests.planning.programs import layers, stack, three_units, two_backwards, weight

FSDP = {"shard": 4}
HSDP = {"replicate": 2, "shard": 4}


def names(schedule: Schedule, stream: str) -> list[str]:
    """Returns the launches on a stream, without their numbers."""
    return [op.name.split("#")[0] for op in schedule.ops if isinstance(op, Launch) and op.stream == stream]


def slots(schedule: Schedule) -> dict[str, int]:
    """Returns the event before or after which each op is issued."""
    return {op.name: slot.event for slot in schedule.slots for op in slot.ops}


def test_the_names_of_zero() -> None:
    releases = [policy.release for policy in (Policy.zero1(), Policy.zero2(), Policy.zero3(prefetch=2))]
    assert releases == ["never", "backward", "forward"]
    gathers = [
        len(names(plan(layers(6, FSDP), policy), "gather"))
        for policy in (Policy.zero1(), Policy.zero2(), Policy.zero3(prefetch=0))
    ]
    assert gathers == [6, 6, 6 + 5]


def test_never_gathers_once_for_several_backwards() -> None:
    program = two_backwards(HSDP, "shards")
    kept, released = (names(plan(program, policy), "gather") for policy in (Policy.zero1(), Policy.zero3(prefetch=0)))
    assert kept == ["gather block", "gather head"]
    assert len(released) > len(kept)


def test_first_and_last_unit_are_kept() -> None:
    overrides: Any = {"layer0": "backward", "w3": "backward"}  # by the name of a unit, and of a weight
    gathered = names(plan(layers(4, FSDP), Policy(prefetch=0, release_overrides=overrides)), "gather")
    assert sorted(gathered) == [
        "gather layer0",
        "gather layer1",
        "gather layer1",
        *["gather layer2"] * 2,
        "gather layer3",
    ]


def test_of_several_patterns_the_first_counts() -> None:
    overrides: Any = [("layer1", "forward"), ("layer*", "never")]
    gathered = names(plan(layers(3, FSDP), Policy(prefetch=0, release_overrides=overrides)), "gather")
    assert gathered == ["gather layer0", "gather layer1", "gather layer2", "gather layer1"]


def test_a_depth_for_each_direction() -> None:
    schedule = plan(layers(6, FSDP), Policy(prefetch=2, prefetch_backward=0))
    found = slots(schedule)
    assert [found[f"gather layer{index}"] for index in range(6)] == [0, 0, 0, 0, 1, 2]
    # The forward leaves the last three whole; backward gathers a unit just before it is needed.
    assert [found[f"gather layer{index}#2"] for index in (2, 1, 0)] == [9, 10, 11]
    assert check(schedule).max_whole_units == 3


@pytest.mark.parametrize(("budget", "largest"), [(math.inf, 3), (2 * 16384, 2), (16384, 1)])
def test_a_budget_gathers_later(budget: float, largest: int) -> None:
    """Units of 16 KiB."""
    report = check(plan(layers(6, FSDP), Policy(prefetch=2, gather_budget_bytes=budget)))
    assert report.max_whole_units == largest
    assert report.max_whole_bytes == largest * 16384


def test_a_budget_counts_messages_that_are_unpacked() -> None:
    """Two small weights in one message are there twice while they are unpacked: 2 * 2 * 4 KiB."""
    program = stack(*((weight(f"a{k}", 1024, FSDP), weight(f"b{k}", 1024, FSDP)) for k in range(4)))
    for budget, units in ((4 * 4096, 1), (8 * 4096, 2)):
        report = check(plan(program, Policy(prefetch=3, pack_below_bytes=math.inf, gather_budget_bytes=budget)))
        assert report.max_whole_bytes <= budget
        assert report.max_whole_units == units


def test_units_share_an_all_reduce() -> None:
    """Blocks of 4 KiB: the bucket closes when it holds enough."""
    counts = {}
    for bucket in (0, 1, 4096, 4097, 3 * 4096, math.inf):
        schedule = plan(layers(6, HSDP), Policy(reduce_bucket_bytes=bucket))
        check(schedule)
        counts[bucket] = len(names(schedule, "all_reduce"))
        assert len(names(schedule, "reduce_scatter")) == 6
    assert counts == {0: 6, 1: 6, 4096: 6, 4097: 3, 3 * 4096: 2, math.inf: 1}


def test_a_shared_reduce_buffer_is_one_and_filled_in_place() -> None:
    schedule = plan(three_units(HSDP), Policy(reduce_bucket_bytes=math.inf, pack_below_bytes=0))
    (reduce,) = [index for index, buffer in enumerate(schedule.buffers) if buffer.kind == "reduce"]
    scattered = [op for op in schedule.ops if isinstance(op, Launch) and op.stream == "reduce_scatter"]
    assert {region.buffer for op in scattered for region in op.writes} == {reduce}
    assert set(check(schedule).local_bytes) == {"scale", "zero"}


def test_what_nobody_replicates_shares_nothing() -> None:
    """Without an all-reduce a gradient is delivered as soon as it is there."""
    alone, shared = (plan(layers(4, FSDP), Policy(reduce_bucket_bytes=bucket)) for bucket in (0, math.inf))
    assert alone.slots == shared.slots
