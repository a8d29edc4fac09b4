"""How a piece of the museum is made from a step: its numbers in every way in which it runs, beside one process's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

import hpfunc as hp
from hpfunc._values.array import is_sharded
from tests.helpers.leaves import assert_close
from tests.helpers.ranks import mesh_of, outcome

WAYS = ("eager", "recorded", "planned", "planned again", "planned, with debug")
TWO = ((2,), ("shard",))
MESHES = {
    "two shards": TWO,
    "three shards": ((3,), ("shard",)),
    "two replicas of two shards": ((2, 2), ("replicate", "shard")),
}
Leaves = list[torch.Tensor]


def grid(name: str) -> hp.Mesh:
    """Returns the mesh of a name, inside a rank."""
    return mesh_of(*MESHES[name])


def size_of(name: str) -> int:
    """Returns the number of its ranks."""
    return torch.Size(MESHES[name][0]).numel()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns numbers in float64, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def whole(tree: Any, mesh: hp.Mesh) -> Leaves:
    """Returns the leaves of a tree as plain tensors: those of arrays whole."""
    leaves = optree.tree_leaves(tree, is_leaf=is_sharded)
    wholes = [hp.unshard(leaf, mesh.axis_names) if is_sharded(leaf) else leaf for leaf in leaves]
    return [torch.as_tensor(leaf).detach().clone() for leaf in wholes]


def in_all_ways(fn: Callable[..., Any], mesh: hp.Mesh, *args: Any, policy: hp.Policy | None = None) -> list[Leaves]:
    """Returns what a function gives eagerly, and in the calls of a step: one entry for each of `WAYS`."""
    with hp.use_mesh(mesh):
        found = [fn(*args)]
    step = hp.sharded(fn, mesh, policy=policy)
    found += [step(*args) for _ in range(3)]
    watched = hp.sharded(fn, mesh, policy=policy, debug=True)
    found.append([watched(*args) for _ in range(2)][-1])
    assert step.followed_plan
    assert watched.followed_plan
    return [whole(result, mesh) for result in found]


def refusals(fn: Callable[..., Any], mesh: hp.Mesh, *args: Any) -> list[str]:
    """Returns what a function raises eagerly, and in the first call of a step; ``"returned"`` for nothing."""

    def eagerly() -> Any:
        with hp.use_mesh(mesh):
            return fn(*args)

    return [outcome(eagerly), outcome(hp.sharded(fn, mesh), *args)]


def gradient(loss: Callable[[Any], torch.Tensor], weights: Any) -> Leaves:
    """Returns the value and the gradients that plain torch gives in one process."""
    leaves, treedef = optree.tree_flatten(weights)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = loss(optree.tree_unflatten(treedef, leaves))
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [value.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def assert_all_close(results: Sequence[Sequence[Leaves]], want: Leaves) -> None:
    """Fails unless each rank got these numbers in each way."""
    for rank, ways in enumerate(results):
        for way, got in zip(WAYS, ways, strict=True):
            try:
                assert_close(got, want, 1e-12)
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {way}: {error}") from None


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, as a unit of one process."""
    return fn
