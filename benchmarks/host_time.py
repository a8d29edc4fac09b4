"""What the library costs the host: microseconds for each unit of a step beyond plain torch, against torch FSDP2.

``benchmarks/launch.sh 1 loopback benchmarks/host_time.py`` steps through 64 units of one 8 x 8 matrix each, so small
that nothing but the library is left. Only the processor time of the main thread counts, not the waits, so that neither
other processes nor the network show. With more ranks the calls of collectives are in it, but not their transfer.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import measure
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hpfunc as hp

WIDTH = 8


def block_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One small product."""
    return torch.tanh(nn.functional.linear(x, p["w"]))


class Block(nn.Module):
    """`block_fn` as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """See `block_fn`."""
        return block_fn({"w": self.w}, x)


def plain(num_units: int) -> measure.Step:
    """Forward and backward in torch."""
    net, x = nn.Sequential(*(Block() for _ in range(num_units))), torch.ones(1, WIDTH)

    def step() -> None:
        net(x).sum().backward()
        net.zero_grad()

    return step


def fsdp2(num_units: int) -> measure.Step:
    """The same with FSDP2, each block a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net, x = nn.Sequential(*(Block() for _ in range(num_units))), torch.ones(1, WIDTH)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def step() -> None:
        net(x).sum().backward()
        net.zero_grad()

    return step


def hpfunc_step(num_units: int, *, planned: bool) -> measure.Step:
    """The same with hpfunc."""
    mesh = hp.make_mesh((dist.get_world_size(),), ("shard",))
    params = hp.shard([{"w": torch.eye(WIDTH)} for _ in range(num_units)], mesh, hp.P("shard"))
    block, x = hp.unit(block_fn), torch.ones(1, WIDTH)

    def loss_fn(params: list[dict[str, hp.ShardedArray]], x: Tensor) -> Tensor:
        for weights in params:
            x = block(weights, x)
        return x.sum()

    step_fn = hp.value_and_grad(loss_fn)
    train = hp.sharded(step_fn, mesh) if planned else step_fn
    return lambda: train(params, x)


VARIANTS: dict[str, Callable[[int], measure.Step]] = {
    "plain torch": plain,
    "FSDP2": fsdp2,
    "hpfunc eager": lambda num_units: hpfunc_step(num_units, planned=False),
    "hpfunc": lambda num_units: hpfunc_step(num_units, planned=True),
}


def main() -> None:
    """Measures, and prints on rank 0."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    rank, size = measure.start()
    steps = {name: make(args.units) for name, make in VARIANTS.items()}
    taken_s: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(args.repetitions + 3):
        for name, step in steps.items():
            dist.barrier()
            begin = time.thread_time()
            step()
            if repetition >= 3:
                taken_s[name].append(time.thread_time() - begin)
    base_s = statistics.median(taken_s["plain torch"])
    rows = [
        [
            name,
            f"{1e6 * statistics.median(times) / args.units:.0f}",
            "" if name == "plain torch" else f"{1e6 * (statistics.median(times) - base_s) / args.units:.0f}",
            f"{1e6 * min(times) / args.units:.0f}",
        ]
        for name, times in taken_s.items()
    ]
    if rank == 0:
        print(f"{args.units} units, forward and backward, ranks: {size}; µs of the main thread for each unit\n")
        print(measure.table(["variant", "median", "beyond plain torch", "minimum"], rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
