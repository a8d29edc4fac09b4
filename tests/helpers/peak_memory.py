"""Processes that measure the peak memory of a planned step."""

from __future__ import annotations

import ctypes
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.ranks import _context

LAYERS = 8
M_MMAP_THRESHOLD = -3  # of malloc.h


def status(key: str) -> int:
    """Returns a line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def measure(width: int) -> dict[str, int]:
    mesh = hp.make_mesh((dist.get_world_size(),), ("shard",))
    params = hp.init(lambda: [{"w": torch.randn(width, width)} for _ in range(LAYERS)], mesh, hp.P("shard"))
    unit = hp.unit(lambda p, x: F.linear(x, p["w"]), name="layer")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    step = hp.sharded(lambda p, x: hp.value_and_grad(loss)(p, x)[0], mesh, policy=hp.Policy(pack_below_bytes=0))
    batch = torch.randn(2, width)
    for _ in range(3):
        step(params, batch)
    rises = []
    for _ in range(5):  # a thread of gloo may hold what it has sent for milliseconds longer
        dist.barrier()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        step(params, batch)
        rises.append(status("VmHWM") - before)
    assert step.last_schedule is not None
    return {"measured": statistics.median_low(rises), "planned": hp.check(step.last_schedule).peak_bytes}


def serve(rank: int, world: int, store: str, width: int, result: Connection) -> None:
    """Sends what rank `rank` of a world measures."""
    # What is freed goes back at once, or the size of the process says nothing: MALLOC_MMAP_THRESHOLD_ of a fork.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    result.send(measure(width))
    dist.barrier()
    dist.destroy_process_group()


def peak_memory(width: int, directory: Path) -> dict[str, int]:
    """Returns what rank 0 of two new processes measures."""
    context = _context()
    ends = [context.Pipe() for _ in range(2)]
    store = str(directory / f"store-{width}")
    processes = [
        context.Process(target=serve, args=(rank, 2, store, width, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    assert ends[0][0].poll(120), "no answer"
    found = ends[0][0].recv()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return found
