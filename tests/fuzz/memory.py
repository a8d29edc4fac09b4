"""Which tensors share memory, and bits of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor and the one after its last; (0, 0) if it has none."""
    if tensor.numel() == 0:
        return 0, 0
    first = tensor.data_ptr()
    last = sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Returns whether the spans of two tensors have a byte in common."""
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


def overlaps_itself(tensor: Tensor) -> bool:
    """Returns whether two of its elements are the same memory, as those of an expanded tensor."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and values; NaN is like NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - NaN is not itself


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns what is in them now."""
    return [tensor.detach().clone() for tensor in tensors]
