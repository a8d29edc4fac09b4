"""Gradients that autograd passes to a node, and whether anybody else holds their memory.

# Note [Borrowed gradients]
autograd passes one tensor to several nodes (``a + b``), passes views of one tensor to several nodes, and passes the
result of a custom function on, which may keep it and write into it at its next call. A gradient that is sent while
later units compute must not change meanwhile. So a gradient that somebody else holds is copied at once, as
`torch.Tensor.backward` does for ``.grad``. Counters tell whether somebody does: those of the tensor's handles, of
Python's references to it, and of the tensors over its storage; for a view, also those of its base. On first use a small
backward finds what the counters show for a gradient that nobody else holds, and that they differ for each way to share
one. If they do not differ, all gradients are copied. Memory from outside of torch (such as numpy's) has an owner that
no counter knows, so it is copied, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from . import private

Tensor = torch.Tensor


def take(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients that are dense, hold their values in memory, and are held by nobody else; copies all others.

    Call it with the arguments of a node's backward, directly from that backward.
    """
    alone = _alone()
    taken: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None or gradient.layout is not torch.strided:
            taken.append(None if gradient is None else gradient.to_dense())
        elif gradient.is_conj() or gradient.is_neg():
            taken.append(gradient.resolve_conj().resolve_neg())
        elif _holders(gradient) in alone:
            taken.append(gradient)
        else:
            taken.append(gradient.clone(memory_format=torch.contiguous_format))
    return taken


def _holders(gradient: Tensor) -> tuple[int, ...]:
    """Returns the number of holders of a gradient, and of its base if it is a view of another tensor."""
    storage = gradient.untyped_storage()
    num_over = private.storage_use_count(private.storage_id(storage))
    held = (private.use_count(gradient), sys.getrefcount(gradient), num_over)
    if not storage.resizable():
        return ()
    if not private.is_view(gradient):
        return held
    base = private.base_of(gradient)
    return (*held, private.use_count(base), sys.getrefcount(base))


class _Lender(torch.autograd.Function):
    """Returns whole weights as a unit does; its backward records the holders of their gradients."""

    @staticmethod
    def forward(ctx: Any, found: list[tuple[int, ...]], numel: int, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.found = found
        return torch.ones(numel), torch.ones(numel), anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        for gradient in gradients[:-1]:
            if gradient is not None:
                ctx.found.append(_holders(gradient))
        return None, None, None


def _lent(use: Callable[..., Tensor]) -> list[tuple[int, ...]]:
    """Returns the holders of the gradients of two weights in a small backward that uses them and an older tensor."""
    found: list[tuple[int, ...]] = []
    with torch.enable_grad():
        x, anchor = torch.ones(4, requires_grad=True), torch.ones(1, requires_grad=True)
        older = x * 1.0
        left, right, _ = _Lender.apply(found, 4, anchor)
        torch.autograd.grad(use(older, left, right).sum(), [anchor, x], allow_unused=True)
    return found


@cache
def _alone() -> frozenset[tuple[int, ...]]:
    """Returns the results of `_holders` for gradients that nobody else holds; empty if shared ones give the same."""
    kept: list[Tensor] = []

    def keeping(how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def use(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            a.register_hook(lambda gradient: kept.append(how(gradient)))
            return x * a

        return use

    lone = {*_lent(lambda x, a, b: x * a + x.exp() * b), *_lent(lambda x, a, b: x * a.view(2, 2).view(4))}
    shared = [
        *_lent(lambda x, a, b: x * (a + b)),
        *_lent(lambda x, a, b: x + a),
        *_lent(lambda x, a, b: x + a.view(4, 1).view(4)),
        *_lent(lambda x, a, b: torch.cat([a, b]) * 2.0),
        *_lent(keeping(lambda gradient: gradient)),
        *_lent(keeping(torch.Tensor.detach)),
        *_lent(keeping(lambda gradient: gradient[:1])),
    ]
    return frozenset() if lone.intersection(shared) else frozenset(lone)
