"""Copies of one array between its shard, the messages, and the whole. Local work only; nothing is sent.

A message holds the blocks of one or more weights for each rank: (ranks, total). `part` is the columns of one weight.

# Note [A whole weight is contiguous]
The code of a unit may use a whole weight like any weight of a plain program, with `view` or `as_strided`. So the
elements of a whole weight lie at the front of its buffer, without gaps, followed by any remaining padding. Blocks with
padding between elements are copied one by one.
"""

from __future__ import annotations

import math
from typing import Any

from .._values.layout import Coordinate, Gather
from ..backends import Backend

Tensor = Any
Copy = tuple[Tensor, Tensor]
"""A view to write into, and what is to be written: see `Backend.copy_all`."""


def shard_copy(backend: Backend, block: Tensor, local: Tensor, gather: Gather) -> Copy:
    """Returns the copy of a shard into a flat block of a message. Zeroes the rest of the block if the shard is short.

    Shapes: block (block_numel,), local `gather.layout.local_shape` (further dims may follow both).
    """
    shape = gather.layout.block_shape
    target = block.reshape(shape + tuple(local.shape[len(shape) :]))
    if tuple(local.shape[: len(shape)]) != shape:
        backend.fill(block, 0.0)
        target = target[tuple(slice(0, n) for n in local.shape)]
    return target, local


def whole_view(buffer: Tensor, gather: Gather, coordinate: Coordinate) -> Tensor:
    """Returns a whole weight in a flat buffer of `gather.padded_numel` elements. See Note [A whole weight ...]."""
    shape = gather.whole_shape(coordinate)
    return buffer.reshape(shape) if shape == gather.padded_shape else buffer[: math.prod(shape)].reshape(shape)


def local_view(block: Tensor, gather: Gather, coordinate: Coordinate) -> Tensor:
    """Returns the valid part of a flat block."""
    shape = gather.layout.local_shape(coordinate)
    full = block.reshape(gather.layout.block_shape)
    return full if shape == gather.layout.block_shape else full[tuple(slice(0, n) for n in shape)]


def whole_copies(buffer: Tensor, part: Tensor, gather: Gather, coordinate: Coordinate) -> list[Copy]:
    """Returns the copies of gathered blocks into a flat whole buffer: one copy, or one for each block.

    Shapes: part (ranks, block_numel), a view of a message; buffer (padded_numel,).
    """
    if gather.is_padded_at_end:
        blocks = part.reshape(gather.split_shape) if part.is_contiguous() else part.view(gather.split_shape)
        return [(buffer.reshape(gather.joined_shape), blocks.permute(gather.order))]
    whole, shape = whole_view(buffer, gather, coordinate), gather.layout.block_shape
    copies: list[Copy] = []
    for block, places in enumerate(gather.places(coordinate)):
        source = part[block].reshape(shape)
        copies.append((whole[places], source[tuple(slice(0, place.stop - place.start) for place in places)]))
    return copies


def gradient_copy(backend: Backend, part: Tensor, gradient: Tensor, gather: Gather, divisor: int = 1) -> Copy:
    """Returns the copy of a whole gradient, cut into blocks, into a message. Divides and zero-pads the gradient first.

    Shapes: part (ranks, block_numel), a view of a message; gradient `whole_shape`.
    """
    blocks = part.view(gather.split_shape).permute(gather.order)
    if tuple(gradient.shape) == gather.padded_shape and divisor == 1:
        return blocks, gradient.reshape(gather.joined_shape)
    padded = backend.empty(gather.padded_shape, backend.dtype_name(part), backend.device_of(part), zero=True)
    backend.copy(padded[tuple(slice(0, n) for n in gradient.shape)], gradient, divisor)
    return blocks, padded.reshape(gather.joined_shape)


def block_numel(gather: Gather) -> int:
    """Returns the number of elements of one block."""
    return math.prod(gather.layout.block_shape)
