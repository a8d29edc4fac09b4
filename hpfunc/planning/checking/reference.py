"""`reference`: the results of a program on numpy data, for all ranks in one process, without a schedule.

Numbers are small integers, multiples of all divisors, so that every sum and quotient is exact and results can be
compared bit by bit. It is meant for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..program import COMPUTES, Program, Weight, segments

Array = NDArray[np.float64]


class World:
    """Ranks on a mesh, with their shards and the results of their units, which are functions of the seed.

    Args:
        program: the program to run.
        mesh_sizes: number of ranks along each data axis, in mesh order.
        seed: the seed of all numbers.
    """

    def __init__(self, program: Program, mesh_sizes: dict[str, int], seed: int = 0) -> None:
        self.program = program
        self.seed = seed
        self._axes = tuple(mesh_sizes)
        self._coordinates = list(product(*map(range, mesh_sizes.values())))
        self._divisors = math.lcm(*(weight.divisor for weight in program.weights))
        self._groups: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}
        self._numbers = cache(self._draw)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return len(self._coordinates)

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Returns the ranks whose coordinates differ from those of `rank` only along `axes`, in mesh order."""
        if (axes, rank) not in self._groups:
            key = self._key(axes, rank)
            ranks = tuple(other for other in range(self.num_ranks) if self._key(axes, other) == key)
            self._groups[axes, rank] = ranks
        return self._groups[axes, rank]

    def _key(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        return tuple(c for axis, c in zip(self._axes, self._coordinates[rank], strict=True) if axis not in axes)

    def shard(self, weight: int, rank: int) -> Array:
        """Returns the rank's padded block of a weight."""
        w = self.program.weights[weight]
        block = self.group(w.gather_axes, rank).index(rank) if w.num_shards > 1 else 0
        return self._numbers(w.block_numel, 0, weight, block)

    def gradient(self, rank: int, event: int, position: int, wholes: list[Array]) -> Array:
        """Returns the gradient that a backward computes for the weight at `position` of its unit."""
        unit = self.program.unit_of(self.program.events[event])
        numel = self.program.weights[unit.weights[position]].whole_numel
        return self._divisors * (self._numbers(numel, 1, rank, event, position) + np.fmod(self.observe(wholes), 7.0))

    def observe(self, wholes: list[Array]) -> float:
        """Returns a number that shows whether the wholes of a unit are right; NaN if any element is."""
        return sum((index + 1) * float(whole @ np.arange(1, whole.size + 1)) for index, whole in enumerate(wholes))

    def _draw(self, numel: int, *key: int) -> Array:
        return np.random.default_rng((self.seed, *key)).integers(1, 9, numel).astype(np.float64)


@dataclass(slots=True)
class Outcome:
    """The results of a step on one rank.

    Attributes:
        gradients: delivered gradients by (index of the `value_and_grad`, weight). More than one for a key is an error.
        observations: for each compute event, the result of `World.observe` for the weights that it read.
    """

    gradients: dict[tuple[int, int], list[Array]] = field(default_factory=dict)
    observations: dict[int, float] = field(default_factory=dict)

    def agrees(self, other: Outcome) -> bool:
        """Returns whether two outcomes are equal bit by bit."""
        same_keys = self.observations.keys() == other.observations.keys()
        if not same_keys or self.gradients.keys() != other.gradients.keys():
            return False
        # One by one: dicts that hold the same NaN object are equal, but NaN must not agree with anything.
        if any(mine != other.observations[event] for event, mine in self.observations.items()):
            return False
        return all(
            len(mine) == len(other.gradients[key]) and all(map(np.array_equal, mine, other.gradients[key]))
            for key, mine in self.gradients.items()
        )


def cut_blocks(weight: Weight, whole: Array) -> Array:
    """Returns the blocks of a whole weight, one per row."""
    rows = (weight.num_shards, weight.block_numel)
    return whole.reshape(rows) if weight.direct else whole.reshape(rows[::-1]).T


def join_blocks(weight: Weight, blocks: Array) -> Array:
    """Returns the whole weight that consists of these blocks."""
    return (blocks if weight.direct else blocks.T).reshape(-1)


def reference(world: World) -> list[Outcome]:
    """Returns the outcome that each rank must have, computed from the program without a schedule.

    >>> from hpfunc.planning.program import Event, Unit
    >>> weight = Weight("w", 1, *["float32"] * 4, ("shard",), 2, (), 1, divisor=2)
    >>> events = (Event("forward", 0), Event("backward", 0), Event("end_backward"), Event("end_step"))
    >>> world = World(Program((weight,), (Unit("layer", (0,)),), events), {"shard": 2})
    >>> [outcome.gradients[0, 0][0].tolist() for outcome in reference(world)]
    [[7.0], [8.0]]
    """
    program = world.program
    outcomes = [Outcome() for _ in range(world.num_ranks)]
    totals: dict[tuple[int, int], list[Array]] = {}
    for index, (event, (segment, _)) in enumerate(zip(program.events, segments(program), strict=True)):
        if event.kind not in COMPUTES:
            continue
        members = program.unit_of(event).weights
        wholes = [_whole(world, weight) for weight in members]
        for outcome in outcomes:
            outcome.observations[index] = world.observe(wholes)
        for position, weight in enumerate(members):
            if event.kind == "backward" and program.weights[weight].trainable:
                fresh = [world.gradient(rank, index, position, wholes) for rank in range(world.num_ranks)]
                earlier = totals.get((segment, weight))
                totals[segment, weight] = [a + b for a, b in zip(earlier, fresh, strict=True)] if earlier else fresh
    for (segment, weight), gradients in totals.items():
        for rank, outcome in enumerate(outcomes):
            outcome.gradients[segment, weight] = [_reduced(world, weight, rank, gradients)]
    return outcomes


def _whole(world: World, weight: int) -> Array:
    w = world.program.weights[weight]
    ranks = world.group(w.gather_axes, 0) if w.num_shards > 1 else (0,)
    return join_blocks(w, np.stack([world.shard(weight, rank) for rank in ranks]))


def _reduced(world: World, weight: int, rank: int, gradients: list[Array]) -> Array:
    """Returns the sum over `gradients` of the rank's block, divided."""
    w = world.program.weights[weight]
    axes = (w.gather_axes if w.num_shards > 1 else ()) + (w.reduce_axes if w.num_replicas > 1 else ())
    block = world.group(w.gather_axes, rank).index(rank) if w.num_shards > 1 else 0
    total = sum(cut_blocks(w, gradients[other])[block] for other in world.group(axes, rank))
    return np.asarray(total, np.float64) / w.divisor
