"""What `tests.device.harness` needs of a GPU: how ranks share one, and what torch can tell of a run on it.

None of this has run on a GPU: it is written from torch's sources (2.13.0 and 2.14.1), and is as thin as it can be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Ranks on one GPU: NCCL refuses that unless it is asked, and can do it from this version on. Ranks that share a GPU
# share its multiprocessors: a few for each, and no multicast between what is one device.
SHARING_NCCL = (2, 30)
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
CYCLES_PER_US = 1500  # of `torch.cuda._sleep`, about; GPUs of today have between 1200 and 2000
Sleep = Callable[[int], None]


def start(rank: int, world: int) -> str:
    """Chooses the GPU of a rank, and returns the libraries by which ranks communicate."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.update(SHARING)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a rank has no processes of its own
    dist.Backend.default_device_backend_map["cuda"] = library(world)  # that of hpfunc's own groups, too
    return f"cpu:gloo,cuda:{library(world)}"


def library(world: int) -> str:
    """Returns by what ranks communicate: NCCL if it can, else gloo, which copies to the host."""
    has_own = torch.cuda.device_count() >= world
    return "nccl" if has_own or nccl_version()[:2] >= SHARING_NCCL else "gloo"


def nccl_version() -> tuple[int, ...]:
    """Returns the version of NCCL that torch has loaded, such as ``(2, 30, 7)``."""
    from torch.cuda import nccl

    return tuple(part for part in nccl.version() if isinstance(part, int))


def observe(
    fn: Callable[[], Any],
    *,
    delays: Mapping[str, int],
    forgets_waits: int,
    raises_on_sync: bool,
    finds_races: bool,
) -> tuple[Any, list[str], list[str], dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """Returns what the fields of `tests.device.harness.Observed` are. Nothing is counted here: see `counted`."""
    torch.cuda.synchronize()
    races: list[str] = []
    result = None
    with ExitStack() as conditions:
        if delays:
            conditions.enter_context(late(hpfunc_streams(), delays, sleep))
        if forgets_waits:
            conditions.enter_context(forgetting(forgets_waits))
        if raises_on_sync:
            conditions.enter_context(no_waits())
        if finds_races:
            conditions.enter_context(sanitizer(races))
        result = fn()
    torch.cuda.synchronize()
    return result, races, [], {}, {}, {}, memory()


def hpfunc_streams() -> Any:
    """Returns hpfunc's streams of this rank's GPU."""
    from hpfunc.backends import get

    return get("torch").streams(f"cuda:{torch.cuda.current_device()}")


def sleep(delay_us: int) -> None:
    """Makes the current stream, and not the host, late."""
    torch.cuda._sleep(delay_us * CYCLES_PER_US)


@contextmanager
def late(streams: Any, delays: Mapping[str, int], sleep: Sleep) -> Iterator[None]:
    """Within it hpfunc's work on the named streams comes late: ``{"gather": 500}``, by so many microseconds.

    ``"compute"`` is late each time after it has waited for another stream, so before it reads what it waited for.
    """
    issue, wait = streams.issue, streams.wait

    def issue_late(label: str, stream: str, waits: Any, work: Callable[[], Any], poll: Any, **options: Any) -> Any:
        def late_work() -> Any:
            if stream in delays:
                sleep(delays[stream])
            return work()

        return issue(label, stream, waits, late_work, poll, **options)

    def wait_late(pending: Any, poll: Any) -> None:
        wait(pending, poll)
        if "compute" in delays:
            sleep(delays["compute"])

    streams.issue, streams.wait = issue_late, wait_late
    try:
        yield
    finally:
        del streams.issue, streams.wait  # the methods of the class are seen again


@contextmanager
def forgetting(every: int) -> Iterator[None]:
    """Within it a stream forgets every n-th wait for an event: a planted race."""
    wait_event, count = torch.cuda.Stream.wait_event, [0]

    def wait_or_not(self: Any, event: Any) -> None:
        count[0] += 1
        if count[0] % every:
            wait_event(self, event)

    torch.cuda.Stream.wait_event = wait_or_not
    try:
        yield
    finally:
        torch.cuda.Stream.wait_event = wait_event


@contextmanager
def no_waits() -> Iterator[None]:
    """Within it it is an error if an operator makes the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def sanitizer(races: list[str]) -> Iterator[None]:
    """Within it torch compares accesses to memory with the waits between streams. The first race ends the block."""
    from torch.cuda import _sanitizer

    from hpfunc import PeerError

    if not _sanitizer.cuda_sanitizer.enabled:  # once enabled it stays: it must know all streams and events
        _sanitizer.cuda_sanitizer.enable()
    try:
        yield
    except _sanitizer.CUDASanitizerErrors as found:
        races.extend(str(error) for error in found.errors)
    except PeerError as told:  # a race of another rank ended its step
        races.append(str(told))


def memory() -> dict[str, int]:
    """Returns bytes by the names that the simulated device has for them."""
    stats = torch.cuda.memory_stats()
    names = {"in use": "allocated_bytes.all.current", "peak": "allocated_bytes.all.peak"}
    return {name: stats.get(key, 0) for name, key in (names | {"reserved": "reserved_bytes.all.peak"}).items()}


def counted(fn: Callable[[], Any]) -> dict[str, int]:
    """Returns how often the host called each function of CUDA, such as ``cudaLaunchKernel`` or ``cuLaunchKernelEx``."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        fn()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")}
