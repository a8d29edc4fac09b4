"""Tensors of torch as the bytes of their elements."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the elements, in row-major order. Shape: (n,).

    They are the tensor's own memory if that holds the elements in this order, and these are no lazy conjugates or
    negatives; else a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride along a dim of size 1, which `view` of another dtype does not take.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
