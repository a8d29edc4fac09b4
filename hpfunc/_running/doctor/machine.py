"""What the machine says: limits, memory, network, devices. None of it starts a device or changes anything.

Every function here may raise whatever it meets on a strange machine: `survey` asks them with care.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

from ...backends.versions import Version
from .facts import UNLIMITED, Device

_LOOKUP_S = 1.0
_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Returns how many cores this process may use: those that it is bound to, and what its container may take."""
    cores = len(os.sched_getaffinity(0))
    if (quota := _quota()) is not None:
        cores = min(cores, max(1, round(quota)))
    return cores


def _quota() -> float | None:
    new, old = _CGROUP / "cpu.max", _CGROUP / "cpu"
    if new.exists():
        quota, period = new.read_text().split()
    elif (old / "cpu.cfs_quota_us").exists():
        quota, period = ((old / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def shared_memory() -> tuple[int, int]:
    """Returns the bytes of /dev/shm, and those that are free."""
    found = os.statvfs("/dev/shm")
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def memory() -> tuple[int, int]:
    """Returns the bytes of memory of this machine, or of its container if that has fewer, and those that are free."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = _container()
    return (total, free) if limit >= total else (limit, min(free, max(0, limit - used)))


def _container() -> tuple[int, int]:
    """Returns how much memory the container may use, and uses; files that were read once do not count."""
    old = _CGROUP / "memory"
    limits = [(_CGROUP, "memory.max", "memory.current"), (old, "memory.limit_in_bytes", "memory.usage_in_bytes")]
    for folder, limit, used in limits:
        if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            return int(text), int((folder / used).read_text()) - cached
    return UNLIMITED, 0


def limit(name: str) -> int:
    """Returns a limit of the process, as ``"RLIMIT_NOFILE"``."""
    import resource  # not on every system

    soft, _ = resource.getrlimit(getattr(resource, name))
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def interfaces() -> tuple[str, ...]:
    """Returns the network interfaces."""
    return tuple(name for _, name in socket.if_nameindex())


def infiniband() -> tuple[str, ...]:
    """Returns the InfiniBand and RoCE devices."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.exists() else ()


def addresses(host_name: str) -> tuple[str, ...] | None:
    """Returns the addresses that a host name resolves to, () for none, None if the resolver needs over a second."""
    found: list[tuple[str, ...]] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            entries = []
        found.append(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_LOOKUP_S)
    return found[0] if found else None


def npus() -> tuple[Device, ...]:
    """Returns the Ascend devices, by their files."""
    files = sorted(Path("/dev").glob("davinci[0-9]*"), key=lambda path: int(path.name.removeprefix("davinci")))
    return tuple(Device("Ascend") for _ in files)


def gpus() -> tuple[tuple[Device, ...], Version] | None:
    """Returns the GPUs, and the CUDA version of the driver, by NVML, which starts no CUDA; None if that is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None if _has_cuda() else ((), ())
    if nvml.nvmlInit_v2() != 0:
        return None if _has_cuda() else ((), ())
    try:
        count, driver = ctypes.c_int(), ctypes.c_int()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        _check(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(driver)))
        devices = tuple(_gpu(nvml, place) for place in range(count.value))
        return devices, (driver.value // 1000, driver.value % 1000 // 10)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, place: int) -> Device:
    handle, name, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetName(handle, name, len(name)))
    _check(nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)))
    return Device(name.value.decode(errors="replace"), uuid.value.decode(errors="replace"))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML error {code}")


def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
