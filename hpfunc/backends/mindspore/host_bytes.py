"""`HostBytes` on MindSpore, through numpy: the same on every device, and without torch."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore
import numpy as np
from mindspore.common.np_dtype import bfloat16

from ..._errors import CheckpointError, message


class MindSporeHostBytes:
    """See `HostBytes`."""

    def to_bytes(self, tensor: mindspore.Tensor, *, copy: bool) -> np.ndarray:
        return np.array(_flat_bytes(tensor.asnumpy()), copy=copy)

    def from_bytes(self, data: np.ndarray, shape: Sequence[int], dtype: str, device: str) -> mindspore.Tensor:
        if dtype.startswith("float8"):  # numpy has none, and MindSpore's own numpy types are few
            hint = "save it in bfloat16, or load it on torch"
            raise CheckpointError(message("hpfunc.checkpoint", f"MindSpore takes no {dtype} from the host", hint=hint))
        array = data.view(bfloat16 if dtype == "bfloat16" else dtype)
        return mindspore.Tensor.from_numpy(array.reshape(tuple(shape)))  # on a device, its first operator moves it


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
