"""What users of other libraries report, as laws of the plan."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace

import pytest

from hpfunc.planning.checking.checker import check
from hpfunc.planning.ops import ALIGN_BYTES, Deliver, Free, Launch, Local
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy, Release
from hpfunc.planning.program import Event, Program, Unit
from hpfunc.planning.schedule import Schedule
from tests.planning.programs import STEP, layers, stack, three_units, weight

FSDP = {"shard": 4}
HSDP = {"replicate": 2, "shard": 2}


def launched(schedule: Schedule, purpose: str) -> list[Launch]:
    """Returns the launches over communicators of one purpose."""
    launches = (op for op in schedule.ops if isinstance(op, Launch))
    return [op for op in launches if op.communicator.purpose == purpose]


def gathers(schedule: Schedule) -> int:
    return len(launched(schedule, "gather"))


# ------------------------------------------------------------------------------------------ theme 2: memory and depth


@pytest.mark.parametrize("traits", [Traits(), Traits(ordered_sums=True)])
@pytest.mark.parametrize("mesh", [FSDP, HSDP, {"replicate": 3, "shard": 2}])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_peak_grows_with_depth_by_the_gradients_alone(mesh: dict[str, int], traits: Traits, prefetch: int) -> None:
    few, many = 8, 24
    numel = 6 * 4096
    policy = Policy(prefetch=prefetch)
    peaks = [check(plan(layers(count, mesh, numel), policy, traits)).peak_bytes for count in (few, many)]
    block_bytes = -(-4 * numel // mesh["shard"] // ALIGN_BYTES) * ALIGN_BYTES
    assert peaks[1] - peaks[0] == (many - few) * block_bytes


def test_releasing_never_costs_the_whole_model() -> None:
    program = layers(8, FSDP)
    peaks = [check(plan(program, Policy(release=release))).peak_bytes for release in ("forward", "backward", "never")]
    assert peaks[0] < peaks[1] < peaks[2]


# ------------------------------------------------------------------------------------------ theme 3: accumulated sums


def test_one_all_reduce_for_each_reduce_buffer() -> None:
    schedule = plan(layers(5, HSDP), Policy())
    reduce_buffers = [index for index, buffer in enumerate(schedule.buffers) if buffer.kind == "reduce"]
    reduced = Counter(region.buffer for op in launched(schedule, "all_reduce") for region in op.writes)
    assert reduced == Counter(reduce_buffers)


def test_a_tied_weight_is_reduced_once_after_its_last_use() -> None:
    weights = (weight("tied", 64, HSDP), weight("own", 64, HSDP))
    units = (Unit("embed", (0,)), Unit("block", (1,)), Unit("head", (0,)))
    events = [Event("forward", unit) for unit in (0, 1, 2)] + [Event("backward", unit) for unit in (2, 1, 0)]
    schedule = plan(Program(weights, units, (*events, *STEP)), Policy())
    check(schedule)
    assert [op.name for op in launched(schedule, "reduce_scatter")] == ["reduce_scatter block", "reduce_scatter embed"]
    assert [op.name for op in schedule.ops if isinstance(op, Local) and op.kind == "accumulate"] == ["accumulate tied"]


def test_gradients_are_divided_once_and_float16_before_the_sum() -> None:
    for dtype, kind in (("float32", "scale"), ("bfloat16", "scale"), ("float16", "pack_gradients")):
        schedule = plan(stack((weight("w", 64, HSDP, reduce_dtype=dtype),)), Policy())
        check(schedule)
        assert [op.kind for op in schedule.ops if isinstance(op, Local) and op.divisor != 1] == [kind]


# --------------------------------------------------------------------------------------------- theme 6: exact gathers


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7, 50])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 9])
def test_gathers_of_a_step(num_layers: int, prefetch: int) -> None:
    """Forward gathers every unit, backward all but the last prefetch + 1, which are whole already."""
    counts: dict[Release, int] = {
        "forward": num_layers + max(0, num_layers - prefetch - 1),
        "backward": num_layers,
        "never": num_layers,
    }
    for release, wanted in counts.items():
        schedule = plan(layers(num_layers, FSDP), Policy(prefetch=prefetch, release=release))
        report = check(schedule)
        assert gathers(schedule) == wanted
        if release == "forward":
            assert report.max_whole_units == min(num_layers, prefetch + 1)


def checkpointed(*chunks: tuple[int, ...]) -> Program:
    """Returns a step through layers whose backward recomputes them chunk by chunk."""
    program = layers(sum(map(len, chunks)), FSDP)
    forward = [Event("forward", unit) for chunk in chunks for unit in chunk]
    backward: list[Event] = []
    for chunk in reversed(chunks):
        backward += [Event("recompute", unit) for unit in chunk]
        backward += [Event("backward", unit) for unit in reversed(chunk)]
    return replace(program, events=(*forward, *backward, *STEP))


@pytest.mark.parametrize(
    ("prefetch", "chunks", "wanted"),
    [
        (0, ((0,), (1,), (2,)), 5),  # around one block: one gather serves recompute and backward
        (1, ((0,), (1,), (2,)), 4),
        (0, ((0, 1), (2, 3)), 10),  # around two: the first of a chunk is whole twice in backward
        (1, ((0, 1), (2, 3)), 6),
        (3, ((0, 1), (2, 3)), 4),
    ],
)
def test_gathers_with_recomputation(prefetch: int, chunks: tuple[tuple[int, ...], ...], wanted: int) -> None:
    schedule = plan(checkpointed(*chunks), Policy(prefetch=prefetch))
    check(schedule)
    assert gathers(schedule) == wanted


def test_a_gather_is_issued_prefetch_units_ahead() -> None:
    schedule = plan(layers(6, FSDP), Policy(prefetch=2))
    slots = {op.name: slot.event for slot in schedule.slots for op in slot.ops}
    assert [slots[f"gather layer{index}"] for index in range(6)] == [0, 0, 0, 0, 1, 2]


def test_what_the_step_makes_is_not_gathered_before_its_unit_is_called() -> None:
    units = ((weight("a", 64, FSDP),), (weight("made", 64, FSDP, origin=None),), (weight("c", 64, FSDP),))
    schedule = plan(stack(*units), Policy(prefetch=2))
    check(schedule)
    slots = {op.name: slot.event for slot in schedule.slots for op in slot.ops}
    assert [slots[f"gather layer{index}"] for index in range(3)] == [0, 1, 0]


# --------------------------------------------------------------------------------------------- the order of the steps


def kinds_after(schedule: Schedule, event: int) -> list[str]:
    """Returns what is issued after an event, without repetitions."""
    found: list[str] = []
    for op in next(slot.ops for slot in schedule.slots if (slot.event, slot.when) == (event, "after")):
        kind = schedule.buffers[op.buffer].kind if isinstance(op, Free) else ""
        name = f"free {kind}" if kind else op.name.split()[0]
        found += [name] if name not in found else []
    return found


def test_the_four_steps_come_in_order() -> None:
    assert kinds_after(plan(layers(4, FSDP), Policy()), 5) == [
        "free whole",
        "gather",
        "reduce_scatter",
        "free gradient",
        "scale",
        "deliver",
    ]
    ordered = plan(layers(4, HSDP), Policy(), Traits(ordered_sums=True))
    assert kinds_after(ordered, 5) == [
        "free whole",
        "gather",
        "reduce_scatter",
        "sum",
        "free gradient",
        "free staging",
        "all_reduce",
    ]


def test_an_ordered_all_reduce_over_three_replicas_goes_on_one_unit_later() -> None:
    schedule = plan(layers(4, {"replicate": 3, "shard": 2}), Policy(), Traits(ordered_sums=True))
    slots = {op.name: (slot.event, slot.when) for slot in schedule.slots for op in slot.ops}
    assert slots["all_reduce layer3"] == (5, "after")
    assert slots["sum all layer3"] == slots["collect layer3"] == slots["all_reduce layer2"] == (6, "after")
    names = [op.name for op in schedule.ops]
    assert names.index("collect layer3") < names.index("all_reduce layer2")


def test_gradients_arrive_in_the_order_of_the_weights_at_the_end() -> None:
    delivered = [op.weight for op in plan(layers(5, HSDP), Policy()).ops if isinstance(op, Deliver)]
    assert delivered == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------------------------- theme 8, 11 and 17: copies


def test_frozen_weights_have_no_gradient_buffers() -> None:
    frozen = plan(layers(4, FSDP, trainable=False), Policy())
    assert {buffer.kind for buffer in frozen.buffers} == {"shard", "whole"}


@pytest.mark.parametrize("mesh", [FSDP, HSDP])
def test_evenly_cut_big_weights_are_never_copied(mesh: dict[str, int]) -> None:
    report = check(plan(layers(4, mesh, 1 << 20), Policy()))
    assert set(report.local_bytes) == {"scale"}


def test_small_weights_of_a_unit_share_one_message() -> None:
    biases = tuple(weight(f"b{index}", 64, FSDP) for index in range(3))
    schedule = plan(stack((weight("w", 1 << 20, FSDP), *biases)), Policy())
    check(schedule)
    assert [len(op.reads) for op in launched(schedule, "gather")] == [2]
    assert [len(op.reads) for op in launched(schedule, "reduce_scatter")] == [2]
    alone = plan(stack((weight("w", 1 << 20, FSDP), *biases)), Policy(pack_below_bytes=0))
    assert [len(op.reads) for op in launched(alone, "gather")] == [4]


def test_slices_of_a_reduce_buffer_are_aligned() -> None:
    mesh = {"replicate": 3, "shard": 2}
    schedule = plan(stack(tuple(weight(f"w{index}", 30, mesh) for index in range(3))), Policy(pack_below_bytes=0))
    check(schedule)
    slices = [region for op in schedule.ops if isinstance(op, Deliver) for region in (op.region,)]
    assert all(region.start * 4 % ALIGN_BYTES == 0 for region in slices)
    assert all(buffer.numel % (3 * 128) == 0 for buffer in schedule.buffers if buffer.kind == "reduce")


def test_one_rank_moves_nothing_but_takes_over_what_autograd_lends() -> None:
    program = layers(3, {"replicate": 1, "shard": 1})
    report = check(plan(program, Policy()))
    size_bytes = sum(4 * w.whole_numel for w in program.weights)
    assert (report.launches, report.local_bytes, report.sent_bytes) == ({}, {"own": size_bytes}, {})


def test_ordered_sums_send_no_more_than_native_ones() -> None:
    program = layers(4, {"replicate": 4, "shard": 2}, 1 << 14)
    native, ordered = (check(plan(program, Policy(), Traits(ordered_sums=kind))).sent_bytes for kind in (False, True))
    assert sum(native.values()) == sum(ordered.values())


def test_every_policy_delivers_each_gradient_once_and_sends_the_same_bytes_but_for_repeated_gathers() -> None:
    sent: dict[int, set[tuple[int, ...]]] = {}
    for prefetch in (0, 1, 3):
        for pack in (0, 4096, math.inf):
            schedule = plan(three_units(HSDP), Policy(prefetch=prefetch, pack_below_bytes=pack))
            report = check(schedule)
            assert sorted(op.weight for op in schedule.ops if isinstance(op, Deliver)) == list(range(6))
            kinds = ("all_gather", "reduce_scatter", "all_reduce")
            sent.setdefault(prefetch, set()).add(tuple(report.sent_bytes[kind] for kind in kinds))
    assert [len(each) for each in sent.values()] == [1, 1, 1]
    (most, *reduced), (some, *others), (once, *rest) = (each.pop() for each in sent.values())
    assert most > some > once
    assert reduced == others == rest


def calls_of_planning(num_units: int) -> int:
    """Returns how many functions are called to plan and check a model: what its time is made of."""
    program = stack(*(tuple(weight(f"{index}.{name}", 4096, HSDP) for name in "abcd") for index in range(num_units)))
    count, before = 0, sys.getprofile()

    def see(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        check(plan(program, Policy(prefetch=2), Traits(ordered_sums=True)))
    finally:
        sys.setprofile(before)
    return count


def test_the_work_of_planning_and_checking_grows_with_the_number_of_units() -> None:
    assert calls_of_planning(32) < 4.5 * calls_of_planning(8)  # 4.2; were it the square, 16
