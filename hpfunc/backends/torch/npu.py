"""torch on Ascend: the torch backend, once `torch_npu` has made the device ``"npu"`` and HCCL groups known to torch.

Nothing else differs: `device_streams` finds streams and events in ``torch.npu`` as it does in ``torch.cuda``, and
``dist.new_group`` makes HCCL communicators. Importing it needs Ascend's CANN libraries, so this file has not run on the
machines that test this project.
"""

from __future__ import annotations

import torch_npu  # noqa: F401 - imported for its effect

from .backend import BACKEND

__all__ = ["BACKEND"]
