"""Autograd functions as libraries write them: what their backward returns is theirs, or somebody else's, memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

Tensor = torch.Tensor

KEPT: list[tuple[Tensor, Tensor]] = []
"""Tensors that somebody holds after backward, and what was in them."""


def keep(tensor: Tensor) -> Tensor:
    """Notes a tensor, which nobody may write into from here on."""
    KEPT.append((tensor, tensor.detach().clone()))
    return tensor


def hooked(weight: Tensor) -> Tensor:
    """Keeps the gradients of a tensor, as a debugger does."""

    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:  # where a node has several outputs, torch calls hooks without a gradient, too
            keep(gradient)

    if weight.requires_grad:
        weight.register_hook(hook)
    return weight


class KeepsGradient(Function):
    """``x @ w.T``. The gradient of the weight is a buffer that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        x, w = ctx.saved_tensors
        return g @ w, keep(g.t() @ x)


class Transposed(Function):
    """The same; the gradient is a transposed view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w.t())
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        x, wt = ctx.saved_tensors
        return g @ wt.t(), (x.t() @ g).t()


class Attribute(Function):
    """The same; it keeps the weight as an attribute, as fused kernels do; it returns a slice of a larger buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        gradient = g.t() @ ctx.x
        buffer = gradient.new_ones(gradient.shape[0] + 2, gradient.shape[1])
        buffer[1:-1] = gradient
        keep(buffer)
        return g @ ctx.w, buffer[1:-1]


class SharesOne(Function):
    """``a + b``: both get the very tensor that came."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        return g, g


class SharesViews(Function):
    """``a + b.T``: both get views of one buffer that it keeps."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        buffer = keep(g.clone())
        return buffer.view_as(buffer), buffer.t()


class Expanded(Function):
    """``x + w.sum()``: one number for all elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.shape = w.shape
        return x + w.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        return g, g.sum().expand(ctx.shape)


class Negated(Function):
    """``x - w``: a tensor with the negative bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x - w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        return g, torch._neg_view(g.sum(0))


class ImaginaryPart(Function):
    """``x - w``: the imaginary part of a conjugate, so both strided and with the negative bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x - w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        total = g.sum(0)
        return g, torch.complex(torch.zeros_like(total), total).conj().imag


class NoGradient(Function):
    """``x * w``, and the weight gets None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,) = gradients
        (w,) = ctx.saved_tensors
        return g * w, None


def _if_reached(g: Tensor, gradient: Tensor) -> Tensor:
    # A backward is a linear map: zeros, which is what a unit gives that the loss does not reach, make zeros.
    return gradient if bool(g.any()) else torch.zeros_like(gradient)


class WeightItself(Function):
    """``x + (w * w).sum() / 2``, straight through: the gradient is the weight, the very tensor that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x + w.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        (w,) = ctx.saved_tensors
        return g, _if_reached(g, w)


class OtherWeight(Function):
    """``x + (a * b).sum()``, straight through: each gets the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return x + (a * b).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (g,) = gradients
        a, b = ctx.saved_tensors
        return g, _if_reached(g, b), _if_reached(g, a)


class PassesOn(Function):
    """The identity of a weight, in memory of its own; its gradient is the tensor that came."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (g,) = gradients
        return g
