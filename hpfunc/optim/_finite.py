"""Gradients that are not finite: finds them, and skips their step on all ranks."""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from .. import backends
from .._errors import LeafError, message
from .._running.context import mesh_in_use
from .._transforms.collectives import psum
from .._values.array import is_sharded
from .._values.mesh import Mesh
from ._leaves import check_state, leaves_of, refuse_partial_sums
from ._optimizer import Optimizer

Tensor = Any


def all_finite(tree: Any) -> Tensor:
    """Returns whether no element of a tree, on any rank of the mesh, is NaN or infinite. The same on all ranks.

    Args:
        tree: pytree of `ShardedArray` or plain tensors, such as gradients. Plain ones may differ between ranks: all
            ranks of the arrays' mesh, or of the mesh in use, take part.

    Returns:
        A 0-d bool tensor; True for a tree without leaves.

    Raises:
        LeafError: a leaf is not a floating array.
        SpecError: an array is still a partial sum.

    Communication: one all-reduce of one number, over all axes of the mesh.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.optim.all_finite(hpfunc.shard([torch.ones(2), torch.tensor([1.0, torch.nan])], mesh, hpfunc.P("shard")))
    tensor(False)
    """
    return _all_finite("hpfunc.optim.all_finite", "tree", tree)


def _all_finite(function: str, name: str, tree: Any) -> Tensor:
    leaves, ops = leaves_of(function, name, tree, frozen=True)
    refuse_partial_sums(function, leaves, "which may still overflow")
    meshes = [leaf.mesh for leaf in leaves.leaves if is_sharded(leaf)]
    mesh_of_plain = meshes[0] if meshes else mesh_in_use()
    parts: dict[Mesh | None, list[Tensor]] = defaultdict(list)
    for leaf, value in zip(leaves.leaves, leaves.locals, strict=True):
        parts[leaf.mesh if is_sharded(leaf) else mesh_of_plain].append(value)
    found = [_summed(ops.num_not_finite(values), mesh) == 0 for mesh, values in parts.items()]
    return reduce(and_, found) if found else True


def _summed(number: Tensor, mesh: Mesh | None) -> Tensor:
    return number if mesh is None or mesh.size == 1 else psum(number, mesh.axis_names, mesh=mesh)


def holds(function: str, finite: Any) -> bool:
    """Returns the value of a bool, or of a 0-d tensor; True without a value, so that `lower` takes the usual branch.

    On an accelerator the host waits for the value here.
    """
    if isinstance(finite, bool):
        return finite
    backend = backends.of(function, [finite])
    if not backend.is_tensor(finite):
        raise LeafError(message(function, f"finite must be a bool or a 0-d tensor, got {type(finite).__name__}"))
    return backend.is_abstract(finite) or bool(finite)


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`.

    Attributes:
        inner: state of the optimizer inside.
        is_finite: whether the last update was made, a bool.
        num_skipped: updates that were not made so far, an int.
    """

    inner: Any
    is_finite: bool
    num_skipped: int


def apply_if_finite(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that skips, on all ranks, a step whose gradients have a NaN or an infinity.

    A skipped step leaves weights and the state inside as they were, bit for bit, donated or not. Put it around the last
    optimizer of a chain: a later transformation would turn the -0.0 of a skipped update into a real update.

    Args:
        optimizer: what to apply. If it communicates (`clip_by_global_norm`), a step that skips it leaves its plan: put
            such a part before this one.

    Raises:
        LeafError: the argument is not an `Optimizer`.

    Communication: as `all_finite`. The host waits for the answer.

    >>> import torch
    >>> optimizer = hpfunc.optim.apply_if_finite(hpfunc.optim.sgd(0.1))
    >>> weights = torch.ones(2)
    >>> updates, state = optimizer.update(torch.tensor([1.0, torch.inf]), optimizer.init(weights), weights)
    >>> hpfunc.apply_updates(weights, updates), state.is_finite
    (tensor([1., 1.]), False)
    """
    name = "hpfunc.optim.apply_if_finite"
    if not isinstance(optimizer, Optimizer):
        raise LeafError(message(name, f"the argument is not an Optimizer but {type(optimizer).__name__}"))

    def init(params: Any) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(optimizer.init(params), True, 0)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, ApplyIfFiniteState]:
        check_state(name, state, ApplyIfFiniteState)
        if not holds(name, _all_finite(name, "grads", grads)):
            return _nothing(name, grads), ApplyIfFiniteState(state.inner, False, state.num_skipped + 1)
        updates, inner = optimizer.update(grads, state.inner, params)
        return updates, ApplyIfFiniteState(inner, True, state.num_skipped)

    return Optimizer(init, update)


def _nothing(function: str, grads: Any) -> Any:
    # x + 0.0 is not x where x is -0.0, but x + -0.0 always is.
    gradients, ops = leaves_of(function, "grads", grads)
    nothing = ops.zeros(gradients.locals)
    ops.scale_(nothing, -1.0)
    return gradients.wrap(nothing)
