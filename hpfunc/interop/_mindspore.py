"""`Shared` on MindSpore.

MindSpore reads DLPack capsules by a function of its own, which ends the process on some that numpy makes. On a CPU the
transport is torch's anyway, so torch reads them, and numpy hands the memory on.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import ops

from .. import backends


class MindSporeShared:
    """See `Shared`."""

    def as_tensor(self, value: Any) -> mindspore.Tensor:
        if isinstance(value, mindspore.Tensor):
            return ops.stop_gradient(value)
        if mindspore.get_context("device_target") != "CPU":
            raise TypeError("on a device MindSpore takes its own tensors only")
        from ._torch import BRIDGE

        held = BRIDGE.as_tensor(value)
        if not held.is_contiguous():
            raise BufferError("it is strided, and MindSpore takes no such memory")
        return backends.get("mindspore").give(held)

    def as_numpy(self, tensor: mindspore.Tensor) -> Any:
        if tensor.dtype == mindspore.bfloat16 or mindspore.get_context("device_target") != "CPU":
            raise TypeError("numpy does not know it")
        return tensor.asnumpy()


BRIDGE = MindSporeShared()
