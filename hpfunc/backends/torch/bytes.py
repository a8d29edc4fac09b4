"""Tensors of torch as the bytes of their elements."""

from __future__ import annotations

from collections.abc import Sequence

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


class TorchHostBytes:
    """See `HostBytes`."""

    def to_bytes(self, tensor: torch.Tensor, *, copy: bool) -> np.ndarray:
        flat = as_bytes(tensor)
        on_host = flat.cpu()
        return np.array(on_host.numpy(), copy=copy and on_host.data_ptr() == flat.data_ptr())

    def from_bytes(self, data: np.ndarray, shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(tuple(shape)).to(device)
