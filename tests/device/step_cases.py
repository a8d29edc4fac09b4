"""More programs of `tests.device.cases`: where weights come from, which of them train, and where they go."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import hpfunc as hp
from tests.device.cases import (
    FEWER,
    ONE,
    STEPS,
    WIDTH,
    P,
    batch,
    block,
    case,
    chain,
    hybrid_mesh,
    layer,
    layers,
    local,
    plain_mesh,
    sharded_layers,
    train,
)
from tests.device.harness import never_waits
from tests.helpers.ranks import mesh_of


# --- where weights come from -----------------------------------------------------------------------------------------
@case(slow=FEWER)
def train_initialised(rank: int) -> list[torch.Tensor]:
    """`init` makes the weights. Ranks have other random numbers; those of the first one are used."""
    torch.manual_seed(rank)

    def draw() -> Any:
        return [{"w": torch.randn(WIDTH, WIDTH) / 4, "b": torch.zeros(WIDTH)} for _ in range(3)]

    return train(plain_mesh(), hp.init(draw, plain_mesh(), P("shard")))


@case(slow=FEWER)
def train_stacked(rank: int) -> list[torch.Tensor]:
    """The weights of all layers lie in one array, of which each row is gathered by itself."""
    rows = {name: torch.stack([p[name] for p in layers()]) for name in ("w", "b")}
    params = hp.shard(rows, plain_mesh(), P(None, "shard"))
    return train(plain_mesh(), params, lambda params, x: chain(hp.unstack(params), x))


# --- which of them train ---------------------------------------------------------------------------------------------
@case(slow=FEWER)
def train_tied_module(rank: int) -> list[torch.Tensor]:
    """Two modules have one weight."""
    torch.manual_seed(0)
    first, last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
    last.weight = first.weight
    apply, params = hp.from_module(torch.nn.Sequential(first, torch.nn.Linear(WIDTH, WIDTH), last))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, x).square().mean()

    return train(plain_mesh(), hp.shard(params, plain_mesh(), P("shard")), loss)


@case(slow=FEWER)
def train_adapters(rank: int) -> list[torch.Tensor]:
    """A frozen weight and one that trains are in one unit."""
    mesh = plain_mesh()

    def adapted(p: Any, x: torch.Tensor) -> torch.Tensor:
        return block(p, x) + F.linear(F.linear(x, p["down"]), p["down"].t())

    unit = hp.unit(adapted, name="adapted")
    draw = torch.Generator().manual_seed(1)
    downs = [{"down": torch.randn(4, WIDTH, generator=draw) / 4} for _ in range(3)]
    base = hp.freeze(sharded_layers(mesh))

    def loss(params: Any, x: torch.Tensor, base: Any) -> torch.Tensor:
        return chain([p | q for p, q in zip(params, base, strict=True)], x, unit)

    return train(mesh, hp.shard(downs, mesh, P(None, "shard")), loss, base)


@case(slow=FEWER)
def train_gated(rank: int) -> list[torch.Tensor]:
    """One unit of the loss computes without gradients."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = layer(params[1], x)
        return (chain(params[:2], x, layer) + layer(params[2], x) * gate).square().mean()

    return train(plain_mesh(), sharded_layers(plain_mesh()), loss)


# --- how gradients are reduced ---------------------------------------------------------------------------------------
@case(slow=FEWER)
def train_reduced_in_half(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), numerics=hp.Numerics(reduce_dtype="float16"))


@case(slow=FEWER)
def train_accumulate_remat(rank: int) -> list[torch.Tensor]:
    again = hp.unit(block, name="layer", remat=True)
    params = sharded_layers(plain_mesh())
    return train(
        plain_mesh(),
        params,
        lambda params, x: chain(params, x, again),
        wrap=lambda fn: hp.accumulate(fn, 2),
        size=8,
    )


# --- where they go ---------------------------------------------------------------------------------------------------
@case(slow=FEWER)
def evaluated(rank: int) -> list[torch.Tensor]:
    """A planned step without gradients, of a batch that it cuts itself."""
    mesh = plain_mesh()

    def evaluate(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return hp.pmean(chain(params, x), "shard")

    step = hp.sharded(evaluate, mesh, in_specs=(None, P("shard")), policy=hp.Policy(pack_below_bytes=0))
    params, losses = sharded_layers(mesh), []
    for number in range(STEPS):
        x = batch(mesh, number, axes=())
        with never_waits() if step.followed_plan else nullcontext():
            losses.append(step(params, x))
    assert step.followed_plan
    return local(losses)


@case(world=4, slow=ONE)
def saved_for_another_mesh(rank: int) -> list[torch.Tensor]:
    """Weights and state are saved by four shards, and loaded by two replicas of two shards, which go on."""
    mesh, other, optimizer = mesh_of((4,), ("shard",)), hybrid_mesh(), hp.optim.adamw(1e-2)
    params = sharded_layers(mesh)
    tree = {"params": params, "state": optimizer.init(params)}
    again = hp.shard(layers(), other, [{"w": P(None, "shard"), "b": P("shard")}] * 3)
    like = {"params": again, "state": optimizer.init(again)}
    with tempfile.TemporaryDirectory() if rank == 0 else nullcontext("") as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0, device=torch.device("cpu"))
        hp.checkpoint.save(Path(folder[0], "model"), tree)
        loaded = hp.checkpoint.load(Path(folder[0], "model"), like)
        local(hp.psum(torch.zeros(1, device=mesh.device), "shard", mesh=mesh))  # all have read: the folder may go
    return local(loaded) + train(other, loaded["params"], optimizer=optimizer, donates=False)
