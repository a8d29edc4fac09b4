"""A layer that calls `backward` within its backward, as reversible layers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


class Again(torch.autograd.Function):
    """Keeps the input alone. Its backward computes the output once more and calls `backward` on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.fn(x).backward(gradients[0])
        return x.grad, None
