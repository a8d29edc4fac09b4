"""Tensors of a framework as bytes in the memory of the host, and back: all that a checkpoint asks of a framework."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

from ._format import Buffer


class Host(Protocol):
    """One framework's tensors and the bytes of their elements."""

    def to_bytes(self, tensor: Any, *, copy: bool) -> Buffer:
        """Returns the elements in row-major order; with `copy` in memory of their own, else maybe the tensor's."""
        ...

    def from_bytes(self, data: Buffer, shape: Sequence[int], dtype: str, device: str) -> Any:
        """Returns a tensor on a device; on a CPU it may keep the memory of `data`."""
        ...


@cache
def host(framework: str) -> Host:
    """Returns the implementation for a framework."""
    return cast(Host, importlib.import_module(f"._{framework}", __package__).HOST)
