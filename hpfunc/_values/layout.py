"""`Layout`: the arithmetic of cutting one array over a mesh. A pure value; nothing here holds data.

Every cut dim of size n over c ranks is cut into c blocks of ceil(n / c); the last blocks may be short or empty. A
*block* is the padded size, equal on all ranks, in which messages travel; a *local* shape is what one rank really holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .mesh import Mesh, PartitionSpec

Shape = tuple[int, ...]
Coordinate = Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """One array of global `shape`, cut by `spec` over `mesh`.

    >>> mesh = Mesh(("shard",), (4,), ("shard",), (0, 1, 2, 3), rank=3)
    >>> layout = Layout((10, 6), PartitionSpec("shard"), mesh)
    >>> layout.block_shape, layout.local_shape(mesh.coordinate), layout.is_even, layout.gather(("shard",)).is_direct
    ((3, 6), (1, 6), False, True)
    """

    shape: Shape
    spec: PartitionSpec
    mesh: Mesh

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a step looks up the layouts of all its arguments
        return hash((self.shape, self.spec, self.mesh))

    @cached_property
    def block_shape(self) -> Shape:
        """Shape of one padded block."""
        return tuple(-(-n // self.mesh.axis_size(self.spec.dim_axes(dim))) for dim, n in enumerate(self.shape))

    @cached_property
    def is_even(self) -> bool:
        """Whether no block is padded on any rank."""
        return all(n % self.mesh.axis_size(self.spec.dim_axes(dim)) == 0 for dim, n in enumerate(self.shape))

    def local_slices(self, coordinate: Coordinate) -> tuple[slice, ...]:
        """Returns where the part of the rank at `coordinate` lies in the global array."""
        slices = []
        for dim, (n, block) in enumerate(zip(self.shape, self.block_shape, strict=True)):
            index = self.mesh.index_of(coordinate, self.spec.dim_axes(dim))
            slices.append(slice(min(n, index * block), min(n, (index + 1) * block)))
        return tuple(slices)

    def local_shape(self, coordinate: Coordinate) -> Shape:
        """Returns the shape of the part of the rank at `coordinate`."""
        if self.is_even:
            return self.block_shape
        return tuple(part.stop - part.start for part in self.local_slices(coordinate))

    def gather(self, axes: tuple[str, ...]) -> Gather:
        """Returns how blocks are put together over `axes`, which must be the minor ones of each dim (see `misplaced`).

        The same axes give the same object, so its arithmetic is done once.
        """
        found = self._gathers.get(axes)
        if found is None:
            found = self._gathers[axes] = Gather(self, self.mesh.sort(set(axes) & set(self.spec.axes)))
        return found

    @cached_property
    def _gathers(self) -> dict[tuple[str, ...], Gather]:
        return {}

    def misplaced(self, axes: tuple[str, ...]) -> int | None:
        """Returns the first dim in which one of `axes` is major to an axis that stays: it cannot be gathered alone."""
        for dim in range(len(self.shape)):
            inside = [axis in axes for axis in self.spec.dim_axes(dim)]
            if inside != sorted(inside):
                return dim
        return None


@dataclass(frozen=True)
class Gather:
    """Blocks of a layout put together over `axes`, in mesh order; one rank then holds the *whole* (over `axes`)."""

    layout: Layout
    axes: tuple[str, ...]

    @cached_property
    def num_blocks(self) -> int:
        """Ranks along `axes`."""
        return self.layout.mesh.axis_size(self.axes)

    @cached_property
    def padded_shape(self) -> Shape:
        """Shape of all blocks put together, padding included."""
        layout = self.layout
        factors = [layout.mesh.axis_size(self._dim_axes(dim)) for dim in range(len(layout.shape))]
        return tuple(block * factor for block, factor in zip(layout.block_shape, factors, strict=True))

    def whole_shape(self, coordinate: Coordinate) -> Shape:
        """Returns the shape without padding, for the rank at `coordinate`."""
        if self.layout.is_even:
            return self.padded_shape
        first = {axis: 0 for axis in self.axes}
        starts = [part.start for part in self.layout.local_slices({**coordinate, **first})]
        return tuple(
            max(0, min(n - start, padded))
            for n, start, padded in zip(self.layout.shape, starts, self.padded_shape, strict=True)
        )

    def _dim_axes(self, dim: int) -> tuple[str, ...]:
        return tuple(axis for axis in self.layout.spec.dim_axes(dim) if axis in self.axes)

    @cached_property
    def split_shape(self) -> Shape:
        """A message of all blocks in rank order, viewed as (size of each axis, ..., block)."""
        return tuple(self.layout.mesh.shape[axis] for axis in self.axes) + self.layout.block_shape

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation of `split_shape` after which a reshape gives `padded_shape`."""
        order: list[int] = []
        for dim in range(len(self.layout.shape)):
            order += [self.axes.index(axis) for axis in self._dim_axes(dim)]
            order.append(len(self.axes) + dim)
        return tuple(order)

    @cached_property
    def joined_shape(self) -> Shape:
        """`split_shape` after `order`."""
        return tuple(self.split_shape[index] for index in self.order)

    @cached_property
    def is_direct(self) -> bool:
        """Whether the message of all blocks is the whole without any reordering, with padding only at its end."""
        moved = [index for index in self.order if self.split_shape[index] != 1]
        return moved == sorted(moved) and self.is_padded_at_end

    def places(self, coordinate: Coordinate) -> Iterator[tuple[slice, ...]]:
        """Yields where in the whole each block belongs, for the rank at `coordinate`, in the order of a message."""
        layout, shape = self.layout, self.layout.mesh.shape
        start = [part.start for part in layout.local_slices({**coordinate, **dict.fromkeys(self.axes, 0)})]
        for index in itertools.product(*(range(shape[axis]) for axis in self.axes)):
            parts = layout.local_slices({**coordinate, **dict(zip(self.axes, index, strict=True))})
            yield tuple(slice(part.start - s, part.stop - s) for part, s in zip(parts, start, strict=True))

    @cached_property
    def is_padded_at_end(self) -> bool:
        """Whether all blocks put together have padding only behind all elements of the whole."""
        outer = 1
        for dim, padded in enumerate(self.padded_shape):
            cut = self.layout.mesh.axis_size(self.layout.spec.dim_axes(dim))
            if self.layout.shape[dim] % cut and outer != 1:
                return False
            outer *= padded
        return True

    @property
    def padded_numel(self) -> int:
        """Elements of all blocks together."""
        return math.prod(self.padded_shape)
