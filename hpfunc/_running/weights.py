"""`weight_record`: the `Weight` of a program for a sharded array."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .._values.layout import Gather
from .._values.numerics import Numerics
from .._values.reduction_axes import divisor, reduce_axes
from ..planning.program import Weight
from .blocks import block_numel


@lru_cache(maxsize=65536)
def weight_record(gather: Gather, shard_dtype: str, numerics: Numerics, num_backwards: int, **known: Any) -> Weight:
    """Returns the planner's record of one array with this gather, and its fields that are known already.

    Equal arguments give the same object.
    """
    dtype, layout = numerics.param_dtype or shard_dtype, gather.layout
    over = reduce_axes(layout)
    return Weight(
        block_numel=block_numel(gather),
        dtype=dtype,
        shard_dtype=shard_dtype,
        reduce_dtype=numerics.reduce_dtype or dtype,
        accum_dtype=numerics.accum_dtype or shard_dtype,
        gather_axes=gather.axes,
        num_shards=gather.num_blocks,
        reduce_axes=over,
        num_replicas=layout.mesh.axis_size(over),
        divisor=divisor(layout.mesh, numerics, num_backwards),
        even=layout.is_even,
        direct=gather.is_direct,
        **known,
    )
