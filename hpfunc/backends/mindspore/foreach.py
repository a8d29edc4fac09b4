"""`Foreach` on MindSpore. On a CPU torch's operators do the work, on the memory that both frameworks see.

MindSpore's own operators cannot write into a tensor there, and would be one dispatch for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import mint

from ..foreach import Foreach
from ..protocol import Backend

Tensor = Any
Tensors = list[Any]


class HostForeach:
    """See `Foreach`; `torch` is torch's, for the tensors that the runtime of `backend` holds."""

    def __init__(self, backend: Backend, torch: Foreach) -> None:
        self._backend, self._torch = backend, torch

    def _held(self, xs: Tensors) -> list[Any]:
        return [self._backend.detach(x) for x in xs]

    def _written(self, xs: Tensors) -> list[Any]:
        # Tensors to write into were made here or are shards: contiguous, so torch sees their memory, not a copy.
        assert all(x.is_contiguous() for x in xs)
        return self._held(xs)

    def _given(self, xs: Sequence[Any]) -> list[Tensor]:
        return [self._backend.give(x) for x in xs]

    def groups(self, tensors: Tensors) -> list[list[int]]:
        return self._torch.groups(self._held(tensors))

    def zeros(self, xs: Tensors) -> list[Tensor]:
        return self._given(self._torch.zeros(self._held(xs)))

    def widened(self, xs: Tensors) -> list[Tensor]:
        return self._given(self._torch.widened(self._held(xs)))

    def cast(self, xs: Tensors, ys: Tensors) -> list[Tensor]:
        return self._given(self._torch.cast(self._held(xs), self._held(ys)))

    def copy(self, xs: Tensors) -> list[Tensor]:
        return self._given(self._torch.copy(self._held(xs)))

    def writable(self, xs: Tensors) -> list[Tensor]:
        return [x if x.is_contiguous() else self.copy([x])[0] for x in xs]

    def scaled(self, xs: Tensors, factor: float | Tensor | list[float]) -> list[Tensor]:
        number = self._backend.detach(factor) if self._backend.is_tensor(factor) else factor
        return self._given(self._torch.scaled(self._held(xs), number))

    def added(self, xs: Tensors, ys: Tensors, factor: float = 1.0) -> list[Tensor]:
        return self._given(self._torch.added(self._held(xs), self._held(ys), factor))

    def roots(self, xs: Tensors) -> list[Tensor]:
        return self._given(self._torch.roots(self._held(xs)))

    def scale_(self, xs: Tensors, factor: float) -> None:
        self._torch.scale_(self._written(xs), factor)

    def divide_(self, xs: Tensors, divisor: float) -> None:
        self._torch.divide_(self._written(xs), divisor)

    def shift_(self, xs: Tensors, number: float) -> None:
        self._torch.shift_(self._written(xs), number)

    def add_(self, xs: Tensors, ys: Tensors) -> None:
        self._torch.add_(self._written(xs), self._held(ys))

    def lerp_(self, xs: Tensors, ys: Tensors, weight: float) -> None:
        self._torch.lerp_(self._written(xs), self._held(ys), weight)

    def add_square_(self, xs: Tensors, ys: Tensors, factor: float) -> None:
        self._torch.add_square_(self._written(xs), self._held(ys), factor)

    def add_quotient_(self, xs: Tensors, ys: Tensors, zs: Tensors, factor: float) -> None:
        self._torch.add_quotient_(self._written(xs), self._held(ys), self._held(zs), factor)

    def num_not_finite(self, xs: Tensors) -> Tensor:
        return self._backend.give(self._torch.num_not_finite(self._held(xs)))

    def sum_of_squares(self, xs: Tensors) -> Tensor:
        return self._backend.give(self._torch.sum_of_squares(self._held(xs)))


class DeviceForeach:
    """The same on an accelerator, where MindSpore's operators write in place. It has not run: that needs an Ascend."""

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

    def sum_of_squares(self, xs: Tensors) -> Tensor:
        wide = mindspore.float64 if any(x.dtype == mindspore.float64 for x in xs) else mindspore.float32
        return sum((mint.sum(mint.square(_to(x, wide))) for x in xs), start=mint.zeros((), dtype=wide))


def _wide(dtype: Any) -> Any:
    return mindspore.float32 if dtype in (mindspore.float16, mindspore.bfloat16) else dtype


def _to(x: Tensor, dtype: Any) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
