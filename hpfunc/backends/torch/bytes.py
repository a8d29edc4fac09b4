"""Tensors of torch as the bytes of their elements."""

from __future__ import annotations

import numpy as np
import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the elements, in row-major order. Shape: (n,).

    They share the memory of the tensor if it holds the elements in this order, without lazy conjugation or negation;
    otherwise they are a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride along a dim of size 1, which `view` of another dtype does not take.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def to_bytes(tensor: torch.Tensor, *, copy: bool) -> np.ndarray:
    """See `Memory.to_bytes`."""
    flat = as_bytes(tensor)
    on_host = flat.cpu()
    return np.array(on_host.numpy(), copy=copy and on_host.data_ptr() == flat.data_ptr())
