"""What interop asks of a framework: shared memory, and distributed tensors if the framework has them."""

from __future__ import annotations

from typing import Any, Protocol

from .._values.mesh import Mesh

Placements = list[tuple[str, int | None]]
"""For each mesh axis: ``("shard", dim)`` (None: not cut), ``("partial", None)`` for a sum, ``("other", None)``."""


class SharedMemory(Protocol):
    """One framework's tensors in the memory of others."""

    def as_tensor(self, value: Any) -> Any:
        """Returns a tensor in the memory of a value, which is a tensor or supports DLPack.

        Raises:
            AttributeError, BufferError, RuntimeError, TypeError: its memory cannot be shared.
        """
        ...

    def as_numpy(self, tensor: Any) -> Any:
        """Returns a numpy array in the memory of a tensor.

        Raises:
            TypeError: numpy does not know the dtype, or the tensor lies on a device.
        """
        ...


class DTensors(SharedMemory, Protocol):
    """One framework's distributed tensors."""

    def device_mesh(self, function: str, mesh: Mesh) -> Any:
        """Returns the framework's mesh, the same object each time.

        Raises:
            MeshError: no process group is initialized.
        """
        ...

    def dtensor(self, local: Any, shape: tuple[int, ...], placements: Placements, device_mesh: Any) -> Any:
        """Returns the distributed tensor of which `local` is this rank's part, in its memory."""
        ...

    def taken(self, value: Any) -> tuple[Any, Placements, Any] | None:
        """Returns local tensor, placements and mesh of a distributed tensor; None for another value."""
        ...
