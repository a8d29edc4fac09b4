"""The machine on which schedules are tried: that it shows every mistake is what makes it worth having."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpfunc._errors import ScheduleError
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import Outcome, World, cut_blocks, join_blocks, reference
from hpfunc.planning.ops import Deliver
from hpfunc.planning.planner import Traits, plan
from hpfunc.planning.policy import Policy
from hpfunc.planning.program import Weight
from hpfunc.planning.schedule import Schedule
from tests.planning.edits import changed
from tests.planning.mutants import NUM_STEPS, flat, put
from tests.planning.programs import layers, weight

HSDP = {"replicate": 2, "shard": 2}
FSDP = {"shard": 3}


def shows(schedule: Schedule, mesh: dict[str, int], num_timings: int = 20) -> bool:
    """Returns whether some timing shows a wrong result."""
    world = World(schedule.program, mesh)
    wanted = reference(world)
    runs = (interpret(schedule, world, timing, NUM_STEPS) for timing in range(num_timings))
    return any(not all(map(Outcome.agrees, found, wanted * NUM_STEPS)) for found in runs)


BOTH = plan(layers(3, HSDP, 64), Policy(), Traits(ordered_sums=True))


@pytest.mark.parametrize("name", sorted(op.name for op in BOTH.ops if op.waits))
def test_every_missing_wait_shows(name: str) -> None:
    assert not shows(BOTH, HSDP)
    assert shows(changed(BOTH, name, waits=()), HSDP, 50)


def test_a_wait_for_what_comes_later_is_a_deadlock() -> None:
    place = [op.name for _, op in flat(BOTH)].index("gather layer0")
    stuck = put(BOTH, place, replace(flat(BOTH)[place][1], waits=("backward layer0",)))
    with pytest.raises(ScheduleError, match="no stream can go on"):
        interpret(stuck, World(BOTH.program, HSDP))


def test_ranks_that_meet_in_different_collectives_are_told() -> None:
    """A communicator on two streams: which of its collectives comes first is up to the timing."""
    place = [op.name for _, op in flat(BOTH)].index("gather layer1")
    torn = put(BOTH, place, replace(flat(BOTH)[place][1], stream="all_reduce", waits=("begin",)))
    with pytest.raises(ScheduleError, match="ranks meet in"):
        shows(torn, HSDP, 50)


def test_a_gradient_that_is_written_after_its_delivery_shows() -> None:
    early = [(index, op) for index, op in flat(BOTH) if isinstance(op, Deliver)][-1]
    names = [op.name for _, op in flat(BOTH)]
    scale = names.index("scale layer2")
    ops = [other for other in flat(BOTH) if other[1] is not early[1]]
    ops.insert(scale, (early[0], replace(early[1], waits=("all_reduce layer2",))))
    slots = tuple(
        replace(slot, ops=tuple(op for index, op in ops if index == place)) for place, slot in enumerate(BOTH.slots)
    )
    assert shows(replace(BOTH, slots=slots), HSDP)


def test_the_same_timing_is_the_same_run() -> None:
    torn = changed(BOTH, "forward layer0", waits=())
    one, two = (interpret(torn, World(torn.program, HSDP), 3) for _ in range(2))
    assert [outcome.observations.keys() for outcome in one] == [outcome.observations.keys() for outcome in two]
    assert str(one) == str(two)


def test_outcomes_disagree_in_any_element() -> None:
    def outcome(gradient: float, observed: float, key: int = 0) -> Outcome:
        return Outcome({(0, key): [np.array([1.0, gradient])]}, {0: observed})

    assert outcome(2, 3).agrees(outcome(2, 3))
    assert not outcome(2, 3).agrees(outcome(1, 3))
    assert not outcome(2, 3).agrees(outcome(2, 4))
    assert not outcome(2, 3).agrees(outcome(2, 3, key=1))
    assert not outcome(2, np.nan).agrees(outcome(2, np.nan))
    assert not Outcome({(0, 0): [np.ones(1)] * 2}).agrees(Outcome({(0, 0): [np.ones(1)]}))


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_are_cut_and_joined(direct: bool) -> None:
    w: Weight = weight("w", 12, FSDP, direct=direct)
    whole = np.arange(12.0)
    assert np.array_equal(join_blocks(w, cut_blocks(w, whole)), whole)


def test_reference_is_the_mean_over_all_ranks() -> None:
    """By hand: every rank's gradient of the only weight, summed, cut, and divided by four."""
    program = layers(1, HSDP, 8)
    world = World(program, HSDP, seed=5)
    wholes = [np.concatenate([world.shard(0, rank) for rank in (0, 1)])]
    total = sum(world.gradient(rank, 1, 0, wholes) for rank in range(4)) / 4
    found = [outcome.gradients[0, 0][0] for outcome in reference(world)]
    assert [block.tolist() for block in found] == [half.tolist() for half in [*np.split(total, 2)] * 2]


def test_replicas_have_equal_shards_and_others_do_not() -> None:
    world = World(layers(1, HSDP, 64), HSDP)
    shards = [world.shard(0, rank).tolist() for rank in range(4)]
    assert shards[0] == shards[2] != shards[1] == shards[3]
    assert [world.group(("shard",), rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
