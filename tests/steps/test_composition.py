"""Several kinds of weights in one unit: experts that stay cut beside dense weights, each with its own replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from hpfunc.planning.ops import Launch
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_close, assert_same_bits
from tests.helpers.models import sgd
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
WIDTH, EXPERTS, TOKENS, LAYERS, STEPS = 4, 4, 8, 2, 2
# Beside each the axes over which its gradient is all-reduced; "ep" cuts the experts, and stays.
SPECS = {
    "dense": hp.P("shard"),  # replicate, ep
    "gain": hp.P(("replicate", "shard")),  # ep
    "bias": hp.P(),  # replicate, ep, shard
    "up": hp.P("ep", "shard"),  # replicate
    "down": hp.P("ep", ("replicate", "shard")),  # none
    "offset": hp.P("ep"),  # replicate, shard
}


def weights(dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(7)
    shapes = {"dense": (WIDTH, WIDTH), "gain": (WIDTH,), "bias": (WIDTH,), "offset": (EXPERTS, 1, WIDTH)}
    shapes |= {name: (EXPERTS, WIDTH, WIDTH) for name in ("up", "down")}
    return [
        {k: (torch.randn(s, generator=generator, dtype=torch.float64) / 2).to(dtype) for k, s in shapes.items()}
        for _ in range(LAYERS)
    ]


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return to_framework(torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype))


def stay(x: torch.Tensor) -> torch.Tensor:
    return x


def layer(p: Any, x: torch.Tensor, there: Any = stay, back: Any = stay) -> torch.Tensor:
    """Token k goes to expert k // (tokens / experts), wherever that is."""
    x = ops.tanh(x @ p["dense"] * p["gain"] + p["bias"])
    sent = there(x.reshape(EXPERTS, -1, WIDTH))
    return x + back(ops.tanh(sent @ p["up"] + p["offset"]) @ p["down"]).reshape(x.shape)


def expert_layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(
        p,
        x,
        lambda x: hp.all_to_all(x, "ep", 0, 1, tiled=True),
        lambda x: hp.all_to_all(x, "ep", 1, 0, tiled=True),
    )


def loss_of(unit: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = unit(p, x)
        return x.square().mean()

    return loss


def train(
    rank: int,
    shape: tuple[int, ...],
    policy: hp.Policy | None,
    dtype: torch.dtype,
    mode: Any = None,
    remat: bool = False,
) -> tuple[list[torch.Tensor], set[tuple[str, ...]]]:
    """Returns the whole weights after some steps, a loss of these, and the axes of the all-reduces of the plan."""
    mesh = mesh_of(shape, ("replicate", "ep", "shard"), ("replicate", "ep", "shard"))
    params = hp.shard(to_framework(weights(dtype)), mesh, [SPECS] * LAYERS)
    loss = loss_of(hp.unit(expert_layer, axes=("replicate", "shard")))
    run: Any = hp.value_and_grad(loss_of(hp.unit(expert_layer, axes=("replicate", "shard"), remat=remat)))
    if mode is not None:
        run = hp.accumulate(run, 2, mode=mode)
    if policy is not None:
        run = hp.sharded(run, mesh, policy=policy, debug=True)
    for step in range(STEPS):
        _, grads = run(params, batch(rank, step, dtype))
        params = sgd(params, grads)
    found: set[tuple[str, ...]] = set()
    if policy is not None:
        assert run.followed_plan
        launches = [op for op in run.last_schedule.ops if isinstance(op, Launch)]
        found = {op.communicator.axes for op in launches if op.communicator.purpose == "all_reduce"}
    with torch.no_grad(), hp.use_mesh(mesh):
        own = loss(params, batch(rank, STEPS, dtype))
        if not ops.is_mindspore():
            by_func, *_ = torch.func.vjp(loss, params, batch(rank, STEPS, dtype))
            assert torch.equal(own, by_func)
        value = hp.pmean(own, mesh.axis_names)
    return to_torch([*optree.tree_leaves(hp.unshard(params, mesh.axis_names)), value]), found


def alone(num_ranks: int) -> list[torch.Tensor]:
    def mean_loss(tree: Any, step: int) -> torch.Tensor:
        return torch.stack([loss_of(layer)(tree, batch(rank, step, torch.float64)) for rank in range(num_ranks)]).mean()

    params = weights(torch.float64)
    for step in range(STEPS):
        leaves, treedef = optree.tree_flatten(params)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        tree = optree.tree_unflatten(treedef, leaves)
        grads = torch.autograd.grad(mean_loss(tree, step), leaves)
        new = [(p - 0.1 * g).detach() for p, g in zip(leaves, grads, strict=True)]
        params = optree.tree_unflatten(treedef, new)
    return [*optree.tree_leaves(params), mean_loss(params, STEPS)]


REPLICAS = {("replicate", "ep"), ("ep",), ("replicate", "ep", "shard"), ("replicate",), ("replicate", "shard")}


EIGHT = pytest.mark.parametrize("shape", [(2, 2, 2)])


@EIGHT
@pytest.mark.parametrize(
    ("policy", "mode", "remat"),
    [
        (hp.Policy(), None, True),
        (hp.Policy(prefetch=2, pack_below_bytes=0), "scatter", False),
        (hp.Policy(), "local", False),
    ],
)
def test_experts_beside_dense_weights_in_one_unit(
    pool: Callable[[int], Pool], shape: tuple[int, ...], policy: hp.Policy, mode: Any, remat: bool
) -> None:
    ranks = pool(math.prod(shape))
    eager = ranks.run(train, shape, None, torch.float32, mode)
    planned = ranks.run(train, shape, policy, torch.float32, mode, remat)
    for (got, axes), (want, _) in zip(planned, eager, strict=True):
        assert_same_bits(got, want)
        assert axes == REPLICAS or shape != (2, 2, 2)  # nothing is reduced along an axis of one rank


@EIGHT
def test_experts_match_one_process(pool: Callable[[int], Pool], shape: tuple[int, ...]) -> None:
    ranks = pool(math.prod(shape))
    want = alone(ranks.size)  # eager steps have the bits of planned ones: see above
    for got, _ in ranks.run(train, shape, hp.Policy(pack_below_bytes=float("inf")), torch.float64):
        assert_close(got, want, 1e-12)
