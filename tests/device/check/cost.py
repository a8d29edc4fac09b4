"""Row vii: launches and host time of a unit, against FSDP2, and the time of a step against plain torch on one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hpfunc as hp
from tests.device import cuda
from tests.device.cases import P
from tests.device.harness import accelerator, device, is_simulated, observe
from tests.helpers.ranks import mesh_of

from .found import Answer, Task, Wrong
from .steady import world_of

DEPTHS = (4, 12)  # a unit costs what the further ones add
WIDTH, BATCH, REPETITIONS = 8, 1, 15
LARGE = {"cuda": (12, 2048, 4096), "sim": (3, 256, 256)}  # layers, width and rows of the step that is timed as a whole
GOAL = 0.03  # of a step of plain torch, on a GPU
# A gather in forward and in backward, a reduce-scatter, a division, and room for one copy.
BEYOND_PLAIN = 5
PLANTED_S = 0.002
NO_TIMES = "this device computes on the host"
NO_FSDP2 = "its gathers and reduce-scatters share a group, on two streams, which the simulated group cannot order"
Step = Callable[[], Any]


def cost(task: Task) -> Answer:
    """Few launches of a unit beyond plain torch; on a GPU less host time than FSDP2, and a step of torch's length."""
    world, how = world_of(task)
    libraries = ("plain", "hpfunc", "fsdp2") if task.device == "cuda" else ("plain", "hpfunc")
    units = {library: per_unit(task, world, library) for library in libraries}
    task.note("a step of one rank")
    size = LARGE[task.device]
    plain_s, step_s = observe(whole_steps, size, task.is_planted, world=1, framework=task.framework)[0].result
    overhead = step_s / plain_s - 1
    figures = {"units": units, "plain_s": plain_s, "step_s": step_s}
    beside = ", ".join(f"{name} {each['launches']:.0f}" for name, each in units.items())
    text = f"{how}, launches of a unit: {beside}"
    if task.device == "cuda":
        times = ", ".join(f"{name} {each['host_us']:.0f} µs" for name, each in units.items())
        text += f"; host time of it: {times}; a step on 1 rank takes {overhead:+.1%} of plain torch"
    _judge(task, units, overhead, text)
    return Answer("done", text + (f" (no times: {NO_TIMES}; no FSDP2: {NO_FSDP2})" * (task.device == "sim")), figures)


def _judge(task: Task, units: dict[str, dict[str, float]], overhead: float, text: str) -> None:
    mine = units["hpfunc"]
    if units["plain"]["launches"] < 1:
        raise Wrong(f"{text}: torch's profiler sees no launch")
    if mine["launches"] > units["plain"]["launches"] + BEYOND_PLAIN:
        raise Wrong(f"{text}: more than {BEYOND_PLAIN} launches beyond plain torch")
    if task.device == "sim":
        return
    if mine["host_us"] > units["fsdp2"]["host_us"]:
        raise Wrong(f"{text}: more time of the host than FSDP2")
    if overhead > GOAL:
        raise Wrong(f"{text}: more than {GOAL:.0%}")


def per_unit(task: Task, world: int, library: str) -> dict[str, float]:
    """Returns what rank 0 launches, and its host pays, for each further unit."""
    task.note(f"units of {library}")
    plants = task.is_planted and library == "hpfunc"
    return observe(further_unit, library, plants, world=world, framework=task.framework)[0].result


# --- in the ranks ----------------------------------------------------------------------------------------------------
def further_unit(rank: int, library: str, plants: bool) -> dict[str, float]:
    """Returns the launches and the microseconds of the host for each further unit of a step."""
    make = {"plain": plain_step, "hpfunc": hpfunc_step, "fsdp2": fsdp2_step}[library]
    launches, times_s = {}, {}
    for depth in DEPTHS:
        step = make(depth, plants)
        for _ in range(3):
            step()
        launches[depth] = num_launches(step)
        times_s[depth] = [host_s(step) for _ in range(REPETITIONS)]
    apart = DEPTHS[1] - DEPTHS[0]
    fewer, more = (statistics.median(times_s[depth]) for depth in DEPTHS)
    return {
        "launches": (launches[DEPTHS[1]] - launches[DEPTHS[0]]) / apart,
        "host_us": 1e6 * (more - fewer) / apart,
    }


