"""More programs of `tests.device.cases`: collectives of the caller, alone and within units."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hpfunc as hp
from tests.device.cases import (
    FEWER,
    ONE,
    WIDTH,
    P,
    batch,
    block,
    case,
    chain,
    layers,
    local,
    plain_mesh,
    sharded_layers,
    train,
)
from tests.device.harness import never_waits
from tests.helpers.examples import bytes_to_learn, example
from tests.helpers.ranks import mesh_of

NUM_EXPERTS = 4


# --- in units --------------------------------------------------------------------------------------------------------
@case(world=4, slow=("compute", "gather", "all_reduce"))
def train_tensor_parallel(rank: int) -> list[torch.Tensor]:
    """A matrix is cut along "tp" as well. The unit ends with a sum over "tp", and its backward begins with one."""
    mesh = mesh_of((2, 2), ("shard", "tp"), ("shard",))

    def parallel(p: Any, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(F.linear(hp.pvary(x, "tp"), p["w"], p["b"]))
        return x + hp.psum(wide @ p["w"], "tp")

    unit = hp.unit(parallel, name="parallel")
    params = hp.shard(layers(), mesh, P(("tp", "shard")))
    return train(mesh, params, lambda params, x: chain(params, x, unit))


@case(world=4, slow=("compute", "gather", "all_reduce"))
def train_experts(rank: int) -> list[torch.Tensor]:
    """Experts stay cut along "ep", whose ranks send each other their tokens. The dense weights are alike along it."""
    mesh = mesh_of((2, 2), ("shard", "ep"), ("shard", "ep"))

    def mixture(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = block(p["dense"], x)
        sent = hp.all_to_all(x.view(NUM_EXPERTS, -1, WIDTH), "ep", 0, 1, tiled=True)
        return x + hp.all_to_all(torch.tanh(sent @ p["expert"]), "ep", 1, 0, tiled=True).reshape(x.shape)

    def experts(seed: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=draw) / 4

    unit = hp.unit(mixture, name="mixture", axes=("shard",))
    whole = [{"dense": p, "expert": experts(place)} for place, p in enumerate(layers(2))]
    params = hp.shard(whole, mesh, [{"dense": P("shard"), "expert": P("ep", "shard")}] * 2)
    return train(mesh, params, lambda params, x: chain(params, x, unit), size=8)


@case(slow=FEWER)
def train_ring(rank: int) -> list[torch.Tensor]:
    """What a unit computes travels around the ring of ranks, and its gradient the other way."""

    def turned(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = block(p, x)
        return y + hp.ppermute(y.sin(), "shard", [(0, 1), (1, 0)]) * 0.5

    unit = hp.unit(turned, name="turned")
    return train(plain_mesh(), sharded_layers(plain_mesh()), lambda params, x: chain(params, x, unit))


# --- the examples ----------------------------------------------------------------------------------------------------
def learns(name: str, data_axes: tuple[str, ...]) -> list[torch.Tensor]:
    """Trains an example on four ranks. Attention is composed of other operators, as it is on the device.

    In a call that follows a plan the host may not wait for the device.
    """
    module = example(name)
    mesh = mesh_of((1, 2, 2), module.AXES, data_axes)
    steps: list[Any] = []

    def run(step_fn: Any, mesh: hp.Mesh) -> Any:
        step: Any = hp.sharded(step_fn, mesh, policy=hp.Policy(pack_below_bytes=0))
        steps.append(step)

        def call(*args: Any) -> Any:
            with never_waits() if step.followed_plan else nullcontext():
                return step(*args)

        return call

    with sdpa_kernel(SDPBackend.MATH):
        weights, losses = module.train(mesh, bytes_to_learn(module), hp.optim.sgd(0.5), 3, torch.float32, run)
    assert steps[0].followed_plan
    return [*local(weights), torch.tensor(losses)]


@case(world=4, slow=ONE)
def tensor_parallel_example(rank: int) -> list[torch.Tensor]:
    return learns("tensor_parallel", ("replicate", "shard"))


@case(world=4, slow=ONE)
def expert_parallel_example(rank: int) -> list[torch.Tensor]:
    return learns("expert_parallel", ("replicate", "shard", "ep"))


@case(world=4, slow=ONE)
def context_parallel_example(rank: int) -> list[torch.Tensor]:
    return learns("context_parallel", ("replicate", "shard", "cp"))


# --- alone -----------------------------------------------------------------------------------------------------------
@case()
def permuted(rank: int) -> list[torch.Tensor]:
    mesh = plain_mesh()
    x = batch(mesh, 0)
    turned = hp.ppermute(x * 2, "shard", [(0, 1), (1, 0)], mesh=mesh) + 1
    return local(turned, hp.ppermute(turned, "shard", [(1, 0)], mesh=mesh) * 3)


@case()
def summed(rank: int) -> list[torch.Tensor]:
    """Collectives that the caller asks for: the compute stream must have written their input."""
    mesh = plain_mesh()
    x = batch(mesh, 0)
    total = hp.psum(x.tanh() * 2, "shard", mesh=mesh)
    whole = hp.all_gather(total * (rank + 1), "shard", mesh=mesh)
    return local(total + 1, whole * 2)


@case(slow=FEWER)
def exchanged(rank: int) -> list[torch.Tensor]:
    mesh = plain_mesh()
    x = batch(mesh, 0)
    part = hp.psum_scatter(x.tanh() * 2, "shard", tiled=True, mesh=mesh)
    turned = hp.all_to_all(x * (rank + 1), "shard", 0, 1, tiled=True, mesh=mesh)
    return local(part * 3, turned + 1, hp.pmax(x.sin(), "shard", mesh=mesh) * 2, hp.pmean(x * x, "shard", mesh=mesh))
