"""Programs to plan: three that are written out, and as many as one likes that are drawn at random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, get_args

from hypothesis import strategies as st

from hpfunc.planning.planner import Traits
from hpfunc.planning.policy import Policy, Release
from hpfunc.planning.program import Carry, Event, Program, Unit, Weight
from hpfunc.planning.windows import Windows

AXES: tuple[str, ...] = ("replicate", "shard")
STEP = (Event("end_backward"), Event("end_step"))


def weight(
    name: str, numel: int, mesh_sizes: Mapping[str, int], cut: tuple[str, ...] = ("shard",), **fields: Any
) -> Weight:
    """Returns a float32 weight of `numel` elements, cut over some axes, whose gradient is the mean over all."""
    num_shards = math.prod(mesh_sizes[axis] for axis in cut)
    others = tuple(axis for axis in mesh_sizes if axis not in cut)
    num_replicas = math.prod(mesh_sizes[axis] for axis in others)
    dtypes = {"dtype": "float32", "shard_dtype": "float32", "reduce_dtype": "float32"}
    accum_dtype = fields.get("shard_dtype", "float32")
    defaults: dict[str, Any] = {**dtypes, "accum_dtype": accum_dtype, "divisor": num_shards * num_replicas}
    return Weight(
        name=name,
        block_numel=-(-numel // num_shards),
        gather_axes=cut,
        num_shards=num_shards,
        reduce_axes=others,
        num_replicas=num_replicas,
        **(defaults | fields),
    )


def stack(*units: tuple[Weight, ...], names: tuple[str, ...] = ()) -> Program:
    """Returns the program of one step through units in order, and back."""
    weights = tuple(weight for members in units for weight in members)
    names = names or tuple(f"layer{index}" for index in range(len(units)))
    listed, start = [], 0
    for name, members in zip(names, units, strict=True):
        listed.append(Unit(name, tuple(range(start, start + len(members)))))
        start += len(members)
    forward = [Event("forward", index) for index in range(len(units))]
    backward = [Event("backward", index) for index in reversed(range(len(units)))]
    return Program(weights, tuple(listed), (*forward, *backward, *STEP))


def layers(count: int, mesh_sizes: Mapping[str, int], numel: int = 4096, **fields) -> Program:
    """Returns a step through equal layers of one weight each."""
    return stack(*((weight(f"w{index}", numel, mesh_sizes, **fields),) for index in range(count)))


def three_units(mesh_sizes: Mapping[str, int]) -> Program:
    """Returns embed, block and head, each with one big weight and one bias."""
    names = ("embed", "block", "head")
    units = [(weight(f"{name}.w", 65536, mesh_sizes), weight(f"{name}.b", 256, mesh_sizes)) for name in names]
    return stack(*units, names=names)


def two_backwards(mesh_sizes: Mapping[str, int], carry: Carry, **fields: Any) -> Program:
    """Returns two units that are passed twice for one gradient."""
    program = stack(
        *((weight(f"{name}.w", 65536, mesh_sizes, **fields),) for name in ("block", "head")), names=("block", "head")
    )
    passes = [
        (Event("forward", 0, n), Event("forward", 1, n), Event("backward", 1, n), Event("backward", 0, n))
        for n in (0, 1)
    ]
    return replace(program, events=(*passes[0], Event("end_backward", carry=carry), *passes[1], *STEP))


# ---------------------------------------------------------------------------------------------------------- at random


@dataclass(frozen=True)
class Case:
    """Something to plan, and the mesh on which to run it."""

    program: Program
    mesh_sizes: dict[str, int]
    policy: Policy
    traits: Traits


def random_case(rng: Random) -> Case:
    """Returns a small case; every feature of programs occurs, each in many of them."""
    sizes = rng.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (2, 3), (4, 2), (3, 3)])
    mesh_sizes: dict[str, int] = dict(zip(AXES, sizes, strict=True))
    if sizes[0] == 1 and rng.random() < 0.5:
        del mesh_sizes["replicate"]
    release: Release = rng.choice(["forward", "forward", "backward", "never"])
    policy = Policy(
        rng.choice([0, 1, 1, 2, 3]),
        release,
        rng.choice([0, 64, 256, math.inf]),
        prefetch_backward=rng.choice([None, None, 0, 1, 2, 4]),
        release_overrides=[("layer", rng.choice(get_args(Release)))] if rng.random() < 0.2 else (),
        reduce_bucket_bytes=rng.choice([0, 0, 100, 400, math.inf]),
    )
    program = random_program(rng, mesh_sizes)
    if rng.random() < 0.3:
        windows = Windows(program, policy)
        budget = windows.least_budget_bytes * rng.choice([1, 1.3, 2])
        policy = replace(policy, gather_budget_bytes=budget)
    return Case(program, mesh_sizes, policy, Traits(ordered_sums=rng.random() < 0.5))


def random_program(rng: Random, mesh_sizes: Mapping[str, int]) -> Program:
    """Returns a program over a mesh."""
    weights: list[Weight] = []
    units: list[Unit] = []
    usual = rng.random() < 0.6  # all weights alike, as in most models
    for index in range(rng.randint(1, 5)):
        members = []
        for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])):
            if weights and rng.random() < 0.15:
                members.append(rng.randrange(len(weights)))  # tied, now and then within one unit
            else:
                weights.append(random_weight(rng, f"w{len(weights)}", mesh_sizes, usual))
                members.append(len(weights) - 1)
        units.append(Unit(rng.choice(["layer", f"layer{index}"]), tuple(members)))
    return Program(tuple(weights), tuple(units), tuple(random_events(rng, len(units))))


def random_weight(rng: Random, name: str, mesh_sizes: Mapping[str, int], usual: bool) -> Weight:
    """Returns a weight, with a float32 master and little else to remark if `usual`."""
    cuts = [(), *((axis,) for axis in mesh_sizes), tuple(mesh_sizes)]
    cut = ("shard",) if usual or rng.random() < 0.5 else rng.choice(cuts)
    numel = rng.choice([1, 3, 8, 20, 40]) * rng.choice([1, 1, 4])
    whole = math.prod(mesh_sizes[axis] for axis in cut) == 1
    fields = {
        "dtype": rng.choice(["float32", "float32", "bfloat16"]),
        "shard_dtype": "float32" if usual else rng.choice(["float32", "float32", "bfloat16"]),
        "reduce_dtype": "float32" if usual else rng.choice(["float32", "float32", "bfloat16", "float16"]),
        "accum_dtype": "float32" if usual else rng.choice(["float32", "float32", "bfloat16"]),
        "even": whole or rng.random() < 0.7,
        "direct": whole or rng.random() < 0.7,
        "trainable": rng.random() < 0.85,
        "origin": None if rng.random() < 0.1 else 0,
    }
    if rng.random() < 0.2:
        fields["divisor"] = 1
    result = weight(name, numel, mesh_sizes, cut, **fields)
    return weight(name, 0, mesh_sizes, cut, **fields) if rng.random() < 0.1 else result


def random_events(rng: Random, num_units: int) -> list[Event]:
    """Returns the events of a step: some units are called only forward, some are recomputed, some pass twice."""
    uses: Counter[int] = Counter()
    events: list[Event] = []
    carries = [rng.choice(["", "", "shards", "wholes"]) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    for carry in [*carries, ""] if carries or rng.random() < 0.9 else []:
        calls = random_calls(rng, num_units, uses)
        events += [Event("forward", *call) for call in calls]
        if rng.random() < 0.3:
            events.append(Event("collective", name="psum"))
        reached = [call for call in calls if rng.random() < 0.95]
        while reached:
            chunk = [reached.pop() for _ in range(min(len(reached), rng.choice([1, 1, 1, 2])))]
            if rng.random() < 0.2:
                events += [Event("recompute", *call) for call in reversed(chunk)]
            events += [Event("backward", *call) for call in chunk]
        events.append(Event("end_backward", carry=carry))
    if not events or rng.random() < 0.2:
        events += [Event("forward", *call) for call in random_calls(rng, num_units, uses)]
    return [*events, Event("end_step")]


def random_calls(rng: Random, num_units: int, uses: Counter[int]) -> list[tuple[int, int]]:
    """Returns (unit, use) of some calls, mostly of all units in order."""
    order = list(range(num_units))
    if rng.random() < 0.4:
        order = [rng.randrange(num_units) for _ in range(rng.randint(1, 6))]
    calls = []
    for unit in order:
        calls.append((unit, uses[unit]))
        uses[unit] += 1
    return calls


def with_edges(case: Case, rng: Random) -> Case:
    """Returns a case some of whose weights have no element, or one in each block."""
    sizes = [rng.choice([0, 0, 1, w.block_numel]) for w in case.program.weights]
    weights = (replace(w, block_numel=n) for w, n in zip(case.program.weights, sizes, strict=True))
    program, policy = replace(case.program, weights=tuple(weights)), case.policy
    budget = max(policy.gather_budget_bytes, Windows(program, policy).least_budget_bytes)
    return replace(case, program=program, policy=replace(policy, gather_budget_bytes=budget))


def edge_cases() -> st.SearchStrategy[Case]:
    """Returns the strategy of cases in which most weights are of no element or of one."""
    return st.randoms(use_true_random=False).map(lambda rng: with_edges(random_case(rng), rng))


def cases() -> st.SearchStrategy[Case]:
    """Returns the strategy of all cases."""
    return st.randoms(use_true_random=False).map(random_case)
