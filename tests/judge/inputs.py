"""Small programs to plan, mutate and judge: two to four units on few ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

from hpfunc.planning.ops import Launch, Local
from hpfunc.planning.planner import Traits
from hpfunc.planning.policy import Policy, Release
from hpfunc.planning.program import Event, Program, Unit, Weight
from hpfunc.planning.schedule import Schedule
from tests.planning.mutants import MUTATIONS, flat, put, rebuilt
from tests.planning.programs import AXES, Case, random_calls, random_weight

MESHES = ((1, 2), (1, 2), (2, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 1))
"""Replicas and shards: mostly two ranks."""


def small_case(rng: Random) -> Case:
    """Returns a case with two to four units."""
    mesh_sizes = dict(zip(AXES, rng.choice(MESHES), strict=True))
    release: Release = rng.choice(["forward", "forward", "backward", "never"])
    policy = Policy(
        rng.choice([0, 1, 1, 2]),
        release,
        rng.choice([0, 64, math.inf]),
        prefetch_backward=rng.choice([None, None, 0, 2]),
        reduce_bucket_bytes=rng.choice([0, 0, 100, math.inf]),
    )
    return Case(small_program(rng, mesh_sizes), mesh_sizes, policy, Traits(ordered_sums=rng.random() < 0.5))


def small_program(rng: Random, mesh_sizes: dict[str, int]) -> Program:
    """Returns a program of one backward, or of two whose gradient is one."""
    usual = rng.random() < 0.5
    weights: list[Weight] = []
    units: list[Unit] = []
    for index in range(rng.choice([2, 2, 3, 4])):
        members: list[int] = []
        for _ in range(rng.choice([1, 1, 1, 2])):
            if weights and rng.random() < 0.1:
                members.append(rng.randrange(len(weights)))
            else:
                weights.append(random_weight(rng, f"w{len(weights)}", mesh_sizes, usual))
                members.append(len(weights) - 1)
        units.append(Unit(f"layer{index}", tuple(members)))
    return Program(tuple(weights), tuple(units), tuple(small_events(rng, len(units))))


def small_events(rng: Random, num_units: int) -> list[Event]:
    """Returns the events of a step: forward and back, now and then twice, with recomputes or repeated units."""
    uses: Counter[int] = Counter()
    events: list[Event] = []
    carries = [rng.choice(["", "shards", "wholes"])] if num_units < 4 and rng.random() < 0.3 else []
    for carry in [*carries, ""]:
        calls = random_calls(rng, num_units, uses)[:4]
        events += [Event("forward", *call) for call in calls]
        for call in reversed(calls):
            events += [Event("recompute", *call)] if rng.random() < 0.1 else []
            events.append(Event("backward", *call))
        events.append(Event("end_backward", carry=carry))
    return [*events, Event("end_step")]


def mutated(rng: Random, valid: Schedule) -> tuple[str, Schedule] | None:
    """Returns a schedule with one mistake, or now and then two, and which; None if it cannot be made."""
    mutation = rng.choice((*MUTATIONS, skip_packing, split_scale, scale_elsewhere))
    mutant = mutation(rng, valid)
    if mutant and rng.random() < 0.1:
        mutant = rng.choice(MUTATIONS)(rng, mutant)
    return (mutation.__name__, mutant) if mutant and mutant != valid else None


# ------------------------------------------------------------------------------------- mistakes in numbers, not in time


def skip_packing(rng: Random, schedule: Schedule) -> Schedule | None:
    """Sends, or takes, what was to be packed, cast or copied first."""
    made = {op.writes: op for op in schedule.ops if isinstance(op, Local) and len(op.reads) == len(op.writes) == 1}
    found = [
        (place, op, index)
        for place, (_, op) in enumerate(flat(schedule))
        if isinstance(op, (Launch, Local))
        for index, region in enumerate(op.reads)
        if (region,) in made
    ]
    if not found:
        return None
    place, op, index = rng.choice(found)
    source = made[op.reads[index],].reads[0]
    if source.numel != op.reads[index].numel or op.reads == op.writes:
        return None
    reads = (*op.reads[:index], source, *op.reads[index + 1 :])
    return put(schedule, place, replace(op, reads=reads), waits=rng.random() < 0.7)


def split_scale(rng: Random, schedule: Schedule) -> Schedule | None:
    """Divides twice, by numbers whose product is the divisor: each division rounds."""
    ops = flat(schedule)
    found = [
        (p, op) for p, (_, op) in enumerate(ops) if isinstance(op, Local) and op.kind == "scale" and op.divisor > 3
    ]
    if not found:
        return None
    place, op = rng.choice(found)
    factor = next((n for n in (2, 3) if op.divisor % n == 0), op.divisor)
    slot = ops[place][0]
    second = replace(op, name=f"{op.name} again", divisor=op.divisor // factor, waits=())
    ops[place : place + 1] = [(slot, replace(op, divisor=factor)), (slot, second)]
    return rebuilt(schedule, ops)


def scale_elsewhere(rng: Random, schedule: Schedule) -> Schedule | None:
    """Divides in another place: before or after a cast, or what an all-reduce is still to sum up."""
    ops = flat(schedule)
    scales = [place for place, (_, op) in enumerate(ops) if isinstance(op, Local) and op.kind == "scale"]
    if not scales:
        return None
    _, scale = ops.pop(rng.choice(scales))
    assert isinstance(scale, Local)
    others = [
        (place, op)
        for place, (_, op) in enumerate(ops)
        if isinstance(op, (Launch, Local))
        and any(region.overlaps(own) for region in (*op.reads, *op.writes) for own in scale.writes)
    ]
    if not others:
        return None
    place, other = rng.choice(others)
    regions = other.writes if isinstance(other, Local) and other.kind == "copy" else scale.writes
    moved = replace(scale, reads=regions, writes=regions, stream=other.stream, waits=())
    ops.insert(place + rng.choice([0, 1, 1]), (ops[place][0], moved))
    return rebuilt(schedule, ops, waits=True)
