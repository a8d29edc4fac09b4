"""What the library costs the host: microseconds for each unit of a step beyond plain torch, against torch FSDP2.

``launch.sh 1 loopback host_time.py`` steps through 4, 16, 64 and 256 units of one 8 x 8 matrix each, so small that
nothing but the library is left. Processor time of the whole process counts, not the waits. With more ranks the calls of
collectives are in it, but not their transfer. Python's collector runs, but not over what was there before the first
step that counts: a pass over all of torch takes longer than a step, and meets whoever is running.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hpfunc as hp
from hpfunc.planning.program import Event, Unit, Weight

WIDTH = 8
DEPTHS = (4, 16, 64, 256)
PLAIN = "plain torch"


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

    def step() -> None:
        train(params, x)

    return step


VARIANTS: dict[str, Callable[[int], measure.Step]] = {
    PLAIN: plain,
    "FSDP2": fsdp2,
    "hpfunc eager": lambda num_units: hpfunc_step(num_units, planned=False),
    "hpfunc": lambda num_units: hpfunc_step(num_units, planned=True),
}


def program_of(num_units: int) -> hp.Program:
    """Returns the program of a step through so many units of one matrix each, cut in two."""
    dtypes = dict.fromkeys(("dtype", "shard_dtype", "reduce_dtype", "accum_dtype"), "float32")
    cut = {"gather_axes": ("shard",), "num_shards": 2, "reduce_axes": (), "num_replicas": 1, "divisor": 2}
    weights = tuple(Weight(f"layers[{i}]", 1 << 19, origin=i, **dtypes, **cut) for i in range(num_units))
    units = tuple(Unit(f"layer.{i}", (i,)) for i in range(num_units))
    forward = [Event("forward", i) for i in range(num_units)]
    backward = [Event("backward", i) for i in reversed(range(num_units))]
    return hp.Program(weights, units, (*forward, *backward, Event("end_backward"), Event("end_step")))


def beyond_plain(found: dict[str, Any], name: str) -> dict[int, list[float]]:
    """Returns for each depth the seconds of each repetition beyond those of plain torch next to it."""
    taken = found["taken_s"]
    return {
        int(depth): [a - b for a, b in zip(times, taken[PLAIN][depth], strict=True)]
        for depth, times in taken[name].items()
    }


def slope(beyond_s: dict[int, list[float]], least_depth: int = 16) -> tuple[float, float]:
    """Returns the seconds for each further unit, and half of the 95 % interval of their mean over the repetitions."""
    depths = [depth for depth in beyond_s if depth >= least_depth]
    slopes = [
        statistics.linear_regression(depths, times).slope
        for times in zip(*(beyond_s[depth] for depth in depths), strict=True)
    ]
    return statistics.mean(slopes), 1.96 * statistics.stdev(slopes) / len(slopes) ** 0.5


def table_of(found: dict[str, Any]) -> str:
    """Returns a table: microseconds of the process for each unit beyond plain torch, by depth."""
    rows = []
    for name in VARIANTS:
        if name == PLAIN:
            medians = [statistics.median(times) / int(depth) for depth, times in found["taken_s"][name].items()]
            rows.append([f"{name} (all of it)", *(f"{1e6 * m:.0f}" for m in medians), ""])
            continue
        beyond_s = beyond_plain(found, name)
        per_unit, error = slope(beyond_s)
        medians = [statistics.median(times) / depth for depth, times in beyond_s.items()]
        rows.append([name, *(f"{1e6 * m:.0f}" for m in medians), f"{1e6 * per_unit:.0f} ± {1e6 * error:.0f}"])
    head = ["µs a unit beyond plain torch", *(f"{depth} units" for depth in DEPTHS), "each further unit, 95 %"]
    return measure.table(head, rows)


def main() -> None:
    """Measures; rank 0 prints a table, or writes a file."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write to this file")
    args = parser.parse_args()
    _, size = measure.start()
    steps = {(name, depth): make(depth) for name, make in VARIANTS.items() for depth in DEPTHS}
    taken_s: dict[str, dict[str, list[float]]] = {name: {str(depth): [] for depth in DEPTHS} for name in VARIANTS}
    for repetition in range(args.repetitions + 3):
        if repetition == 3:
            gc.collect()
            gc.freeze()
        for (name, depth), step in steps.items():
            dist.barrier()
            begin = time.process_time()
            step()
            if repetition >= 3:
                taken_s[name][str(depth)].append(time.process_time() - begin)
    found = {"ranks": size, "taken_s": taken_s}
    measure.finish(found, args.json, lambda: f"ranks: {size}\n\n{table_of(found)}")


if __name__ == "__main__":
    main()
