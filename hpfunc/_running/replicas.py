"""Replicated parts of arrays: checks that their bits are equal on all ranks, and finds the first difference.

# Note [Births]
If nothing is replicated, values cannot tell whether ranks pass different arrays of equal shape. So each array has a
*birth*: the number of arrays that `shard` and `init` had made on the same ranks before it. These calls are collective
and in order, so births are equal on all ranks. `with_local` (gradients, updates, the results of a step) keeps the birth
of its array. An array without a birth, such as the result of a tree map, is not compared.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .. import backends
from .._errors import AgreementError, HpfuncError, LeafError, message
from .._values.array import ShardedArray, describe
from .._values.mesh import Mesh
from .agreement import control

Tensor = Any
Axes = tuple[str, ...]
Groups = list[tuple[int, ...]]
Named = Sequence[tuple[str, ShardedArray]]
SHOWN = 3
DRIFTED = (
    "what changes them must be the same on all ranks: seeds, learning rates, masks, no write into `.local`; "
    "hpfunc.shard(whole, mesh, specs, broadcast_from=0) makes them equal again"
)


def replica_axes(array: ShardedArray) -> Axes:
    """Returns the axes along which ranks hold the same part of an array."""
    mesh, spec = array.mesh, array.spec
    return mesh.sort(set(mesh.axis_names) - set(spec.axes) - spec.unreduced)


def differing(mesh: Mesh, items: Sequence[tuple[Tensor, Axes]], label: str) -> list[Groups]:
    """Returns for each tensor the groups of ranks along its axes whose bits are not all the same.

    Communication: 8 bytes a tensor from each rank.
    """
    backend = backends.get(mesh.framework)
    digests = control(mesh).exchange(label, [backend.digest(tensor) for tensor, _ in items])
    return _groups(mesh, [axes for _, axes in items], digests)


def _groups(mesh: Mesh, axes_of: Sequence[Axes], numbers: Sequence[Sequence[int]]) -> list[Groups]:
    """Returns for each place the groups of ranks along its axes whose numbers are not all the same."""
    places, found = list(mesh.coordinates()), []
    for i, axes in enumerate(axes_of):
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for rank, place, mine in zip(mesh.ranks, places, numbers, strict=True):
            groups[tuple(index for axis, index in place.items() if axis not in axes)].append((rank, mine[i]))
        differ = [group for group in groups.values() if len({number for _, number in group}) > 1]
        found.append([tuple(rank for rank, _ in group) for group in differ])
    return found


def compare_replicas(
    function: str, named: Named, mesh: Mesh, hint: str, *, error: type[HpfuncError] = LeafError
) -> None:
    """Raises `error` on all ranks if replicas of a part have different bits.

    The error names every such array, the ranks, and the first element that differs. NaNs with equal bits are equal.

    Communication: 8 bytes from each rank for each array with replicas. If some differ, 8 bytes for each of them at each
        halving of the largest, and a line of text for each.
    """
    several = [(name, array) for name, array in named if mesh.axis_size(replica_axes(array)) > 1]
    if not several:
        return
    items = [(array._value, replica_axes(array)) for _, array in several]
    every = zip(several, differing(mesh, items, f"{function}: digests of replicas"), strict=True)
    bad = [(name, array, groups) for (name, array), groups in every if groups]
    if not bad:
        return
    texts = _first_differences(function, mesh, [array for _, array, _ in bad], [groups for *_, groups in bad])
    lines = [f"{n}: {describe(array)}: {text}" for (n, array, _), text in zip(bad, texts, strict=True)]
    raise error(message(function, "ranks hold different values of one part", lines, mesh=mesh, hint=hint))


def _first_differences(
    function: str, mesh: Mesh, arrays: Sequence[ShardedArray], groups_of: Sequence[Groups]
) -> list[str]:
    """Returns for each array the first difference of each of its groups, with the values: the same on all ranks.

    One bisection for all arrays at once: it continues in the first half if that differs, else in the second half.
    """
    backend = backends.get(mesh.framework)
    flats = [backend.contiguous(backend.detach(array._value)).reshape(-1) for array in arrays]
    axes_of = [replica_axes(array) for array in arrays]
    is_mine = [any(mesh.rank in group for group in groups) for groups in groups_of]
    starts, stops = [0] * len(flats), [flat.shape[0] for flat in flats]
    for _ in range(max(math.prod(array.shape) for array in arrays).bit_length()):
        middles = [(start + stop) // 2 for start, stop in zip(starts, stops, strict=True)]
        halves = [
            backend.digest(flat[start:middle]) if mine and start < middle else 0
            for flat, start, middle, mine in zip(flats, starts, middles, is_mine, strict=True)
        ]
        numbers = control(mesh).exchange(f"{function}: search for the first difference", halves)
        for i, groups in enumerate(_groups(mesh, axes_of, numbers)):
            if any(mesh.rank in group for group in groups):
                stops[i] = middles[i]
            elif stops[i] - starts[i] > 1:
                starts[i] = middles[i]
    mine = [
        (_place(array, start), repr(flat[start].item())) if shown else None
        for array, flat, start, shown in zip(arrays, flats, starts, is_mine, strict=True)
    ]
    texts = control(mesh).exchange_text(f"{function}: values that differ", json.dumps(mine))
    found = dict(zip(mesh.ranks, map(json.loads, texts), strict=True))
    return [_spell(groups, {r: values[i] for r, values in found.items()}) for i, groups in enumerate(groups_of)]


def _place(array: ShardedArray, index: int) -> str:
    """Returns the position in the global array of an element of this rank's part."""
    place = []
    for part in reversed(array.layout.local_slices(array.mesh.coordinate)):
        index, here = divmod(index, part.stop - part.start)
        place.append(part.start + here)
    return f"[{', '.join(map(str, reversed(place)))}]"


