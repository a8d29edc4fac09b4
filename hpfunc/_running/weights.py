"""`weight_record`: the `Weight` of a program for a sharded array."""

from __future__ import annotations

from functools import lru_cache

from .._values.layout import Gather
from .._values.numerics import Numerics
from ..planning.program import Weight
from .blocks import block_numel


@lru_cache(maxsize=65536)
def weight_record(
    gather: Gather,
    shard_dtype: str,
    numerics: Numerics,
    num_backwards: int,
    trainable: bool,
    origin: int | None,
    rows: tuple[int, ...],
    name: str,
) -> Weight:
    """Returns the planner's record of one array with this gather. Equal arguments give the same object."""
    dtype, layout = numerics.param_dtype or shard_dtype, gather.layout
    num_terms = layout.mesh.axis_size(layout.mesh.data_axes) * num_backwards
    return Weight(
        name=name,
        block_numel=block_numel(gather),
        dtype=dtype,
        shard_dtype=shard_dtype,
        reduce_dtype=numerics.reduce_dtype or dtype,
        accum_dtype=numerics.accum_dtype or shard_dtype,
        gather_axes=gather.axes,
        num_shards=gather.num_blocks,
        reduce_axes=layout.reduce_axes,
        num_replicas=layout.mesh.axis_size(layout.reduce_axes),
        divisor=num_terms if numerics.reduce_op == "mean" else 1,
        even=layout.is_even,
        direct=gather.is_direct,
        trainable=trainable,
        origin=origin,
        rows=rows,
    )
