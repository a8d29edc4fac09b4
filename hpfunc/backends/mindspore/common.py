"""Common code of MindSpore's backends: all of `Differentiation`, and what knows the caller's tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore
import numpy as np
import optree
from mindspore.common.np_dtype import bfloat16

from ..._errors import CheckpointError, LoweringError, message
from ..unit_use import UnitUse
from . import autograd
from .units import Bridge, is_tensor, use_plain

Tensor = Any


class MindSporeDifferentiation:
    """See `Differentiation`."""

    bridge: Bridge

    def is_abstract(self, value: Any) -> bool:
        return False

    is_tensor = staticmethod(is_tensor)

    def trains(self, tensor: Tensor) -> bool | None:
        return bool(tensor.requires_grad) if isinstance(tensor, mindspore.Parameter) else None

    def num_writes(self, tensor: Tensor) -> int | None:
        return None

    def adopt(self, gradient: Tensor) -> None:
        return None  # MindSpore does not tell who else holds it

    def to_bytes(self, tensor: Tensor, *, copy: bool) -> np.ndarray:
        return np.array(np.ascontiguousarray(tensor.asnumpy()).reshape(-1).view(np.uint8), copy=copy)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int], dtype: str, device: str) -> Tensor:
        if dtype.startswith("float8"):  # numpy has none, and MindSpore's own numpy types are few
            hint = "save it in bfloat16, or load it on torch"
            raise CheckpointError(message("hpfunc.checkpoint", f"MindSpore takes no {dtype} from the host", hint=hint))
        array = data.view(bfloat16 if dtype == "bfloat16" else dtype)
        return mindspore.Tensor.from_numpy(array.reshape(tuple(shape)))  # on a device, its first operator moves it

    def register(self, array_type: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
        """MindSpore has no pytrees of its own."""

    def tape(self, device: str) -> autograd.MindSporeTape:
        return autograd.MindSporeTape(self.bridge)

    def linear(
        self, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor] | None, x: Tensor
    ) -> Tensor:
        return autograd.linear(self.bridge, forward, transpose, x)

    is_transformed = staticmethod(autograd.is_transformed)

    def use_plain(
        self, fn: Callable[..., Any], wholes: Sequence[Tensor], use: UnitUse, *args: Any, **kwargs: Any
    ) -> Any:
        return use_plain(self.bridge, fn, wholes, use.names, *args, **kwargs)

    def ordinary(self) -> AbstractContextManager[Callable[[Any], Any] | None]:
        return nullcontext()  # MindSpore has no mode whose tensors cannot be differentiated later

    def leave_alone(self, fn: Callable[..., Any]) -> None:
        """Nothing to do: units run in PyNative mode only."""

    def abstract(self) -> AbstractContextManager[Callable[[Any], Any]]:
        rule = "MindSpore's operators cannot run without data, so a step cannot be lowered before it has run"
        hint = "run the step once; its schedule is `step.last_schedule`"
        raise LoweringError(message("hpfunc.sharded", rule, hint=hint))

    def deferred(self, init_fn: Callable[[], Any], prepare: Callable[[Any], Callable[[int, Tensor], Any]]) -> Any:
        """Makes the whole tree first: MindSpore's operators can be neither recorded nor run without data."""
        tree = init_fn()
        keep = prepare(tree)
        leaves, treedef = optree.tree_flatten(tree)
        del tree
        kept = []
        for i in range(len(leaves)):
            kept.append(keep(i, leaves[i]))
            leaves[i] = None
        return optree.tree_unflatten(treedef, kept)

    def random_states(self, device: str) -> list[bytes]:
        return []  # its own; numpy's, which its initializers draw from, is not of the framework

    def set_random_state(self, device: str, place: int, state: bytes) -> None:
        raise AssertionError("there are no states of MindSpore")
