"""`Foreach` on MindSpore: on a CPU by torch's operators, on an accelerator by MindSpore's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import mindspore
import optree
from mindspore import mint

from ..foreach import Foreach
from ..protocol import Backend

Tensor = Any
Tensors = list[Any]


class HostForeach:
    """On a CPU: every operation is torch's, on the memory that both frameworks see.

    MindSpore's own operators cannot write into a tensor there, and would be one dispatch for each tensor.
    """

    def __init__(self, backend: Backend, torch: Foreach) -> None:
        self._backend, self._torch = backend, torch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation, is_ours = getattr(self._torch, name), self._backend.is_tensor

        def call(xs: Tensors, *others: Any) -> Any:
            # Tensors to write into were made here or are shards: contiguous, so torch sees their memory, not a copy.
            assert not name.endswith("_") or all(x.is_contiguous() for x in xs)
            given = cast(Any, (xs, *others))
            found = operation(*optree.tree_map(lambda x: self._backend.detach(x) if is_ours(x) else x, given))
            return optree.tree_map(lambda x: x if isinstance(x, int) else self._backend.give(x), found)

        return call

    def writable(self, xs: Tensors) -> list[Tensor]:
        return [x if x.is_contiguous() else self.copy([x])[0] for x in xs]


class DeviceForeach:
    """On an accelerator, where MindSpore's operators write in place. It has not run: that needs an Ascend."""

    def groups(self, tensors: Tensors) -> list[list[int]]:
        return [list(range(len(tensors)))] if tensors else []

    def zeros(self, xs: Tensors) -> list[Tensor]:
        return [mint.zeros_like(x, dtype=_wide(x.dtype)) for x in xs]

    def widened(self, xs: Tensors) -> list[Tensor]:
        return [_to(x, _wide(x.dtype)) for x in xs]

    def cast(self, xs: Tensors, ys: Tensors) -> list[Tensor]:
        return [_to(x, y.dtype) for x, y in zip(xs, ys, strict=True)]

    def copy(self, xs: Tensors) -> list[Tensor]:
        return [mint.clone(x) for x in xs]

    def writable(self, xs: Tensors) -> list[Tensor]:
        return [x if x.is_contiguous() else mint.clone(x) for x in xs]

    def scaled(self, xs: Tensors, factor: float | Tensor | list[float]) -> list[Tensor]:
        factors = factor if isinstance(factor, list) else [factor] * len(xs)
        return [_to(mint.mul(x, f), x.dtype) for x, f in zip(xs, factors, strict=True)]

    def added(self, xs: Tensors, ys: Tensors, factor: float = 1.0) -> list[Tensor]:
        return [_to(mint.add(x, y, alpha=factor), x.dtype) for x, y in zip(xs, ys, strict=True)]

    def roots(self, xs: Tensors) -> list[Tensor]:
        return [mint.sqrt(x) for x in xs]

    def scale_(self, xs: Tensors, factor: float) -> None:
        for x in xs:
            x.mul_(factor)

    def divide_(self, xs: Tensors, divisor: float) -> None:
        for x in xs:
            x.div_(divisor)

    def shift_(self, xs: Tensors, number: float) -> None:
        for x in xs:
            x.add_(number)

    def add_(self, xs: Tensors, ys: Tensors) -> None:
        for x, y in zip(xs, ys, strict=True):
            x.copy_(mint.add(x, y))

    def lerp_(self, xs: Tensors, ys: Tensors, weight: float) -> None:
        for x, y in zip(xs, ys, strict=True):
            x.add_(mint.sub(y, x), alpha=weight)

    def add_square_(self, xs: Tensors, ys: Tensors, factor: float) -> None:
        for x, y in zip(xs, ys, strict=True):
            x.add_(mint.mul(y, y), alpha=factor)

    def add_quotient_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: float) -> None:
        for x, y, z in zip(xs, ys, zs, strict=True):
            x.add_(mint.div(y, z), alpha=factor)

    def num_not_finite(self, xs: Tensors) -> Tensor:
        finite = [mint.all(mint.isfinite(x)) for x in xs]
        return sum((_to(mint.logical_not(x), mindspore.float32) for x in finite), start=mint.zeros(()))

    def powers(self, parts: Sequence[Tensors], ord: float, beside: Tensors) -> Tensor:
        wide = mindspore.float64 if any(x.dtype == mindspore.float64 for x in beside) else mindspore.float32
        return mint.stack([_power([_to(x, wide) for x in part if x.size], ord, wide) for part in parts])

    def root(self, x: Tensor, ord: float) -> Tensor:
        return mint.sqrt(x) if ord == 2 else mint.pow(x, mint.full_like(x, 1.0 / ord))  # a plain exponent is float32


def _power(xs: Tensors, ord: float, dtype: Any) -> Tensor:
    if not xs:
        return mint.zeros((), dtype=dtype)
    if ord == math.inf:
        return mint.max(mint.stack([mint.max(mint.abs(x)) for x in xs]))
    return sum(mint.sum(mint.square(x) if ord == 2 else mint.pow(mint.abs(x), ord)) for x in xs)


def _wide(dtype: Any) -> Any:
    return mindspore.float32 if dtype in (mindspore.float16, mindspore.bfloat16) else dtype


def _to(x: Tensor, dtype: Any) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
