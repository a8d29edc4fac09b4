"""MindSpore: on CPU with gloo as transport, on Ascend with HCCL.

The device that MindSpore has chosen when the backend is first used, ``mindspore.get_context("device_target")``, decides
between the two.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from ..protocol import Backend


def _backend() -> Backend:
    if int(np.__version__.split(".")[0]) >= 2:  # with numpy 2 MindSpore's import, or its first operator, may fail
        raise ImportError(f"MindSpore needs numpy < 2, found {np.__version__}")
    import mindspore

    from . import private  # noqa: F401 - refuses a version that lacks one of them

    target = mindspore.get_context("device_target")
    if target not in ("Ascend", "CPU"):
        raise ImportError(f"MindSpore runs on {target} here; hpfunc knows its CPU and Ascend (mindspore.set_device)")
    if target == "Ascend":
        from .ascend import MindSporeAscend

        return cast(Backend, MindSporeAscend())
    try:
        import torch  # noqa: F401 - checks that it is installed
    except ImportError as error:
        raise ImportError("on a CPU its transport is torch.distributed, and there is no torch") from error
    from .cpu import MindSporeHost

    return MindSporeHost()


BACKEND = _backend()
