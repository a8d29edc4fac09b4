"""Tensors of a framework as bytes in the memory of the host, and back: all that a checkpoint asks of a framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Buffer = Any  # a flat numpy array of bytes; `import hpfunc` loads no numpy


class HostBytes(Protocol):
    """One framework's tensors and the bytes of their elements."""

    def to_bytes(self, tensor: Any, *, copy: bool) -> Buffer:
        """Returns the elements in row-major order. Without `copy` they may share the memory of the tensor."""
        ...

    def from_bytes(self, data: Buffer, shape: Sequence[int], dtype: str, device: str) -> Any:
        """Returns a tensor on a device; on a CPU it may keep the memory of `data`."""
        ...
