"""The norm of a whole tree of sharded arrays, each element counted once, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .._transforms.collectives import psum
from .._values.array import is_sharded
from .._values.mesh import Mesh
from ._leaves import leaves_of, refuse_partial_sums
from ._optimizer import Optimizer, scaled_tree
from ._schedules import check_number

Tensor = Any


def global_norm(tree: Any) -> Tensor:
    """Returns the Euclidean norm of all elements of a tree, the same on all ranks.

    Parts are summed over the axes that cut their array and over no other, so that copies of a part count once. A NaN
    or infinity on any rank reaches all ranks.

    Args:
        tree: pytree of `ShardedArray` (or plain tensors, taken to be the same on all ranks).

    Returns:
        A 0-d tensor, float64 if a leaf is, else float32; 0.0 for a tree without leaves.

    Raises:
        LeafError: a leaf is not a floating array.
        SpecError: an array is still a partial sum.

    Communication: one all-reduce of one number for each set of axes that cut arrays of the tree.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.optim.global_norm(hpfunc.shard({"w": torch.tensor([3.0, 4.0])}, mesh, hpfunc.P("shard")))
    tensor(5.)
    """
    norm = _norm("hpfunc.optim.global_norm", tree, frozen=True)
    return 0.0 if norm is None else norm


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Returns the optimizer that scales all gradients by one factor so that their global norm is at most `max_norm`.

    Gradients of zeros stay zeros, and a limit of 0 makes zeros of all finite ones. A norm of NaN makes all gradients
    NaN, on all ranks; an infinite norm makes finite elements 0 and infinite ones NaN, as torch's clipping does.

    Args:
        max_norm: a number >= 0.

    Raises:
        PolicyError: `max_norm` is negative, infinite or NaN.
        SpecError, LeafError: as `global_norm`.

    Communication: as `global_norm`.

    >>> import torch
    >>> hpfunc.optim.clip_by_global_norm(1.0).update(torch.tensor([3.0, 4.0]), ())[0]
    tensor([0.6000, 0.8000])
    """
    name = "hpfunc.optim.clip_by_global_norm"
    check_number(name, "max_norm", max_norm)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = _norm(name, grads, frozen=False)
        if norm is None:
            return grads, state
        # A norm of 0 counts as 1, as 0 / 0 is NaN: gradients of zeros stay zeros, whatever the limit.
        factor = (max_norm / (norm + (norm == 0))).clamp(max=1.0)
        return scaled_tree(name, grads, factor), state

    return Optimizer(lambda params: (), update)


def _norm(function: str, tree: Any, *, frozen: bool) -> Tensor | None:
    leaves, ops = leaves_of(function, "tree", tree, frozen=frozen)
    refuse_partial_sums(function, leaves, "which have no norm")
    parts: dict[tuple[Mesh | None, tuple[str, ...]], list[Tensor]] = defaultdict(list)
    for leaf, value in zip(leaves.leaves, leaves.locals, strict=True):
        parts[_cut(leaf)].append(value)
    sums = []
    for (mesh, axes), values in parts.items():
        total = ops.sum_of_squares(values)
        sums.append(psum(total, axes, mesh=mesh) if axes else total)
    return sum(sums[1:], start=sums[0]) ** 0.5 if sums else None


def _cut(leaf: Any) -> tuple[Mesh | None, tuple[str, ...]]:
    if not is_sharded(leaf):
        return None, ()
    return leaf.mesh, leaf.mesh.sort(axis for axis in leaf.spec.axes if leaf.mesh.axis_size(axis) > 1)
