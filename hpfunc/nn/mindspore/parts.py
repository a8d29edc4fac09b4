"""`Parts` of MindSpore's cells, and which of their parameters are state.

# Note [State of a cell]
MindSpore does not mark parameters that the forward pass writes: batch normalisation keeps its moving statistics as
parameters without gradient, and a frozen weight is such a parameter, too. Frozen weights are sharded; statistics are
each rank's own. Statistics are recognised by their names in MindSpore's own norms. Any other state of a cell has to be
a buffer (`Cell.register_buffer`).
"""

from __future__ import annotations

import math
from typing import Any

from mindspore import nn

from ...backends.mindspore.private import params_of
from .._parts import Parts

STATE = frozenset({"moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"})


def is_state(name: str, parameter: object) -> bool:
    """Returns whether a parameter of a cell is state. See Note [State of a cell]."""
    return name in STATE and not getattr(parameter, "requires_grad", False)


def _own(cell: nn.Cell) -> dict[str, Any]:
    return {name: x for name, x in params_of(cell).items() if x is not None and not is_state(name, x)}


PARTS = Parts(
    kind=nn.Cell,
    method="construct",
    lists=(nn.CellList, nn.SequentialCell, nn.CellDict),
    unset=(nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct),
    named=lambda cell: dict(cell.cells_and_names()),
    children=lambda cell: cell.name_cells().items(),
    own=_own,
    size_bytes=lambda parameter: math.prod(parameter.shape) * parameter.itemsize,
)
