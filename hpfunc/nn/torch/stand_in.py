"""Stand-ins, which replace the tensors in a module's copy, and the call that knows their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._running.context import module_call, module_unit
from ..._transforms.unit import unit
from ..._values.array import is_sharded
from ...backends.torch import private
from .._slots import refuse_writes, whole_of
from .inside import Home, refuse_own_backward

Tensor = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# Attributes that are known without values. Models read them anywhere: `x.to(self.proj.weight.dtype)`.
_METADATA = {
    *_getters("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf", "itemsize", "nbytes", "is_sparse"),
    *_getters("is_nested", "is_quantized", "grad"),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}  # fmt: skip
_PLACE = {*_getters("device", "is_cuda", "is_cpu", "is_meta"), Tensor.get_device}


class StandIn(Tensor):
    """A parameter, or a buffer outside of calls, without values: shape and dtype. Any other use asks for the values."""

    path: str
    home: Home | None

    @staticmethod
    def of(path: str, tensor: Tensor, home: Home | None = None, *, is_param: bool = True) -> StandIn:
        """Returns that of a parameter, or of a buffer."""
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        made = private.make_subclass(StandIn, empty, tensor.requires_grad)
        made.path, made.home = path, home
        private.mark_parameter(made, is_param)
        return made

    def value(self) -> Tensor:
        """Returns the values."""
        opened = self.home.open if self.home is not None and module_unit.get() is None else None
        found = None if opened is None else opened.value(self.path)
        if found is None and module_call.get() is None and private.graph_task() != -1:
            raise refuse_own_backward([self.path])
        return whole_of(self.path) if found is None else found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.no_torch_function():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            call = module_call.get()
            if func in _PLACE:
                return func(torch.empty(0, device=call.device if call else "cpu"), *args[1:])
        args, kwargs = private.tree_map_only(StandIn, StandIn.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"StandIn({self.path!r}, shape={tuple(self.shape)})"


@dataclass(slots=True)
class ModuleCall:
    """One call of a module's copy.

    Attributes:
        params: by path.
        device: where it computes.
        modes: of each module, whether it trains.
        wholes: parameters that were used outside of their units, with their versions; by path and grad mode.
        placed: the buffers as the copy holds them, with their versions; by path.
        changed: paths of buffers that units changed.
        starts: the buffers of each unit before its first use.
    """

    params: Mapping[str, Any]
    device: Any
    modes: tuple[bool, ...]
    wholes: dict[tuple[str, bool], tuple[Tensor, int]] = field(default_factory=dict)
    placed: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    starts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def whole(self, path: str) -> Tensor:
        """Returns a parameter's values, for use outside of the unit that it belongs to: as a unit of its own."""
        key = path, torch.is_grad_enabled()
        if key in self.wholes:
            return self.wholes[key][0]
        array = self.params[path]
        value = unit(torch.clone, name=path)(array) if is_sharded(array) else array.clone()
        if not private.enclosing_hooks(True):  # activation checkpointing recomputes it with everything else
            self.wholes[key] = value, private.version_of(value)
        return value

    def check_unwritten(self) -> None:
        """Raises UsageError if one of those was written to."""
        used = self.wholes.items()
        written = {path for (path, _), (value, version) in used if private.version_of(value) != version}
        if written:
            raise refuse_writes(sorted(written))
