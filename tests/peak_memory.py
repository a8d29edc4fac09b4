"""A process that measures the peak memory of a planned step: ``python -m tests.peak_memory RANK WORLD STORE WIDTH``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import hpfunc as hp

LAYERS = 8


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
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    step(params, batch)
    assert step.last_schedule is not None
    return {"measured": status("VmHWM") - before, "planned": hp.check(step.last_schedule).peak_bytes}


if __name__ == "__main__":
    rank, world, store, width = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    print(json.dumps(measure(width)))
    dist.barrier()
    dist.destroy_process_group()