def _spell(groups: Groups, values: dict[int, tuple[str, str]]) -> str:
    lines = []
    for group in groups[:SHOWN]:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in group:
            ranks[values[rank][1]].append(rank)
        each = [f"{value} on {_ranks(held)}" for value, held in ranks.items()]
        lines.append(f"at {values[group[0]][0]} {', '.join(each)}")
    if len(groups) > SHOWN:
        lines.append(f"and in {len(groups) - SHOWN} other parts")
    return "; ".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def compare_arguments(function: str, named: Named, mesh: Mesh) -> None:
    """Compares with all ranks the births of the arrays, and the values of their replicas."""
    control(mesh).agree(function, lambda: "\n".join(f"{name}: {describe(array)}" for name, array in named))
    compare_births(function, named, mesh)
    compare_replicas(function, named, mesh, DRIFTED)


def compare_births(function: str, named: Named, mesh: Mesh) -> None:
    """Raises AgreementError on all ranks if they pass different arrays in one place. See Note [Births].

    Communication: 8 bytes per array from each rank.
    """
    if not named or mesh.size == 1:
        return
    # A birth as a number; -1 for an array without one.
    mine = [-1 if array._born is None else hash(array._born) & (1 << 62) - 1 for _, array in named]
    births = control(mesh).exchange(f"{function}: which arrays", mine)
    bad = [line for i, (name, array) in enumerate(named) if (line := _other(i, name, array, births, named, mesh))]
    if bad:
        hint = "pass the same arrays in the same order on every rank; a set, or files in a directory, may have another"
        raise AgreementError(message(function, "ranks pass different arrays in one place", bad, mesh=mesh, hint=hint))


def _other(
    i: int, name: str, array: ShardedArray, births: Sequence[Sequence[int]], named: Named, mesh: Mesh
) -> str | None:
    known = [(rank, mine[i]) for rank, mine in zip(mesh.ranks, births, strict=True) if mine[i] >= 0]
    others = [(rank, number) for rank, number in known if number != known[0][1]]
    if not others:
        return None
    (rank, number), first = others[0], mesh.ranks.index(known[0][0])
    names = [each for (each, _), birth in zip(named, births[first], strict=True) if birth == number]
    what = f"what rank {known[0][0]} passes as {names[0]}" if names else f"another array than rank {known[0][0]}"
    return f"{name}: {describe(array)}: rank {rank} passes {what}"
