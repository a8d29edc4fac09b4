"""`Foreach` on torch: its multi-tensor operators. One kernel serves many tensors, on a CPU one loop in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import private
from .modes import ordinary

Tensors = list[torch.Tensor]

# On a CPU a pass over all weights would come back to each with a cold cache. Groups of 1 MiB took 25 ms where a single
# group took 43, and tensors one at a time 51 (AdamW on 24 tensors, 13 MB, one core); with 200 tensors of 64 elements it
# was 3, 4 and 17.
_HOST_GROUP_BYTES = 1 << 20


class TorchForeach:
    """See `Foreach`."""

    def groups(self, tensors: Tensors) -> list[list[int]]:
        found: dict[object, list[list[int]]] = {}
        filled: dict[object, int] = {}
        for place, tensor in enumerate(tensors):
            key, limit = (tensor.device, tensor.dtype), _HOST_GROUP_BYTES if tensor.device.type == "cpu" else 1 << 62
            if key not in found or filled[key] + tensor.nbytes > limit:
                found.setdefault(key, []).append([])
                filled[key] = 0
            found[key][-1].append(place)
            filled[key] += tensor.nbytes
        return [group for groups in found.values() for group in groups]

    def zeros(self, xs: Tensors) -> list[torch.Tensor]:
        return [torch.zeros_like(x, dtype=_wide(x.dtype), requires_grad=False) for x in xs]

    @torch.no_grad()
    def widened(self, xs: Tensors) -> list[torch.Tensor]:
        return [x.to(_wide(x.dtype)) for x in xs]

    @torch.no_grad()
    def cast(self, xs: Tensors, ys: Tensors) -> list[torch.Tensor]:
        return [x.to(y.dtype) for x, y in zip(xs, ys, strict=True)]

    @torch.no_grad()
    def copy(self, xs: Tensors) -> list[torch.Tensor]:
        return [x.clone() for x in xs]

    @torch.no_grad()
    def writable(self, xs: Tensors) -> list[torch.Tensor]:
        # 0: no two elements share memory; 1: some do, and torch refuses to write; 2: torch cannot tell, and writes.
        with torch.inference_mode(False):
            return [x.clone() if private.internal_overlap(x) == 1 else x for x in map(ordinary, xs)]

    @torch.no_grad()
    def scaled(self, xs: Tensors, factor: float | torch.Tensor | list[float]) -> list[torch.Tensor]:
        # A product of two 0-dim tensors has the wider dtype of the two.
        return [y.to(x.dtype) for x, y in zip(xs, private.foreach_mul(xs, factor), strict=True)]

    @torch.no_grad()
    def added(self, xs: Tensors, ys: Tensors, factor: float = 1.0) -> list[torch.Tensor]:
        return [z.to(x.dtype) for x, z in zip(xs, private.foreach_add(xs, ys, alpha=factor), strict=True)]

    @torch.no_grad()
    def roots(self, xs: Tensors) -> list[torch.Tensor]:
        return list(private.foreach_sqrt(xs))

    @torch.no_grad()
    def scale_(self, xs: Tensors, factor: float) -> None:
        private.foreach_mul_(xs, factor)

    @torch.no_grad()
    def divide_(self, xs: Tensors, divisor: float) -> None:
        private.foreach_div_(xs, divisor)

    @torch.no_grad()
    def shift_(self, xs: Tensors, number: float) -> None:
        private.foreach_add_(xs, number)

    @torch.no_grad()
    def add_(self, xs: Tensors, ys: Tensors) -> None:
        private.foreach_add_(xs, ys)

    @torch.no_grad()
    def lerp_(self, xs: Tensors, ys: Tensors, weight: float) -> None:
        private.foreach_lerp_(xs, ys, weight)

    @torch.no_grad()
    def add_square_(self, xs: Tensors, ys: Tensors, factor: float) -> None:
        private.foreach_addcmul_(xs, ys, ys, factor)

    @torch.no_grad()
    def add_quotient_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: float) -> None:
        private.foreach_addcdiv_(xs, ys, zs, factor)

    @torch.no_grad()
    def num_not_finite(self, xs: Tensors) -> torch.Tensor:
        filled = [x for x in xs if x.numel()]
        if not filled:
            return torch.zeros((), device=xs[0].device)
        # The largest element is NaN or infinite if any is. It is in the dtype of its tensor: no narrower one.
        largest = private.foreach_norm(filled, torch.inf)
        return torch.stack([torch.isfinite(x) for x in largest]).logical_not().sum(dtype=torch.float32)

    @torch.no_grad()
    def powers(self, parts: Sequence[Tensors], ord: float, beside: Tensors) -> torch.Tensor:
        wide = torch.float64 if any(x.dtype == torch.float64 for x in beside) else torch.float32
        return torch.stack([_power([x for x in part if x.numel()], ord, wide, beside[0].device) for part in parts])

    @torch.no_grad()
    def root(self, x: torch.Tensor, ord: float) -> torch.Tensor:
        return x.pow(1.0 / ord)


def _power(xs: Tensors, ord: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not xs:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(private.foreach_norm(xs, ord, dtype=dtype))
    return norms.max() if ord == math.inf else norms.pow(ord).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
