"""Schedules with one mistake: how many of those that compute something wrong does the checker let pass?

Run it for more than the tests do: ``python -m tests.planning.mutants --count 10000``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from hpfunc._errors import ScheduleError
from hpfunc.planning.builder import derive_waits
from hpfunc.planning.checking.checker import find_violations
from hpfunc.planning.checking.interpreter import interpret
from hpfunc.planning.checking.reference import Outcome, World, reference
from hpfunc.planning.ops import Buffer, Caller, Communicator, Compute, Deliver, Free, Launch, Local, Op, Region, Slot
from hpfunc.planning.planner import plan
from hpfunc.planning.schedule import Schedule
from tests.planning.programs import Case, random_case

Mutation = Callable[[Random, Schedule], Schedule | None]
NUM_STEPS = 2  # what a step leaves behind shows in the next one
STREAMS = ("compute", "gather", "reduce_scatter", "all_reduce")


# --------------------------------------------------------------------------------------------------- a schedule, flat


def flat(schedule: Schedule) -> list[tuple[int, Op]]:
    """Returns every op with the index of its slot."""
    return [(index, op) for index, slot in enumerate(schedule.slots) for op in slot.ops]


def rebuilt(schedule: Schedule, ops: Iterable[tuple[int, Op]], *, waits: bool = False) -> Schedule:
    """Returns the schedule with other ops; with the waits that their order needs if `waits`, else with their own."""
    ops = list(ops)
    by_slot: dict[int, list[Op]] = {index: [] for index in range(len(schedule.slots))}
    for index, op in ops:
        by_slot[index].append(op)
    slots = tuple(Slot(slot.event, slot.when, tuple(by_slot[index])) for index, slot in enumerate(schedule.slots))
    return replace(schedule, slots=derive_waits(slots, schedule.buffers) if waits else slots)


def pick(rng: Random, schedule: Schedule, *kinds: type[Op]) -> tuple[int, Op] | None:
    """Returns the place of an op among `flat`, and the op."""
    found = [(place, op) for place, (_, op) in enumerate(flat(schedule)) if isinstance(op, kinds or Op)]
    return rng.choice(found) if found else None


def put(schedule: Schedule, place: int, op: Op, *, waits: bool = False) -> Schedule:
    """Returns the schedule with another op at a place of `flat`."""
    ops = flat(schedule)
    ops[place] = (ops[place][0], op)
    return rebuilt(schedule, ops, waits=waits)


# ----------------------------------------------------------------------------------------------------------- mistakes


def drop_wait(rng: Random, schedule: Schedule) -> Schedule | None:
    waiting = [(place, op) for place, (_, op) in enumerate(flat(schedule)) if op.waits]
    if not waiting:
        return None
    place, op = rng.choice(waiting)
    kept = list(op.waits)
    kept.pop(rng.randrange(len(kept)))
    return put(schedule, place, replace(op, waits=tuple(kept)))


def drop_op(rng: Random, schedule: Schedule) -> Schedule | None:
    ops = flat(schedule)
    place = rng.randrange(len(ops))
    name = ops.pop(place)[1].name
    return rebuilt(schedule, [(index, without_wait(op, name)) for index, op in ops], waits=rng.random() < 0.5)


def without_wait(op: Op, name: str) -> Op:
    return replace(op, waits=tuple(other for other in op.waits if other != name))


def move_op(rng: Random, schedule: Schedule) -> Schedule | None:
    ops = flat(schedule)
    place = rng.randrange(len(ops))
    target = max(0, min(len(ops) - 1, place + rng.choice([-1, 1]) * rng.choice([1, 2, 3, 5, 8])))
    _, op = ops.pop(place)
    if isinstance(op, Compute) or not ops:
        return None
    index = ops[min(target, len(ops) - 1)][0]
    ops.insert(target, (index, op))
    return rebuilt(schedule, ops, waits=rng.random() < 0.5)


def swap_ops(rng: Random, schedule: Schedule) -> Schedule | None:
    """Swaps two launches, two locals, or two frees, that may be far from each other."""
    kind = rng.choice([Launch, Local, Free])
    places = [place for place, (_, op) in enumerate(flat(schedule)) if isinstance(op, kind)]
    if len(places) < 2:
        return None
    ops = flat(schedule)
    first = rng.randrange(len(places) - 1)
    one, two = rng.sample(places, 2) if rng.random() < 0.3 else places[first : first + 2]
    ops[one], ops[two] = (ops[one][0], ops[two][1]), (ops[two][0], ops[one][1])
    return rebuilt(schedule, ops, waits=rng.random() < 0.5)


def free_early(rng: Random, schedule: Schedule) -> Schedule | None:
    found = pick(rng, schedule, Free)
    if not found:
        return None
    ops = flat(schedule)
    target = max(0, found[0] - rng.randint(1, 12))
    _, op = ops.pop(found[0])
    issued = {other.name for _, other in ops[:target]}
    ops.insert(target, (ops[target][0], replace(op, waits=tuple(name for name in op.waits if name in issued))))
    return rebuilt(schedule, ops)


def copy_op(rng: Random, schedule: Schedule) -> Schedule | None:
    found = pick(rng, schedule, Free, Local, Deliver, Launch)
    if not found:
        return None
    ops = flat(schedule)
    ops.insert(found[0] + 1, (ops[found[0]][0], replace(found[1], name=f"{found[1].name} again")))
    return rebuilt(schedule, ops, waits=rng.random() < 0.5)


def change_region(rng: Random, schedule: Schedule) -> Schedule | None:
    """Shifts a region, or moves it into another buffer."""
    found = pick(rng, schedule, Compute, Launch, Local, Deliver)
    if not found:
        return None
    place, op = found
    if isinstance(op, Deliver):
        return put(schedule, place, replace(op, region=other_region(rng, schedule, op.region)))
    assert isinstance(op, (Compute, Launch, Local))
    side = rng.choice(["reads", "writes"])
    regions = list(getattr(op, side))
    if not regions:
        return None
    index = rng.randrange(len(regions))
    old = regions[index]
    regions[index] = other_region(rng, schedule, old)
    changed = {side: tuple(regions)}
    if getattr(op, "kind", "") == "scale" or getattr(op, "collective", "") == "all_reduce":
        changed = {"reads": tuple(regions), "writes": tuple(regions)}
    return put(schedule, place, replace(op, **changed), waits=rng.random() < 0.5)


def other_region(rng: Random, schedule: Schedule, region: Region) -> Region:
    if rng.random() < 0.5:
        shift = rng.choice([-8, -1, 1, 4, 128])
        return Region(region.buffer, region.start + shift, region.stop + shift)
    fitting = [index for index, buffer in enumerate(schedule.buffers) if buffer.numel >= region.stop]
    return region._replace(buffer=rng.choice(fitting))


def share_buffer(rng: Random, schedule: Schedule) -> Schedule | None:
    """Uses one buffer for what two were for, which is right only if nobody needs both at a time."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, buffer in enumerate(schedule.buffers):
        if buffer.kind != "shard":
            groups.setdefault((buffer.kind, buffer.numel, buffer.dtype, buffer.stream), []).append(index)
    pairs = [members for members in groups.values() if len(members) > 1]
    if not pairs:
        return None
    one, two = rng.sample(rng.choice(pairs), 2)
    return rebuilt(schedule, [(index, renamed(op, two, one)) for index, op in flat(schedule)], waits=rng.random() < 0.5)


