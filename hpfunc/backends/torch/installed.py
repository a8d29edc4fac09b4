"""What torch says of itself. Starts no device, so that the process may still fork."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.cuda import nccl

from ..installed import Installed


def installed() -> Installed:
    """See `Installed`."""
    accelerator = torch.accelerator.current_accelerator()  # what it is built for
    has_nccl = torch.version.cuda is not None and dist.is_available() and dist.is_nccl_available()
    return Installed(
        version=torch.__version__,
        accelerator="" if accelerator is None else accelerator.type,
        num_threads=torch.get_num_threads(),
        nccl=tuple(nccl.version()[:3]) if has_nccl else None,
    )
