"""Protocol: what a framework says of itself before it has started a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed.

    Attributes:
        version: of the framework.
        accelerator: the kind of device that it is built for, as ``"cuda"`` or ``"npu"``; "" for a CPU only.
        num_threads: how many threads an operator on a CPU uses; None if it does not say.
        nccl: the version of its NCCL; None if it has none.
    """

    version: str
    accelerator: str = ""
    num_threads: int | None = None
    nccl: tuple[int, ...] | None = None
