"""The judge itself: it sees planted faults, accepts what is planned, and leaves out nothing that matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.ops import Communicator, Free, Launch, Local
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.schedule import Schedule
from tests.judge.explore import Verdict, judge
from tests.judge.inputs import mutated, small_case
from tests.judge.works import Rules
from tests.judge.world import World
from tests.planning.edits import changed, named, place_of
from tests.planning.mutants import flat, rebuilt
from tests.planning.programs import layers

HSDP = {"replicate": 2, "shard": 2}
FSDP = {"shard": 2}
RULES = Rules()

THREE = plan(layers(3, FSDP, 8), Policy(pack_below_bytes=0), Traits())
BOTH = plan(layers(2, HSDP, 8), Policy(), Traits(ordered_sums=True))


def moved(schedule: Schedule, name: str, before: str) -> Schedule:
    """Returns the schedule with an op before another one; it waits for what is issued by then."""
    ops = flat(schedule)
    _, op = ops.pop(place_of(schedule, name))
    target = next(place for place, (_, other) in enumerate(ops) if other.name == before)
    issued = {other.name for _, other in ops[:target]}
    ops.insert(target, (ops[target][0], replace(op, waits=tuple(wait for wait in op.waits if wait in issued))))
    return rebuilt(schedule, ops)


def swapped(schedule: Schedule, one: str, two: str) -> Schedule:
    """Returns the schedule with two ops in each other's place."""
    ops = flat(schedule)
    a, b = place_of(schedule, one), place_of(schedule, two)
    ops[a], ops[b] = (ops[a][0], ops[b][1]), (ops[b][0], ops[a][1])
    return rebuilt(schedule, ops)


# -------------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("harsher", [{}, {"pressure": True}])
def test_planned_schedules_are_right(harsher: dict[str, bool]) -> None:
    """Also in the harsher worlds by which differences are explained."""
    for seed in range(60):
        case = small_case(Random(seed))
        world = World(case.program, case.mesh_sizes, neutral=not harsher)
        verdict = judge(plan(case.program, case.policy, case.traits), case.mesh_sizes, replace(RULES, **harsher), world)
        assert verdict.is_right, f"seed {seed}: {verdict}"


def test_no_interleaving_of_a_planned_schedule_can_be_told_from_another() -> None:
    assert judge(BOTH, HSDP, RULES).num_states == 0


# -------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("name", sorted(op.name for op in BOTH.ops if op.waits and not isinstance(op, Free)))
def test_every_missing_wait_shows(name: str) -> None:
    verdict = judge(changed(BOTH, name, waits=()), HSDP, RULES)
    assert verdict.is_right is False
    assert verdict.kind == "timing"


@pytest.mark.parametrize("name", sorted(op.name for op in BOTH.ops if op.waits and isinstance(op, Free)))
def test_every_early_free_shows_if_somebody_takes_the_memory(name: str) -> None:
    early = changed(BOTH, name, waits=())
    assert judge(early, HSDP, replace(RULES, pressure=True)).is_right is False


FAULTS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "freed before its last use": (lambda: moved(THREE, "free whole w1", "backward layer1"), "given back"),
    "freed twice": (
        lambda: rebuilt(
            THREE, [*flat(THREE), (len(THREE.slots) - 1, replace(named(THREE, "free whole w0"), name="again"))]
        ),
        "given back",
    ),
    "never freed": (lambda: rebuilt(THREE, [pair for pair in flat(THREE) if pair[1].name != "free whole w0"]), "never"),
    "never delivered": (
        lambda: rebuilt(THREE, [pair for pair in flat(THREE) if pair[1].name != "deliver w0"]),
        "w0|never",
    ),
    "not scaled": (
        lambda: rebuilt(THREE, [pair for pair in flat(THREE) if pair[1].name != "scale layer2"]),
        "gradient",
    ),
    "scaled by another number": (lambda: changed(THREE, "scale layer2", divisor=4), "gradient"),
    "written after its delivery": (lambda: moved(THREE, "deliver w2", "scale layer2"), "gradient"),
    "writes the caller's": (
        lambda: changed(THREE, "gather layer0", writes=named(THREE, "gather layer1").reads),
        "caller's",
    ),
    "waits for what comes later": (lambda: changed(THREE, "gather layer0", waits=("backward layer0",)), "not issued"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault: str) -> None:
    make, reason = FAULTS[fault]
    verdict = judge(make(), FSDP, RULES)
    assert verdict.is_right is False
    assert any(word in verdict.reason for word in reason.split("|")), verdict


def test_launches_in_another_order_on_one_rank_meet_the_wrong_ones() -> None:
    torn = swapped(THREE, "reduce_scatter layer1", "reduce_scatter layer0")
    assert judge([THREE, torn], FSDP, RULES).is_right is False
    other = layers(3, FSDP, 8)
    program = replace(other, weights=(*other.weights[:2], replace(other.weights[2], block_numel=5)))
    valid = plan(program, Policy(pack_below_bytes=0, prefetch=2), Traits())
    ranks = [valid, swapped(valid, "gather layer1", "gather layer2")]
    assert judge([valid, valid], FSDP, RULES).is_right
    assert "ranks meet in" in judge(ranks, FSDP, RULES).reason


