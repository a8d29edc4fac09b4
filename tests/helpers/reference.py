"""What hpfunc's values and collectives should give, computed in one process with numpy. Knows nothing of hpfunc."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Axes = tuple[str, ...]
Parts = Sequence[np.ndarray]  # one array for each rank


@dataclass(frozen=True)
class Grid:
    """A mesh, as tests send it to ranks."""

    sizes: tuple[int, ...]
    names: Axes
    data_axes: Axes

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, axes: Axes) -> int:
        return math.prod(self.sizes[self.names.index(axis)] for axis in axes)

    def place(self, rank: int) -> dict[str, int]:
        return dict(zip(self.names, map(int, np.unravel_index(rank, self.sizes)), strict=True))

    def index(self, rank: int, axes: Axes) -> int:
        """The place of a rank along several axes, the first of them major."""
        place = self.place(rank)
        sizes = [self.sizes[self.names.index(axis)] for axis in axes]
        return int(np.ravel_multi_index([place[axis] for axis in axes], sizes)) if axes else 0

    def peers(self, rank: int, axes: Axes) -> list[int]:
        """The ranks that differ from `rank` only along `axes`, in their order along these."""
        others = [axis for axis in self.names if axis not in axes]
        place = self.place(rank)
        found = [r for r in range(self.num_ranks) if all(self.place(r)[a] == place[a] for a in others)]
        return sorted(found, key=lambda r: self.index(r, axes))


def bounds(n: int, num_parts: int, part: int) -> slice:
    """Where one of `num_parts` equal blocks of n elements lies; the last ones are short or empty."""
    block = -(-n // num_parts)
    return slice(min(n, part * block), min(n, (part + 1) * block))


def part(shape: Sequence[int], entries: Sequence[Axes], grid: Grid, rank: int) -> tuple[slice, ...]:
    """Where the part of `rank` lies in an array whose dims are cut along the axes of `entries`."""
    return tuple(bounds(n, grid.size(axes), grid.index(rank, axes)) for n, axes in zip(shape, entries, strict=True))


def whole(shape: Sequence[int], entries: Sequence[Axes], grid: Grid, rank: int, over: Axes) -> tuple[slice, ...]:
    """Where that lies which `rank` and its peers along `over` hold together; it must be one box."""
    parts = [part(shape, entries, grid, peer) for peer in grid.peers(rank, over)]
    return tuple(slice(min(p.start for p in dim), max(p.stop for p in dim)) for dim in zip(*parts, strict=True))


def psum(parts: Parts, grid: Grid, rank: int, axes: Axes) -> np.ndarray:
    return np.sum([parts[r] for r in grid.peers(rank, axes)], axis=0)


def pmax(parts: Parts, grid: Grid, rank: int, axes: Axes) -> np.ndarray:
    return np.max([parts[r] for r in grid.peers(rank, axes)], axis=0)


def pmin(parts: Parts, grid: Grid, rank: int, axes: Axes) -> np.ndarray:
    return np.min([parts[r] for r in grid.peers(rank, axes)], axis=0)


def all_gather(parts: Parts, grid: Grid, rank: int, axes: Axes, dim: int, tiled: bool) -> np.ndarray:
    join: Callable[..., np.ndarray] = np.concatenate if tiled else np.stack
    return join([parts[r] for r in grid.peers(rank, axes)], axis=dim)


def psum_scatter(parts: Parts, grid: Grid, rank: int, axes: Axes, dim: int, tiled: bool) -> np.ndarray:
    pieces = np.split(psum(parts, grid, rank, axes), grid.size(axes), axis=dim)
    mine = pieces[grid.index(rank, axes)]
    return mine if tiled else mine.squeeze(dim)


def all_to_all(
    parts: Parts, grid: Grid, rank: int, axes: Axes, split_dim: int, concat_dim: int, tiled: bool
) -> np.ndarray:
    me = grid.index(rank, axes)
    pieces = [np.split(parts[r], grid.size(axes), axis=split_dim)[me] for r in grid.peers(rank, axes)]
    if tiled:
        return np.concatenate(pieces, axis=concat_dim)
    return np.stack([piece.squeeze(split_dim) for piece in pieces], axis=concat_dim)


def ppermute(parts: Parts, grid: Grid, rank: int, axes: Axes, perm: Sequence[tuple[int, int]]) -> np.ndarray:
    peers, me = grid.peers(rank, axes), grid.index(rank, axes)
    sources = [peers[source] for source, target in perm if target == me]
    return parts[sources[0]] if sources else np.zeros_like(parts[rank])


COLLECTIVES: dict[str, Callable[..., np.ndarray]] = {
    fn.__name__: fn for fn in (psum, pmax, pmin, all_gather, psum_scatter, all_to_all, ppermute)
}


def expected(kind: str, parts: list[np.ndarray], grid: Grid, rank: int, axes: Axes, options: dict[str, Any]) -> Any:
    """What `rank` gets, from what all ranks have."""
    names = {"scatter_dim": "dim"}
    renamed = {names.get(key, key): value for key, value in options.items()}
    if kind == "pvary":
        return parts[rank]
    if kind == "pmean":
        return psum(parts, grid, rank, axes) / grid.size(axes)
    return COLLECTIVES[kind](parts, grid, rank, axes, **renamed)


def transposed(
    kind: str, parts: list[np.ndarray], grid: Grid, rank: int, axes: Axes, options: dict[str, Any]
) -> np.ndarray:
    """What `rank` gets as the gradient of its argument, from the gradients that all ranks have for their results."""
    if kind == "psum":
        return parts[rank]
    if kind == "pvary":
        return psum(parts, grid, rank, axes)
    if kind == "pmean":
        return parts[rank] / grid.size(axes)
    if kind == "all_gather":
        return psum_scatter(parts, grid, rank, axes, **options)
    if kind == "psum_scatter":
        return all_gather(parts, grid, rank, axes, options["scatter_dim"], options["tiled"])
    if kind == "all_to_all":
        split, concat, tiled = options["concat_dim"], options["split_dim"], options["tiled"]
        return all_to_all(parts, grid, rank, axes, split, concat, tiled)
    return ppermute(parts, grid, rank, axes, [(target, source) for source, target in options["perm"]])


def as_numpy(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    return [x.double().numpy() for x in tensors]
