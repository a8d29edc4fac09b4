"""What MindSpore says of itself."""

from __future__ import annotations

import mindspore

from ..installed import Installed


def installed() -> Installed:
    """See `Installed`."""
    target = mindspore.get_context("device_target")
    return Installed(version=mindspore.__version__, accelerator={"Ascend": "npu", "GPU": "cuda"}.get(target, ""))