def num_launches(step: Step) -> int:
    """Returns how many kernels, copies and collectives the host gives to the device in a step."""
    accelerator().synchronize()
    if not is_simulated():
        found = cuda.counted(step)
        return sum(n for name, n in found.items() if "Launch" in name or "Memcpy" in name or "Memset" in name)
    before = device().launches()
    step()
    accelerator().synchronize()
    after = device().launches()
    not_launched = ("event", "free")  # what the simulation counts beside them
    return sum(
        count - before.get(name, 0)
        for name, count in after.items()
        if name not in not_launched and not name.startswith("wait for ")
    )


def host_s(step: Step) -> float:
    """Returns for how long the host is busy with a step: until all is enqueued."""
    accelerator().synchronize()
    dist.all_reduce(torch.zeros(1))  # of the host: all ranks begin together
    begin = time.perf_counter()
    step()
    taken_s = time.perf_counter() - begin
    accelerator().synchronize()
    return taken_s


def block_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, p["w"]))


class Block(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH, device=where))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return block_fn({"w": self.w}, x)


def plain_step(depth: int, plants: bool) -> Step:
    where = mesh_of((dist.get_world_size(),), ("shard",)).device
    net, x = nn.Sequential(*(Block(where) for _ in range(depth))), torch.ones(BATCH, WIDTH, device=where)
    return lambda: torch.autograd.grad(net(x).sum(), list(net.parameters()))


def hpfunc_step(depth: int, plants: bool) -> Step:
    mesh = mesh_of((dist.get_world_size(),), ("shard",))
    params = hp.shard([{"w": torch.eye(WIDTH)} for _ in range(depth)], mesh, P("shard"))
    x = torch.ones(BATCH, WIDTH, device=mesh.device)

    def slow(p: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PLANTED_S if plants else 0)
        for _ in range(40 if plants else 0):
            x = x + 0
        return block_fn(p, x)

    block = hp.unit(slow if plants else block_fn, name="block")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = block(p, x)
        return x.sum()

    run = hp.sharded(hp.value_and_grad(loss), mesh)
    return lambda: run(params, x)


def fsdp2_step(depth: int, plants: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    where = mesh_of((dist.get_world_size(),), ("shard",)).device
    mesh = init_device_mesh(torch.device(where).type, (dist.get_world_size(),))
    net, x = nn.Sequential(*(Block(where) for _ in range(depth))), torch.ones(BATCH, WIDTH, device=where)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def step() -> None:
        net(x).sum().backward()
        net.zero_grad()

    return step


def whole_steps(rank: int, size: tuple[int, int, int], plants: bool) -> tuple[float, float]:
    """Returns the seconds of a large step in plain torch, and of the same step by hpfunc on one rank."""
    depth, width, rows = size
    mesh = mesh_of((1,), ("shard",))
    draw = torch.Generator().manual_seed(0)
    weights = [{"w": torch.randn(width, width, generator=draw) / width**0.5} for _ in range(depth)]
    x = torch.randn(rows, width, generator=draw).to(mesh.device)
    whole = [{"w": p["w"].to(mesh.device).requires_grad_()} for p in weights]
    params = hp.shard(weights, mesh, P("shard"))

    def loss(params: Any, x: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
        for p in params:
            x = call(p, x)
        return x.square().mean()

    def slow(p: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PLANTED_S if plants else 0)
        return block_fn(p, x)

    unit = hp.unit(slow if plants else block_fn, name="block")
    run = hp.sharded(hp.value_and_grad(lambda params, x: loss(params, x, unit)), mesh)

    def plain() -> None:
        torch.autograd.grad(loss(whole, x, block_fn), [p["w"] for p in whole])

    def planned() -> None:
        run(params, x)

    steps, times_s = (plain, planned), ([], [])
    for number in range(3 + REPETITIONS):
        for step, found in zip(steps, times_s, strict=True):  # in turn, so that both meet the same machine
            accelerator().synchronize()
            begin = time.perf_counter()
            step()
            accelerator().synchronize()
            found.extend([time.perf_counter() - begin] if number >= 3 else [])
    return statistics.median(times_s[0]), statistics.median(times_s[1])
