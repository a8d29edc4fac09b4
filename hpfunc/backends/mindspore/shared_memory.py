"""`SharedMemory` on MindSpore.

MindSpore reads DLPack capsules by a function of its own, which ends the process on some that numpy makes. On a CPU the
transport is torch's anyway, so torch reads them, and numpy hands the memory on.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import ops

from ..interop import SharedMemory
from ..protocol import Backend


class MindSporeInterop:
    """See `SharedMemory`; `torch` is torch's, if it is the transport of `backend`."""

    def __init__(self, backend: Backend, torch: SharedMemory | None = None) -> None:
        self._backend, self._torch = backend, torch

    def as_tensor(self, value: Any) -> mindspore.Tensor:
        if isinstance(value, mindspore.Tensor):
            return ops.stop_gradient(value)
        if self._torch is None:
            raise TypeError("on a device MindSpore takes its own tensors only")
        held = self._torch.as_tensor(value)
        if not held.is_contiguous():
            raise BufferError("it is strided, and MindSpore takes no such memory")
        return self._backend.give(held)

    def as_numpy(self, tensor: mindspore.Tensor) -> Any:
        if tensor.dtype == mindspore.bfloat16 or self._torch is None:
            raise TypeError("numpy does not know it")
        return tensor.asnumpy()
