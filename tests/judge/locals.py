"""What an op that works on the memory of one rank leaves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpfunc.planning.ops import Local
from hpfunc.planning.program import Weight
from tests.judge.terms import ABSENT, Terms, cast, divide
from tests.judge.world import World, cut, joined, padded


class Inputs(NamedTuple):
    """An op, what it has read, and the dtypes of the buffers that it reads and writes."""

    op: Local
    weights: list[Weight]
    reads: list[Terms]
    old: list[str]
    new: list[str]
    world: World


def _pack_shards(i: Inputs) -> list[Terms]:
    if [read.size for read in i.reads] != [w.block_numel for w in i.weights]:
        raise ValueError
    return [np.concatenate([cast(padded(read), dtype, i.new[0]) for read, dtype in zip(i.reads, i.old, strict=True)])]


def _unpack_wholes(i: Inputs) -> list[Terms]:
    rows = i.reads[0].reshape(i.weights[0].num_shards, sum(w.block_numel for w in i.weights))
    results, start = [], 0
    for w, dtype in zip(i.weights, i.new, strict=True):
        if w.num_shards != len(rows):
            raise ValueError
        results.append(cast(joined(w, rows[:, start : start + w.block_numel]), i.old[0], dtype))
        start += w.block_numel
    return results


def _pack_gradients(i: Inputs) -> list[Terms]:
    if len({w.num_shards for w in i.weights}) != 1:
        raise ValueError
    pieces = zip(i.weights, i.reads, i.old, strict=True)
    rows = [cast(divide(cut(w, padded(read)), i.op.divisor, dtype), dtype, i.new[0]) for w, read, dtype in pieces]
    return [np.concatenate(rows, axis=1).reshape(-1)]


def _accumulate(i: Inputs) -> list[Terms]:
    if len(i.reads) != 2 * len(i.new):
        raise ValueError
    results: list[Terms] = []
    for k, dtype in enumerate(i.new):
        one, two = i.reads[2 * k], i.reads[2 * k + 1]
        in_place = i.op.writes[k] in i.op.reads[2 * k : 2 * k + 2]
        if one.size != two.size or not (in_place or i.op.weights):  # only whole gradients are added into a third place
            raise ValueError
        parts = [cast(padded(one), i.old[2 * k], dtype), cast(padded(two), i.old[2 * k + 1], dtype)]
        results.append(np.where((one == ABSENT) | (two == ABSENT), ABSENT, i.world.total(parts, dtype)))
    return results


def _sum_parts(i: Inputs) -> list[Terms]:
    return [
        i.world.total([cast(part, a, b) for part in np.split(read, i.op.parts)], b)
        for read, a, b in zip(i.reads, i.old, i.new, strict=True)
    ]


def _copy(i: Inputs) -> list[Terms]:
    return [cast(read, a, b) for read, a, b in zip(i.reads, i.old, i.new, strict=True)]


def _own(i: Inputs) -> list[Terms]:
    pieces = zip(i.weights, i.reads, i.old, i.new, strict=True)
    return [divide(cast(padded(read), a, b), i.op.divisor, b) for _, read, a, b in pieces]


def _scale(i: Inputs) -> list[Terms]:
    if i.op.divisor < 1 or i.op.reads != i.op.writes:
        raise ValueError
    return [divide(read, i.op.divisor, dtype) for read, dtype in zip(i.reads, i.old, strict=True)]


def _zero(i: Inputs) -> list[Terms]:
    return [np.zeros(region.numel, np.int64) for region in i.op.writes]


LOCALS: dict[str, Callable[[Inputs], list[Terms]]] = {
    "pack_shards": _pack_shards,
    "unpack_wholes": _unpack_wholes,
    "pack_gradients": _pack_gradients,
    "accumulate": _accumulate,
    "sum_parts": _sum_parts,
    "copy": _copy,
    "own": _own,
    "scale": _scale,
    "zero": _zero,
}
"""By kind. A ValueError, IndexError or ZeroDivisionError says that sizes do not fit."""
