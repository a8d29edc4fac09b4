"""`from_module`, `init_module` and `to_module` for MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore
from mindspore import nn, ops

from ..._errors import LeafError, UsageError, message
from ..._transforms.shard import init
from ..._values.mesh import Mesh, PartitionSpec
from .._choose import choose
from .._function import ModuleFunction
from .._slots import replacements, whole
from .parts import PARTS
from .skeleton import CellSkeleton, named_tensors, plain

Tensor = Any
_INIT = "hpfunc.init_module"


def from_module(module: nn.Cell, units: Any, remat: bool) -> tuple[ModuleFunction, dict[str, Tensor]]:
    """See `hpfunc.from_module`."""
    params, buffers = named_tensors(module)
    return _function(module, units, {path: plain(x) for path, x in buffers.items()}, remat), params


def _function(module: nn.Cell, units: Any, buffers: dict[str, Tensor], remat: bool) -> ModuleFunction:
    skeleton = CellSkeleton(module, choose(PARTS, module, units), buffers, remat=remat)
    return ModuleFunction(skeleton, buffers, skeleton.modes, PARTS.method)


def init_module(
    source: Any, mesh: Mesh, specs: Any, units: Any, init_fn: Callable[[Any], None] | None, remat: bool
) -> tuple[ModuleFunction, dict[str, Any]]:
    """See `hpfunc.init_module`."""
    if isinstance(source, nn.Cell) or init_fn is not None:
        hint = "hpfunc.init_module(lambda: build(), mesh, specs); for a cell that exists hpfunc.from_module"
        raise UsageError(message(_INIT, "on MindSpore it takes a function that builds the cell, only", hint=hint))
    built: list[nn.Cell] = []

    def build() -> Any:
        module = source()
        if not isinstance(module, nn.Cell):
            raise LeafError(message(_INIT, f"a mindspore.nn.Cell is wanted, got {type(module).__name__}"))
        built.append(module)
        params, buffers = named_tensors(module)
        return {"params": params, "buffers": buffers}

    made = init(build, mesh, {"params": specs, "buffers": PartitionSpec()})
    buffers = {path: plain(array.local) for path, array in made["buffers"].items()}
    return _function(built[0], units, buffers, remat), made["params"]


def to_module(params: Mapping[str, Any], module: nn.Cell, buffers: Mapping[str, Tensor] | None) -> nn.Cell:
    """See `hpfunc.to_module`."""
    for _, x, value in replacements(named_tensors(module), params, buffers):
        new = plain(whole(value)).astype(x.dtype)  # a copy: MindSpore would take the memory itself
        if isinstance(x, mindspore.Parameter):
            x.set_data(new)
        else:
            ops.assign(x, new)
    return module
