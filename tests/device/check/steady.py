"""Rows iii and iv: a step that follows its plan never makes the host wait, and has the memory that its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.device import cuda
from tests.device.cases import P, batch, chain, plain_mesh, sharded_layers
from tests.device.harness import accelerator, device, is_simulated, observe
from tests.helpers.ranks import outcome

from .found import Answer, Skip, Task, Wrong
from .programs import group_of

LAYERS, WIDTH, ROWS = 8, 512, 2
SLACK = 0.05  # of the plan: what a step has beside its weights and gradients


def world_of(task: Task) -> tuple[int, str]:
    """Returns two ranks if they can share the device, else one, and by what they communicate."""
    try:
        return 2, f"2 ranks by {group_of(task, 2)}"
    except Skip as reason:
        return 1, f"1 rank ({reason})"


# --- waits -----------------------------------------------------------------------------------------------------------
def waits(task: Task) -> Answer:
    """A steady step where a wait of the host is an error. A step that waits must be found."""
    world, how = world_of(task)
    for each in observe(steady_step, task.is_planted, world=world, framework=task.framework):
        told, counts = each.result
        if told != "returned" or counts:
            raise Wrong(f"{told.splitlines()[0]} {counts or ''}".strip())
    for each in observe(steady_step, True, world=1, framework=task.framework):
        if each.result[0] == "returned":
            raise Wrong("a loss that is read on the host within the step was not noticed")
    return Answer("done", f"{how}: no wait in a steady step, and a planted one was found")


def steady_step(rank: int, reads: bool) -> tuple[str, dict[str, int]]:
    """Returns what the call that follows a plan raised, and how often the host waited in it."""
    mesh = plain_mesh()
    params, looks = sharded_layers(mesh), [False]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        value = chain(params, x)
        if looks[0]:
            value.item()
        return value

    step = hp.sharded(hp.value_and_grad(loss), mesh, policy=hp.Policy(pack_below_bytes=0))
    for number in range(3):
        step(params, batch(mesh, number))
    x = batch(mesh, 3)
    accelerator().synchronize()
    looks[0] = reads
    with no_waits() as counts:
        told = outcome(step, params, x)
    assert step.followed_plan or told != "returned"
    return told, counts


@contextmanager
def no_waits() -> Iterator[dict[str, int]]:
    """Within it a wait of the host is an error. Gives the counts of waits, once it is left."""
    counts: dict[str, int] = {}
    if not is_simulated():
        with cuda.no_waits():
            yield counts
        return
    sim = device()
    before = sim.syncs()
    sim.raise_on_sync(True)
    try:
        yield counts
    finally:
        sim.raise_on_sync(False)
        counts.update({name: n - before.get(name, 0) for name, n in sim.syncs().items() if n != before.get(name, 0)})


# --- memory ----------------------------------------------------------------------------------------------------------
def memory(task: Task) -> Answer:
    """The peak of a steady step against that of its plan, and what the allocator reserves for it."""
    world, how = world_of(task)
    found = observe(peak, task.is_planted, world=world, framework=task.framework)[0].result
    planned, measured = found["planned"], found["peak"] - found["before"]
    if not planned:
        raise Skip(f"{how}: its plan has no buffers")
    text = (
        f"{how}: peak {measured / 2**20:.1f} MiB, plan {planned / 2**20:.1f} MiB; "
        f"reserved {found['reserved'] / 2**20:.1f} of {found['peak'] / 2**20:.1f} MiB allocated"
    )
    if abs(measured - planned) > SLACK * planned:
        raise Wrong(text)
    return Answer("done", text, found)


def peak(rank: int, keeps: bool) -> dict[str, int]:
    """Returns bytes: what the plan says, what there was before a steady step, the peak in it, and what is reserved."""
    mesh, kept = plain_mesh(), []
    params = hp.init(lambda: [{"w": torch.randn(WIDTH, WIDTH)} for _ in range(LAYERS)], mesh, P("shard"))

    def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
        if keeps:
            kept.append(p["w"].detach().clone())
        return F.linear(x, p["w"])

    unit = hp.unit(linear, name="layer")

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    step = hp.sharded(lambda p, x: hp.value_and_grad(loss)(p, x)[0], mesh, policy=hp.Policy(pack_below_bytes=0))
    x = torch.randn(ROWS, WIDTH, device=mesh.device)
    for _ in range(3):
        step(params, x)
        kept.clear()
    accelerator().synchronize()
    _forget_peak()
    before = _memory()["in use"]
    step(params, x)
    accelerator().synchronize()
    found = _memory()
    assert step.last_schedule is not None
    planned = hp.check(step.last_schedule).peak_bytes
    return {"planned": planned, "before": before, "peak": found["peak"], "reserved": found["reserved"]}


def _memory() -> dict[str, int]:
    return device().memory() if is_simulated() else cuda.memory()


def _forget_peak() -> None:
    if is_simulated():
        device().clear()
    else:
        torch.cuda.reset_peak_memory_stats()
