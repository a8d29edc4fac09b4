"""What a program asks for, on every rank: computed from its events alone, as the eager driver would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from hpfunc.planning.program import Program, Weight
from tests.judge.terms import ABSENT, Terms, add_all, cast, divide, fresh, mix, salt

COMPUTES = ("forward", "backward", "recompute")


class World:
    """The ranks of a mesh, their shards in each step, and what they must see.

    Args:
        program: what each step does.
        mesh_sizes: number of ranks along each data axis, in mesh order.
        neutral: zero added to something is that. False shows what is right only because something else is zero.
    """

    def __init__(self, program: Program, mesh_sizes: Mapping[str, int], *, neutral: bool = True) -> None:
        self.program, self.mesh_sizes, self.neutral = program, mesh_sizes, neutral
        self.axes = tuple(mesh_sizes)
        self.coordinates = tuple(product(*map(range, mesh_sizes.values())))
        self.num_ranks = len(self.coordinates)
        self.segments = _segments(program)
        self.first_uses = _first_uses(program)
        self._groups: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}
        self._shards: dict[tuple[int, int, int], Terms] = {}
        self._gradients: dict[tuple[int, int, int, int], Terms] = {}
        self._wholes: dict[tuple[int, int], Terms] = {}
        self._expected: dict[int, dict[tuple[int, int], list[Terms]]] = {}

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from a rank along some axes only. KeyError if there is no such axis."""
        key = (axes, rank)
        if key not in self._groups:
            if not set(axes) <= set(self.axes):
                raise KeyError(axes)
            fixed = [i for i, axis in enumerate(self.axes) if axis not in axes]
            mine = self.coordinates[rank]
            alike = (r for r, other in enumerate(self.coordinates) if all(other[i] == mine[i] for i in fixed))
            self._groups[key] = tuple(alike)
        return self._groups[key]

    def total(self, parts: Sequence[Terms], dtype: str) -> Terms:
        """Returns the sum of several, the first two first."""
        return add_all(parts, dtype, neutral=self.neutral)

    def segment(self, event: int, when: str) -> int:
        """Returns how many gradients have been due before a slot."""
        ended = self.program.events[event].kind == "end_backward" and not self.program.events[event].carry
        return self.segments[event][0] + (ended and when == "after")

    def block(self, weight: Weight, rank: int) -> int:
        """Returns which block of a weight is a rank's."""
        return self.group(weight.gather_axes, rank).index(rank) if weight.num_shards > 1 else 0

    def shard(self, weight: int, rank: int, step: int) -> Terms:
        """Returns the caller's shard in a step: new numbers in each, and nothing where the block is padded."""
        w = self.program.weights[weight]
        block = self.block(w, rank)
        key = (weight, block, step)
        if key not in self._shards:
            terms = fresh(w.block_numel, "shard", *key)
            terms[_padding(w, block)] = ABSENT
            self._shards[key] = terms
        return self._shards[key]

    def whole(self, weight: int, step: int) -> Terms:
        """Returns what a unit has to see of a weight; zero where it is padded."""
        key = (weight, step)
        if key not in self._wholes:
            w = self.program.weights[weight]
            ranks = self.group(w.gather_axes, 0) if w.num_shards > 1 else (0,)
            blocks = np.stack([padded(self.shard(weight, rank, step)) for rank in ranks])
            self._wholes[key] = cast(joined(w, blocks), w.shard_dtype, w.dtype)
        return self._wholes[key]

    def gradient(self, rank: int, step: int, event: int, position: int) -> Terms:
        """Returns what autograd gives a rank for one weight of a backward whose weights were right."""
        key = (rank, step, event, position)
        if key not in self._gradients:
            self._gradients[key] = self._gradient(*key)
        return self._gradients[key]

    def _gradient(self, rank: int, step: int, event: int, position: int) -> Terms:
        weight = self.program.units[self.program.events[event].unit or 0].weights[position]
        w = self.program.weights[weight]
        whole = mix(self.whole(weight, step), salt("gradient", rank, step, event, position))
        whole = mix(whole + np.arange(w.whole_numel), salt("place"))
        whole[np.isin(np.arange(w.whole_numel), _absent(w))] = ABSENT
        return whole

    def expected(self, step: int) -> dict[tuple[int, int], list[Terms]]:
        """Returns by (segment, weight) what each rank must be handed."""
        if step not in self._expected:
            uses: defaultdict[tuple[int, int], dict[int, list[tuple[int, int]]]] = defaultdict(dict)
            last: dict[int, int] = {}
            for index, event in enumerate(self.program.events):
                delivered, scattered = self.segments[index]
                last[delivered] = scattered
                members = self.program.units[event.unit or 0].weights if event.kind == "backward" else ()
                for position, weight in enumerate(members):
                    if self.program.weights[weight].trainable:
                        uses[delivered, weight].setdefault(scattered, []).append((index, position))
            self._expected[step] = {
                key: self._finished(key[1], groups, step, min(groups) < last[key[0]]) for key, groups in uses.items()
            }
        return self._expected[step]

    def _finished(self, weight: int, groups: dict[int, list[tuple[int, int]]], step: int, carried: bool) -> list[Terms]:
        """Returns the blocks of all ranks: scattered group by group, added up, all-reduced, divided and cast."""
        w = self.program.weights[weight]
        early = w.reduce_dtype == "float16"
        dtype = w.accum_dtype if carried else w.reduce_dtype
        blocks: list[Terms] = []
        for rank in range(self.num_ranks):
            scattered = [self._scattered(weight, rank, uses, step) for uses in groups.values()]
            blocks.append(self.total([cast(part, w.reduce_dtype, dtype) for part in scattered], dtype))
        result: list[Terms] = []
        for rank in range(self.num_ranks):
            block, held = blocks[rank], dtype
            if w.num_replicas > 1:
                held = w.reduce_dtype
                parts = [cast(blocks[other], dtype, held) for other in self.group(w.reduce_axes, rank)]
                block = self.total(parts, held)
            block = block if early else divide(block, w.divisor, held)
            result.append(cast(block, held, w.accum_dtype))
        return result

    def _scattered(self, weight: int, rank: int, uses: list[tuple[int, int]], step: int) -> Terms:
        """Returns a rank's block of the sum over all ranks of the sum of some uses."""
        w = self.program.weights[weight]
        ranks = self.group(w.gather_axes, rank) if w.num_shards > 1 else (rank,)
        parts: list[Terms] = []
        for other in ranks:
            found = [padded(self.gradient(other, step, *use)) for use in uses]
            dtype = w.dtype if len(found) == 1 else w.accum_dtype
            whole = self.total([cast(part, w.dtype, dtype) for part in found], dtype).copy()
            whole[_absent(w)] = 0
            block = cut(w, whole)[self.block(w, rank)]
            block = divide(block, w.divisor, dtype) if w.reduce_dtype == "float16" else block
            parts.append(cast(block, dtype, w.reduce_dtype))
        return self.total(parts, w.reduce_dtype)


