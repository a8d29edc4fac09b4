"""torch on Ascend: the torch backend, once `torch_npu` has made the device ``"npu"`` and HCCL groups known to torch.

Nothing else differs: `device_streams` finds streams and events in ``torch.npu`` as it does in ``torch.cuda``, and
``dist.new_group`` makes HCCL communicators. Importing it needs Ascend's CANN libraries, so this file has not run on the
machines that test this project.
"""

from __future__ import annotations

import torch
import torch_npu  # for its effect, too

from ..versions import refuse_unlike
from .backend import BACKEND

refuse_unlike("torch_npu", torch_npu.__version__, "torch", torch.__version__)

__all__ = ["BACKEND"]
