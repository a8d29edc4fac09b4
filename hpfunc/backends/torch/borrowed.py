"""Gradients as autograd hands them to a node, and whether anybody else has their memory.

# Note [Borrowed gradients]
autograd gives one tensor to several nodes (``a + b``), gives views of one tensor to several, and gives on what a custom
function returns, which may keep it and write into it at its next call. A gradient that is sent while later units
compute must not change meanwhile. So what somebody else holds is copied at once, as `torch.Tensor.backward` does it for
``.grad``. Whether somebody does is told by counters: of the tensor's handles, of Python's references to it, and of the
tensors over its storage; if it is a view, also of its base. What they show for a gradient that nobody else has is found
by a small backward on first use, and so is that they see who else might have it. If they do not, everything is copied.
Memory from outside of torch (numpy's, say) has an owner that no counter knows: it is copied, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch

Tensor = torch.Tensor
_count_storage = cast(Any, torch._C)._storage_Use_Count


def take(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients that are dense, hold their values in memory, and are nobody else's; copies those that are not.

    To be called with the arguments of a node's backward, out of the backward itself.
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
    """Returns how many hold a gradient, and its base if it is a view of another tensor."""
    storage = gradient.untyped_storage()
    held = (cast(Any, gradient)._use_count(), sys.getrefcount(gradient), _count_storage(storage._cdata))
    if not storage.resizable():
        return ()
    if not gradient._is_view():
        return held
    base = cast(Any, gradient._base)
    return (*held, base._use_count(), sys.getrefcount(base))


class _Lender(torch.autograd.Function):
    """Gives away whole weights as a unit does; its backward notes who holds their gradients."""

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
    """Returns who holds the gradients of two weights, of which an older tensor and they are made use of."""
    found: list[tuple[int, ...]] = []
    with torch.enable_grad():
        x, anchor = torch.ones(4, requires_grad=True), torch.ones(1, requires_grad=True)
        older = x * 1.0
        left, right, _ = _Lender.apply(found, 4, anchor)
        torch.autograd.grad(use(older, left, right).sum(), [anchor, x], allow_unused=True)
    return found


@cache
def _alone() -> frozenset[tuple[int, ...]]:
    """Returns what `_holders` says of gradients that nobody else has; nothing if others look alike."""
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