def padded(terms: Terms) -> Terms:
    """Returns the terms with zeros for what is padding."""
    return np.where(terms == ABSENT, 0, terms)


def joined(weight: Weight, blocks: Terms) -> Terms:
    """Returns the whole of which these are the blocks, one a row."""
    return (blocks if weight.direct else blocks.T).reshape(-1)


def cut(weight: Weight, whole: Terms) -> Terms:
    """Returns the blocks of a whole, one a row."""
    if weight.direct:
        return whole.reshape(weight.num_shards, weight.block_numel)
    return whole.reshape(weight.block_numel, weight.num_shards).T


def _padding(weight: Weight, block: int) -> slice:
    """Returns the padded elements of a block: the last one of the last block, if blocks are not even."""
    is_padded = not weight.even and weight.num_shards > 1 and block == weight.num_shards - 1
    return slice(max(0, weight.block_numel - 1), None) if is_padded else slice(0, 0)


def _absent(weight: Weight) -> Terms:
    """Returns the places in the whole that are padding."""
    blocks = np.zeros((weight.num_shards, weight.block_numel), np.int64)
    for block in range(weight.num_shards):
        blocks[block, _padding(weight, block)] = ABSENT
    return np.flatnonzero(joined(weight, blocks))


def _segments(program: Program) -> list[tuple[int, int]]:
    """Returns for each event how many gradients were delivered, and how many scattered, before it."""
    result: list[tuple[int, int]] = []
    delivered = scattered = 0
    for event in program.events:
        result.append((delivered, scattered))
        if event.kind == "end_backward":
            delivered += not event.carry
            scattered += event.carry != "wholes"
    return result


def _first_uses(program: Program) -> dict[int, int]:
    first: dict[int, int] = {}
    for index, event in enumerate(program.events):
        for weight in program.units[event.unit or 0].weights if event.kind in COMPUTES else ():
            first.setdefault(weight, index)
    return first
