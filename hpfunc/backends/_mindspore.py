"""MindSpore: on CPU with gloo as transport, on Ascend with HCCL.

Which of the two a process uses is MindSpore's own choice of a device, ``mindspore.get_context("device_target")``, when
the backend is first used.
"""

from __future__ import annotations

import mindspore
import numpy as np

from ._base import Backend

if int(np.__version__.split(".")[0]) >= 2:
    raise ImportError(f"MindSpore {mindspore.__version__} needs numpy < 2, found {np.__version__}")


def _backend() -> Backend:
    if mindspore.get_context("device_target") == "Ascend":
        from ._mindspore_ascend import MindSporeAscend

        return MindSporeAscend()
    try:
        import torch  # noqa: F401 - the question is whether there is one
    except ImportError as error:
        raise ImportError("on a CPU its transport is torch.distributed, and there is no torch") from error
    from ._mindspore_host import MindSporeHost

    return MindSporeHost()


BACKEND = _backend()
