"""Sharded arrays as types of other libraries, and back, without a copy.

`to_dtensor` and `from_dtensor`, `to_device_mesh` and `from_device_mesh` for `torch.distributed.tensor`; `from_local`
and `to_numpy` for parts that come from, or go to, numpy and every library that speaks DLPack. Memory is shared: a
write into one is seen in the other.
"""

from ._dtensor import from_device_mesh, from_dtensor, to_device_mesh, to_dtensor
from ._local import from_local, to_numpy

# For autodoc, which leaves out imported names without it.
__all__ = ["from_device_mesh", "from_dtensor", "from_local", "to_device_mesh", "to_dtensor", "to_numpy"]
