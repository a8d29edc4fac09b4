"""How many bytes of tensors are alive."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in optree.tree_leaves(out):
            if type(leaf) is torch.Tensor and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self._sizes = {key: pair for key, pair in self._sizes.items() if not pair[0].expired()}
        return sum(size for _, size in self._sizes.values())
