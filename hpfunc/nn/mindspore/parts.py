"""`Parts` of MindSpore's cells, and which of their parameters are state.

# Note [State of a cell]
MindSpore does not mark parameters that the forward pass writes: batch normalisation keeps its moving statistics as
parameters without gradient, and a frozen weight is such a parameter, too. Frozen weights are sharded; statistics are
each rank's own. Statistics are recognised by their names in MindSpore's own norms. Any other state of a cell has to be
a buffer (`Cell.register_buffer`).
"""

from __future__ import annotations

from collections.abc import Iterable

from mindspore import nn

STATE = frozenset({"moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"})
_LISTS = (nn.CellList, nn.SequentialCell, nn.CellDict)


def is_state(name: str, parameter: object) -> bool:
    """Returns whether a parameter of a cell is state. See Note [State of a cell]."""
    return name in STATE and not getattr(parameter, "requires_grad", False)


class MindSporeParts:
    """See `Parts`."""

    kind = nn.Cell
    method = "construct"

    def named(self, module: nn.Cell) -> dict[str, nn.Cell]:
        return dict(module.cells_and_names())

    def children(self, module: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
        return module.name_cells().items()

    def own(self, module: nn.Cell) -> list[str]:
        params = vars(module)["_params"].items()
        return [name for name, x in params if x is not None and not is_state(name, x)]

    def computes_own(self, module: nn.Cell) -> bool:
        return False

    def is_list(self, module: nn.Cell) -> bool:
        return isinstance(module, _LISTS)

    def is_called(self, module: nn.Cell) -> bool:
        unset = (nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct)
        return type(module).construct not in unset


PARTS = MindSporeParts()
