"""Moving one array: between its shard, the messages that travel, and the whole. Local work only, nothing is sent.

A message holds the blocks of one or more weights for each rank: (ranks, total). `part` is the columns of one weight.
"""

from __future__ import annotations

import math
from typing import Any

from ._layout import Coordinate, Gather
from .backends import Backend

Tensor = Any
Copy = tuple[Tensor, Tensor]
"""A view to write into, and what is to be written: see `Backend.copy_all`."""


def shard_copy(backend: Backend, block: Tensor, local: Tensor, gather: Gather) -> Copy:
    """Returns how a shard gets into a flat block of a message; zeroes what a short shard leaves.

    Shapes: block (block_numel,), local `gather.layout.local_shape` (further dims may follow both).
    """
    shape = gather.layout.block_shape
    target = block.reshape(shape + tuple(local.shape[len(shape) :]))
    if tuple(local.shape[: len(shape)]) != shape:
        backend.fill(block, 0.0)
        target = target[tuple(slice(0, n) for n in local.shape)]
    return target, local


def whole_view(padded: Tensor, gather: Gather, coordinate: Coordinate) -> Tensor:
    """Returns the valid part of a whole weight in a flat buffer of `gather.padded_numel` elements."""
    whole = padded.reshape(gather.padded_shape)
    shape = gather.whole_shape(coordinate)
    return whole if shape == gather.padded_shape else whole[tuple(slice(0, n) for n in shape)]


def local_view(block: Tensor, gather: Gather, coordinate: Coordinate) -> Tensor:
    """Returns the valid part of a flat block."""
    shape = gather.layout.local_shape(coordinate)
    full = block.reshape(gather.layout.block_shape)
    return full if shape == gather.layout.block_shape else full[tuple(slice(0, n) for n in shape)]


def whole_copy(padded: Tensor, part: Tensor, gather: Gather) -> Copy:
    """Returns how gathered blocks get into a flat whole buffer.

    Shapes: part (ranks, block_numel), a view of a message; padded (padded_numel,).
    """
    blocks = part.reshape(gather.split_shape) if part.is_contiguous() else part.view(gather.split_shape)
    return padded.reshape(gather.joined_shape), blocks.permute(gather.order)


def gradient_copy(backend: Backend, part: Tensor, gradient: Tensor, gather: Gather, divisor: int = 1) -> Copy:
    """Returns how a whole gradient, cut into blocks, gets into a message; divides it and pads it with zeros first.

    Shapes: part (ranks, block_numel), a view of a message; gradient `whole_shape`.
    """
    blocks = part.view(gather.split_shape).permute(gather.order)
    if tuple(gradient.shape) == gather.padded_shape and divisor == 1:
        return blocks, gradient.reshape(gather.joined_shape)
    padded = backend.empty(gather.padded_shape, backend.dtype_name(part), backend.device_of(part), zero=True)
    backend.copy(padded[tuple(slice(0, n) for n in gradient.shape)], gradient, divisor)
    return blocks, padded.reshape(gather.joined_shape)


def block_numel(gather: Gather) -> int:
    """Returns the elements of one block."""
    return math.prod(gather.layout.block_shape)