def test_ranks_that_wait_for_each_other_are_stuck() -> None:
    """One rank launches b behind a, the other one a behind b, over two communicators."""
    valid = plan(layers(2, FSDP, 8), Policy(pack_below_bytes=0), Traits())
    other = Communicator("all_reduce", ("shard",))
    fields = {"stream": "all_reduce", "communicator": other}
    one = changed(valid, "gather layer1", **fields, waits=("gather layer0",))
    two = changed(swapped(valid, "gather layer0", "gather layer1"), "gather layer1", **fields)
    two = changed(two, "gather layer0", waits=("gather layer1",))
    assert judge([one, one], FSDP, replace(RULES, max_states=20)).kind != "deadlock"
    assert judge([one, two], FSDP, RULES).kind == "deadlock"


def test_a_launch_that_a_rank_leaves_out_is_a_deadlock() -> None:
    less = rebuilt(THREE, [pair for pair in flat(THREE) if pair[1].name != "reduce_scatter layer0"])
    lonely = [op for op in less.ops if isinstance(op, Launch)]
    assert len(lonely) == len([op for op in THREE.ops if isinstance(op, Launch)]) - 1
    assert judge([THREE, less], FSDP, RULES).is_right is False


# ------------------------------------------------------------------------------- the caller, and what is borrowed


def both_reject(schedule: Schedule) -> Verdict:
    assert find_violations(schedule)
    verdict = judge(schedule, FSDP, RULES)
    assert verdict.is_right is False
    return verdict


def test_a_first_gather_that_does_not_wait_for_the_caller_is_rejected_by_both() -> None:
    """It would send what the optimizer of the step before has not written yet."""
    assert "reads" in both_reject(changed(THREE, "gather layer0", waits=())).reason
    assert not judge(changed(THREE, "gather layer0", waits=()), FSDP, RULES).is_right
    assert judge(changed(THREE, "gather layer0", waits=()), FSDP, replace(RULES, beginnings=False)).is_right


def test_a_gradient_out_of_the_memory_of_a_side_stream_is_rejected_by_both() -> None:
    """The caller drops it with its reads still queued, and the next sum of parts is written there."""
    valid = plan(layers(3, FSDP, 8), Policy(pack_below_bytes=0), Traits(ordered_sums=True))
    buffers = (replace(b, stream="all_reduce") if b.kind == "reduce" else b for b in valid.buffers)
    aside = changed(replace(valid, buffers=tuple(buffers)), "sum layer1", waits=("reduce_scatter layer1",))
    assert both_reject(aside).kind == "timing"
    assert any("the caller drops it unseen" in violation.text for violation in find_violations(aside))


def test_a_shard_that_is_read_beyond_the_end_of_the_step_is_rejected_by_both() -> None:
    """The caller overwrites it then, for all that the last op of the step says."""
    late = plan(layers(1, FSDP, 8), Policy(pack_below_bytes=0), Traits())
    gather = named(late, "gather layer0")
    again = replace(late.buffers[gather.writes[0].buffer], name="whole again")
    region = gather.writes[0]._replace(buffer=len(late.buffers))
    last = len(late.slots) - 1
    ops = flat(late)
    more = [
        (last, replace(gather, name="gather again", writes=(region,), waits=())),
        (last, Free("free again", region.buffer, "gather")),
    ]
    end = len(ops) - 1
    early = rebuilt(replace(late, buffers=(*late.buffers, again)), [*ops[:end], *more, *ops[end:]])
    assert both_reject(early).kind == "timing"
    waiting = changed(early, "end", waits=("gather again",))
    assert not find_violations(waiting)
    assert judge(waiting, FSDP, RULES).is_right


def test_an_op_that_writes_into_a_borrowed_gradient_is_rejected_by_both() -> None:
    gradient = named(THREE, "backward layer2").writes
    scaled = Local("scale gradient", "scale", "compute", gradient, gradient, divisor=1)
    ops = flat(THREE)
    place = place_of(THREE, "reduce_scatter layer2")
    both_reject(rebuilt(THREE, [*ops[:place], (ops[place][0], scaled), *ops[place:]], waits=True))


def test_a_padded_shard_that_is_sent_as_it_is_is_rejected_by_both() -> None:
    """One rank has fewer elements than the others."""
    valid = plan(layers(2, FSDP, 7, even=False), Policy(pack_below_bytes=0), Traits())
    both_reject(changed(valid, "gather layer0", reads=named(valid, "pack w0").reads))


# --------------------------------------------------------------------------------------------- what is left out


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"shard": 2}, {"replicate": 2}], ids=["shards", "replicas"])
def test_leaving_out_interleavings_changes_no_verdict(mesh: dict[str, int]) -> None:
    """Against a search that tries every action of one rank wherever it can be done: one unit, one step."""
    program = layers(1, mesh, 2, cut=tuple(axis for axis in mesh if axis == "shard"))
    world, all_of_them = World(program, mesh), replace(RULES, num_steps=1, all_of=(0,), max_states=30_000)
    verdicts: set[bool | None] = set()
    for ordered in (False, True):
        valid = plan(program, Policy(), Traits(ordered_sums=ordered))
        waits = [changed(valid, op.name, waits=()) for op in valid.ops if op.waits]
        mutants = [found[1] for seed in range(8) if (found := mutated(Random(seed), valid))]
        for schedule in [valid, *waits, *mutants]:
            few = judge(schedule, mesh, replace(RULES, num_steps=1), world)
            every = judge(schedule, mesh, all_of_them, world)
            assert every.is_right is not None, "too many states"
            assert few.is_right == every.is_right, f"{few}, {every}"
            verdicts.add(every.is_right)
    assert verdicts == {True, False}


def test_beyond_its_budget_the_judge_says_so() -> None:
    verdict = judge(BOTH, HSDP, replace(RULES, all_of=(0, 1, 2, 3), max_states=10))
    assert verdict.is_right is None
    assert verdict.num_states == 11