def renamed(op: Op, old: int, new: int) -> Op:
    def at(region: Region) -> Region:
        return region._replace(buffer=new) if region.buffer == old else region

    if isinstance(op, Free):
        return replace(op, buffer=new) if op.buffer == old else op
    if isinstance(op, Deliver):
        return replace(op, region=at(op.region))
    if isinstance(op, Caller):
        return replace(op, writes=tuple(map(at, op.writes)))
    return replace(op, reads=tuple(map(at, op.reads)), writes=tuple(map(at, op.writes)))


def change_stream(rng: Random, schedule: Schedule) -> Schedule | None:
    found = pick(rng, schedule)
    assert found
    stream = rng.choice([stream for stream in STREAMS if stream != found[1].stream])
    return put(schedule, found[0], replace(found[1], stream=stream), waits=rng.random() < 0.5)


def change_buffer(rng: Random, schedule: Schedule) -> Schedule | None:
    index = rng.randrange(len(schedule.buffers)) if schedule.buffers else None
    if index is None:
        return None
    buffer = schedule.buffers[index]
    other: Buffer = (
        replace(buffer, stream=rng.choice(STREAMS)) if rng.random() < 0.5 else replace(buffer, numel=buffer.numel // 2)
    )
    return replace(schedule, buffers=(*schedule.buffers[:index], other, *schedule.buffers[index + 1 :]))


def change_launch(rng: Random, schedule: Schedule) -> Schedule | None:
    """Changes the communicator, the collective, or which message is which."""
    found = pick(rng, schedule, Launch)
    if not found or not isinstance(op := found[1], Launch):
        return None
    match rng.randrange(4):
        case 0:
            op = replace(op, collective=rng.choice(["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]))
        case 1:
            axes = rng.choice([("replicate",), ("shard",), ("replicate", "shard")])
            op = replace(op, communicator=replace(op.communicator, axes=axes))
        case 2:
            purposes: list[Literal["gather", "reduce_scatter", "all_reduce"]] = [
                "gather",
                "reduce_scatter",
                "all_reduce",
            ]
            op = replace(op, communicator=Communicator(rng.choice(purposes), op.communicator.axes))
        case _:
            op = replace(op, reads=tuple(rng.sample(op.reads, len(op.reads))))
    return put(schedule, found[0], op)


def change_local(rng: Random, schedule: Schedule) -> Schedule | None:
    """Changes a field of a local op, or the order of its regions."""
    found = pick(rng, schedule, Local)
    if not found or not isinstance(op := found[1], Local):
        return None
    match rng.randrange(4):
        case 0:
            op = replace(op, divisor=rng.choice([1, op.divisor * 2, op.divisor + 1]))
        case 1:
            op = replace(op, parts=rng.choice([1, 2, 3, 4]))
        case 2:
            op = replace(op, weights=tuple(rng.sample(op.weights, len(op.weights))))
        case _:
            op = replace(op, reads=tuple(rng.sample(op.reads, len(op.reads))))
    return put(schedule, found[0], op)


def change_caller(rng: Random, schedule: Schedule) -> Schedule | None:
    """Lets the caller write one shard less than it does, one more, or another one."""
    found = pick(rng, schedule, Caller)
    if not found or not isinstance(op := found[1], Caller):
        return None
    writes, shards = list(op.writes), [i for i, buffer in enumerate(schedule.buffers) if buffer.kind == "shard"]
    if writes and rng.random() < 0.6:
        writes.pop(rng.randrange(len(writes)))
    if shards and rng.random() < 0.6:
        buffer = rng.choice(shards)
        writes.append(Region(buffer, 0, schedule.buffers[buffer].numel))
    return put(schedule, found[0], replace(op, writes=tuple(writes)), waits=rng.random() < 0.5)


def change_delivery(rng: Random, schedule: Schedule) -> Schedule | None:
    found = pick(rng, schedule, Deliver)
    if not found or not isinstance(op := found[1], Deliver):
        return None
    return put(schedule, found[0], replace(op, weight=rng.randrange(len(schedule.program.weights))))


MUTATIONS: tuple[Mutation, ...] = (
    drop_wait,
    drop_wait,
    drop_op,
    move_op,
    swap_ops,
    free_early,
    copy_op,
    change_region,
    share_buffer,
    change_stream,
    change_buffer,
    change_launch,
    change_local,
    change_caller,
    change_delivery,
)


# ----------------------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Mutant:
    """A planned schedule, and the same with one mistake."""

    case: Case
    mutation: str
    schedule: Schedule


def random_mutant(rng: Random) -> Mutant | None:
    """Returns a mutant; None if the mistake cannot be made in the schedule that was drawn, or changes nothing."""
    case = random_case(rng)
    valid = plan(case.program, case.policy, case.traits)
    mutation = rng.choice(MUTATIONS)
    if not list(valid.ops):
        return None
    mutant = mutation(rng, valid)
    return Mutant(case, mutation.__name__, mutant) if mutant and mutant != valid else None


def is_wrong(schedule: Schedule, case: Case, num_timings: int = 50) -> bool:
    """Returns whether some timing shows anything but what the program asks for."""
    world = World(case.program, case.mesh_sizes)
    wanted = reference(world)
    for timing in range(num_timings):
        try:
            found = interpret(schedule, world, timing, NUM_STEPS)
        except (ScheduleError, ValueError, IndexError, KeyError, ZeroDivisionError):
            return True  # a deadlock, or shapes that do not fit
        if not all(map(Outcome.agrees, found, wanted * NUM_STEPS)):
            return True
    return False


def mutants(seeds: Iterable[int]) -> Iterator[Mutant]:
    """Yields the mutant of each seed that has one."""
    for seed in seeds:
        if mutant := random_mutant(Random(seed)):
            yield mutant


@dataclass
class Tally:
    """How the checker does.

    Attributes:
        harmful: by mutation, those that some timing shows to be wrong.
        missed: by mutation, those of them that the checker accepts.
        accepted: by mutation, those that it accepts and no timing shows to be wrong.
        strict: by mutation, those that it rejects and no timing shows to be wrong.
    """

    harmful: Counter[str]
    missed: Counter[str]
    accepted: Counter[str]
    strict: Counter[str]


def tally(seeds: Iterable[int], num_timings: int = 50) -> Tally:
    """Puts the mutants of some seeds to the checker and to the interpreter."""
    result = Tally(Counter(), Counter(), Counter(), Counter())
    for mutant in mutants(seeds):
        rejected = bool(find_violations(mutant.schedule))
        wrong = is_wrong(mutant.schedule, mutant.case, num_timings)
        result.harmful[mutant.mutation] += wrong
        result.missed[mutant.mutation] += wrong and not rejected
        result.accepted[mutant.mutation] += not wrong and not rejected
        result.strict[mutant.mutation] += not wrong and rejected
    return result


def main() -> None:
    """Prints how many harmful mutants are rejected, and how many planned schedules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of mutants to try")
    parser.add_argument("--valid", type=int, default=0, help="number of planned schedules to check")
    parser.add_argument("--timings", type=int, default=50, help="number of timings for each mutant")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    found = tally(seeds, arguments.timings)
    print(f"{'mutation':18}{'harmful':>9}{'missed':>9}{'harmless':>10}{'rejected all the same':>23}")
    for name in sorted(mutation.__name__ for mutation in set(MUTATIONS)):
        harmless = found.accepted[name] + found.strict[name]
        print(f"{name:18}{found.harmful[name]:9}{found.missed[name]:9}{harmless:10}{found.strict[name]:23}")
    harmful, missed = found.harmful.total(), found.missed.total()
    print(f"{missed} of {harmful} harmful mutants accepted; {100 * (1 - missed / max(1, harmful)):.2f} % rejected")
    rejected = 0
    for seed in range(arguments.seed, arguments.seed + arguments.valid):
        case = random_case(Random(seed))
        rejected += bool(find_violations(plan(case.program, case.policy, case.traits)))
    print(f"{rejected} of {arguments.valid} planned schedules rejected")


if __name__ == "__main__":
    main()
