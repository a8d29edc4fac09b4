"""Checks that a program may call now and then: cheap enough for every hundredth step, and the same on all ranks."""

from __future__ import annotations

from typing import Any

from ._errors import LeafError, SpecError, UsageError, message
from ._running.agreement import agreeing
from ._running.context import current_session
from ._running.replicas import DRIFTED, compare_replicas
from ._values.array import describe, is_sharded
from ._values.numerics import dtype_name
from ._values.tree import flatten, paths

__all__ = ["check_replicas"]
_NAME = "hpfunc.debug.check_replicas"


def check_replicas(tree: Any) -> None:
    """Compares the parts that several ranks hold alike, bit by bit.

    Ranks along an axis that does not cut an array hold the same part of it. A learning rate or a mask that differs, an
    optimizer that looks at its own part only, a write into `.local`, or a memory fault makes them drift apart, and no
    loss shows it. Call it every N steps on parameters and optimizer state. Partial sums are not compared along the axes
    over which they are partial, and leaves that are not a `ShardedArray` not at all.

    Args:
        tree: pytree with `ShardedArray`, all on one mesh. All ranks call this together, outside of `sharded` steps.

    Raises:
        LeafError: parts differ; on all ranks, naming every array, the ranks, and the first element that differs. Or no
            leaf is a `ShardedArray`.
        SpecError: arrays lie on different meshes.
        AgreementError: ranks pass different trees.
        UsageError: it is called inside of a step.

    Communication: a digest; 8 bytes from each rank for each array of which there are replicas. More if some differ.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1, 1), ("replicate", "shard"))
    >>> params = hpfunc.shard({"w": torch.ones(4, 2)}, mesh, hpfunc.P("shard"))
    >>> hpfunc.debug.check_replicas(params)
    """
    leaves = flatten(tree, is_sharded)[0]
    named = [(n, x) for n, x in zip(paths(tree, "tree", is_sharded), leaves, strict=True) if is_sharded(x)]
    if not named:
        hint = "give it what hpfunc.shard or hpfunc.init returned, not local tensors"
        raise LeafError(message(_NAME, "tree has no ShardedArray", hint=hint))
    mesh = named[0][1].mesh
    if any(array.mesh != mesh for _, array in named):
        lines = [f"{name}: on {array.mesh}" for name, array in named]
        raise SpecError(message(_NAME, "arrays lie on different meshes", lines, hint="check one mesh after the other"))
    with agreeing(mesh, _NAME, lambda: "\n".join(f"{n}: {describe(a)}, {dtype_name(a.dtype)}" for n, a in named)):
        if current_session() is not None:
            hint = "check between steps; hpfunc.sharded(..., debug=True) compares the arguments of each step"
            raise UsageError(message(_NAME, "it is called inside of a step", hint=hint))
        gone = [name for name, array in named if array._owner.consumed_by is not None]
        if gone:
            raise LeafError(message(_NAME, "an array was donated before", gone, hint="check what the step returned"))
    compare_replicas(_NAME, named, mesh, DRIFTED)
