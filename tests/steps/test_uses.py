"""Weights that are used in unusual ways: shared by units, several times, not at all; units without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.leaves import assert_close, assert_same_bits, local_leaves
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
D = 5


def weights() -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 2

    tree = {"shared": draw(D, D), "often": {"w": draw(D, D), "b": draw(D)}, "unused": draw(D), "scale": draw()}
    return to_framework(tree)


def loss(params: Any, x: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    embed = unit(lambda p, x: ops.linear(x, p["shared"]) * p["scale"])
    often = unit(lambda p, x: ops.tanh(ops.linear(x, p["w"], p["b"])))
    plain = unit(lambda p, x: x + x.square().mean(), name="without_weights")
    head = unit(lambda p, x: x @ p["shared"])
    skipped = unit(lambda w, x: x * w)
    x = embed({"shared": params["shared"], "scale": params["scale"]}, x)
    for _ in range(3):
        x = often(params["often"], plain({}, x))
    skipped(params["unused"], x)  # its output reaches nothing
    return head({"shared": params["shared"]}, x).square().mean()


def data(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return to_framework(torch.randn(4, D, generator=generator, dtype=torch.float64))


def train(rank: int, policy: hp.Policy | None) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(weights(), mesh, hp.P("shard"))
    step: Any = hp.grad(loss) if policy is None else hp.sharded(hp.grad(loss), mesh, policy=policy, debug=True)
    for _ in range(2):
        grads = step(params, data(rank))
    launched = [] if policy is None else [op.name for op in step.last_schedule.ops if "reduce_scatter" in op.name]
    return local_leaves(grads), optree.tree_leaves(to_torch(hp.unshard(grads))), launched


def test_each_weight_has_one_gradient_whatever_uses_it(pool: Callable[[int], Pool]) -> None:
    leaves, treedef = optree.tree_flatten(weights())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    tree: Any = optree.tree_unflatten(treedef, leaves)
    total = torch.stack([loss(tree, data(rank), lambda fn, name="": fn) for rank in range(4)]).mean()
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    want = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    eager = pool(4).run(train, None)
    planned = pool(4).run(train, hp.Policy(pack_below_bytes=0))
    for (bits, whole, launched), (eager_bits, _, _) in zip(planned, eager, strict=True):
        assert_close(whole, want, 1e-12)
        assert_same_bits(bits, eager_bits)
        assert len(launched) == 3  # the two units with a shared weight, the one that is called often, the unused one


# --- who else differentiates ----------------------------------------------------------------------------------------
def by_graph(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x), x)[0]

    return gradient


DERIVATIVES = {"transform": ops.gradient, "graph": by_graph}


def input_gradients(rank: int, how: str, planned: bool) -> torch.Tensor:
    """The gradient of what the units get beside their weights, which nobody else differentiates."""
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    params = hp.shard(weights(), mesh, hp.P("shard"))

    def step(p: Any, x: torch.Tensor) -> torch.Tensor:
        return DERIVATIVES[how](lambda x: loss(p, x))(x)

    run = hp.sharded(step, mesh, debug=True) if planned else step
    for _ in range(2):
        found = run(params, data(rank))
    return to_torch(found)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("how", list(DERIVATIVES))
def test_arguments_of_units_may_be_differentiated_by_the_framework(
    pool: Callable[[int], Pool], how: str, planned: bool
) -> None:
    for rank, found in enumerate(pool(4).run(input_gradients, how, planned)):
        want = by_graph(lambda x: loss(weights(), x, lambda fn, name="": fn))(data(rank))
        assert_close([found], [want], 1e-12)
