"""`Facts`: what the doctor has found in a process. Plain values, so that a test can draw any machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...backends.versions import Version

State = Literal["loads", "absent", "fails", "untried"]
UNLIMITED = 1 << 62  # what a limit of the system that does not exist counts as


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator of this machine. Its UUID is "" where it is not known."""

    name: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Loading:
    """What came of loading a backend, and why it failed."""

    state: State
    why: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. None: it could not be found out.

    Attributes:
        env: the environment variables of the process.
        versions: of distributions that are installed, and of Python, by name.
        where: the directory that hpfunc was imported from.
        backends: what came of loading each backend of hpfunc.
        used: the backend that `make_mesh` uses.
        accelerator: the kind of device that it computes on if there is one: ``"cuda"``, ``"npu"``; "" for none.
        gpus: the GPUs of this machine, in the order of NVML, whether or not the process may see them.
        npus: the Ascend devices of this machine.
        driver_cuda: the CUDA version of the driver, as (12, 6).
        nccl: the version of torch's NCCL.
        machine: the processor, as ``"x86_64"``.
        num_cores: how many cores this process may use.
        num_threads: how many threads an operator of the framework uses.
        shm_bytes: size of /dev/shm, and what is free of it.
        open_files: how many files the process may open, at once.
        locked_bytes: how much memory it may lock.
        stack_bytes: how large the stack of its main thread may get.
        memory_bytes: the memory of this machine or container, and what is free of it.
        interfaces: the network interfaces.
        infiniband: the InfiniBand and RoCE devices.
        host_name: the name of this host.
        addresses: the IP addresses that its name resolves to; () if it does not resolve, None if that took too long.
        time_s: seconds since 1970.
        tick_s: the resolution of the clock by which links are measured.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    backends: Mapping[str, Loading] = field(default_factory=dict)
    used: str = "torch"
    accelerator: str = ""
    gpus: tuple[Device, ...] | None = ()
    npus: tuple[Device, ...] = ()
    driver_cuda: Version | None = None
    nccl: Version | None = None
    machine: str = ""
    num_cores: int = 1
    num_threads: int | None = None
    shm_bytes: tuple[int, int] | None = None
    open_files: int | None = None
    locked_bytes: int | None = None
    stack_bytes: int | None = None
    memory_bytes: tuple[int, int] | None = None
    interfaces: tuple[str, ...] | None = None
    infiniband: tuple[str, ...] = ()
    host_name: str = ""
    addresses: tuple[str, ...] | None = ()
    time_s: float = 0.0
    tick_s: float = 0.0

    def number(self, name: str) -> int | None:
        """Returns an environment variable as a number; None if it is not set, or is not a number."""
        try:
            return int(self.env[name])
        except (KeyError, ValueError):
            return None

    @property
    def num_ranks(self) -> int:
        """How many processes the launcher says there are."""
        return max(1, self.number("WORLD_SIZE") or 1)

    @property
    def num_local_ranks(self) -> int:
        """How many of them the launcher says are on this machine; 1 if it does not say."""
        return max(1, self.number("LOCAL_WORLD_SIZE") or 1)

    @property
    def spans_machines(self) -> bool:
        """Whether the launcher says that there are processes on other machines."""
        return self.number("LOCAL_WORLD_SIZE") is not None and self.num_ranks > self.num_local_ranks


def shown(value: str) -> str:
    """Returns the value of a variable as it stands in a table: quoted and cut short if there is anything odd in it."""
    return value if re.fullmatch(r"[\w.:,/=^+@-]{1,60}", value, re.ASCII) else ascii(value[:60])


def size(num_bytes: int) -> str:
    """Returns a number of bytes for people.

    >>> size(64 << 20), size(3 << 29)
    ('64 MiB', '1.5 GiB')
    """
    if num_bytes >= UNLIMITED:
        return "unlimited"
    return f"{num_bytes >> 20} MiB" if num_bytes < 1 << 30 else f"{(num_bytes * 10 >> 30) / 10:g} GiB"
