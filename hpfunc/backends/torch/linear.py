"""Linear maps that torch differentiates by their transposes, and whether anything differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..._errors import UsageError, message
from . import private

Tensor = torch.Tensor


class _Linear(torch.autograd.Function):
    """A linear map and its transpose, closed under differentiation of any kind and order."""

    @staticmethod
    def forward(x: Tensor, forward: Any, transpose: Any) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.forward_map, ctx.transpose_map = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None]:
        return linear(ctx.transpose_map, ctx.forward_map, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return linear(ctx.forward_map, ctx.transpose_map, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, forward: Any, transpose: Any) -> tuple[Tensor, int]:
        # Maps index dims from the front and do not touch further ones, so the mapped dim goes to the end.
        assert in_dims[0] is not None
        out = linear(forward, transpose, x.movedim(in_dims[0], -1))
        return out, out.dim() - 1


def linear(forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    """Returns ``forward(x)`` with this transpose; None is a map that may not be differentiated."""
    if transpose is None:
        if is_transformed([x]) and torch.is_grad_enabled():
            raise UsageError(message("hpfunc", "this collective has no derivative", hint="call it on x.detach()"))
        return forward(x)
    return _Linear.apply(x, forward, transpose)


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Returns whether torch.func is active, or one of the tensors takes part in a differentiation."""
    if private.interpreter_stack() is not None:
        return True
    records = torch.is_grad_enabled()
    return any(
        (records and tensor.requires_grad) or forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )
