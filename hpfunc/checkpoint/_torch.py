"""`Host` on torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..backends._torch_bytes import as_bytes


class TorchHost:
    """See `Host`."""

    def to_bytes(self, tensor: torch.Tensor, *, copy: bool) -> np.ndarray:
        flat = as_bytes(tensor)
        on_host = flat.cpu()
        return np.array(on_host.numpy(), copy=copy and on_host.data_ptr() == flat.data_ptr())

    def from_bytes(self, data: np.ndarray, shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(tuple(shape)).to(device)


HOST = TorchHost()
