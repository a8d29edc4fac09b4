"""The norm of a whole tree of sharded arrays, each element counted once, and clipping by it.

# Note [One collective for a norm]
Arrays of a tree may be cut over different axes. One collective over all of these axes serves them all: of the ranks
that hold the same part of an array, only the first one adds it up, so that copies of a part count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .._errors import LeafError, PolicyError, message
from .._transforms.collectives import pmax, psum
from .._values.array import describe, is_sharded
from .._values.mesh import Mesh
from .._values.tree import dotted_paths
from ..backends.foreach import Foreach
from ._finite import holds
from ._leaves import Leaves, leaves_of, refuse_partial_sums
from ._optimizer import Optimizer, scaled_tree
from ._schedules import check_number

Tensor = Any
_NAME = "hpfunc.optim.global_norm"


def global_norm(
    tree: Any,
    ord: float = 2.0,
    *,
    groups: Callable[[str, Any], Hashable] | None = None,
    error_if_nonfinite: bool = False,
) -> Any:
    """Returns the norm of all elements of a tree, the same on all ranks.

    Each element counts once, however many ranks hold it. A NaN or infinity on any rank reaches all ranks. To log the
    norm of gradients and to clip by it, call this once, and then `clip_with_norm`.

    Args:
        tree: pytree of `ShardedArray` (or plain tensors, taken to be the same on all ranks).
        ord: 2 is the Euclidean norm, ``math.inf`` the largest absolute value, p > 0 ``sum(abs(x)**p) ** (1/p)``.
        groups: a function from the dotted path of a leaf (as for `partition`) and the leaf to a label. The norm of the
            leaves of each label is returned too.
        error_if_nonfinite: raise if the norm is NaN or infinite. The host waits for it.

    Returns:
        A 0-d tensor, float64 if a leaf is, else float32; 0.0 for a tree without leaves. With `groups`, a pair of it
        and a dict from label to such a tensor.

    Raises:
        LeafError: a leaf is not a floating array; or the norm is not finite and may not be, on all ranks, naming each
            leaf that has such elements.
        SpecError: an array is still a partial sum.
        PolicyError: `ord` is not a number > 0.

    Communication: one all-reduce of one number, or of one for each label, over all axes that cut arrays of the tree;
        for the largest value an all-gather.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> grads = hpfunc.shard({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}, mesh, hpfunc.P("shard"))
    >>> hpfunc.global_norm(grads), hpfunc.global_norm(grads, torch.inf)
    (tensor(13.), tensor(12.))
    >>> hpfunc.global_norm(grads, groups=lambda path, leaf: path)
    (tensor(13.), {'b': tensor(12.), 'w': tensor(5.)})
    """
    _check_ord(_NAME, ord)
    norm, each = _norm(_NAME, tree, ord, groups, error_if_nonfinite, frozen=True)
    return norm if groups is None else (norm, each)


def clip_with_norm(grads: Any, max_norm: float, norm: Any) -> Any:
    """Returns all gradients scaled by one factor so that their norm, which is given, is at most `max_norm`.

    Gradients of zeros stay zeros, and a limit of 0 makes zeros of all finite ones. A norm of NaN makes all gradients
    NaN; an infinite norm makes finite elements 0 and infinite ones NaN, as torch's clipping does.

    Args:
        grads: pytree of `ShardedArray` or tensors.
        max_norm: a number >= 0.
        norm: what `global_norm` returned for them.

    Raises:
        PolicyError: `max_norm` is negative, infinite or NaN.
        LeafError: a leaf is not a floating array.

    Communication: none.

    >>> import torch
    >>> grads = torch.tensor([3.0, 4.0])
    >>> hpfunc.clip_with_norm(grads, 1.0, hpfunc.global_norm(grads))
    tensor([0.6000, 0.8000])
    """
    name = "hpfunc.optim.clip_with_norm"
    check_number(name, "max_norm", max_norm)
    return _clipped(name, grads, max_norm, norm)


def clip_by_global_norm(max_norm: float, ord: float = 2.0, *, error_if_nonfinite: bool = False) -> Optimizer:
    """Returns the optimizer that scales all gradients by one factor so that their global norm is at most `max_norm`.

    Zeros and what is not finite: as `clip_with_norm`. That and `global_norm` do the same where the loop wants to see
    the norm, too.

    Args:
        max_norm: a number >= 0.
        ord: which norm, as for `global_norm`.
        error_if_nonfinite: as for `global_norm`.

    Raises:
        PolicyError: `max_norm` is negative, infinite or NaN, or `ord` is not a number > 0.
        SpecError, LeafError: as `global_norm`.

    Communication: as `global_norm`.

    >>> import torch
    >>> hpfunc.optim.clip_by_global_norm(1.0).update(torch.tensor([3.0, 4.0]), ())[0]
    tensor([0.6000, 0.8000])
    """
    name = "hpfunc.optim.clip_by_global_norm"
    check_number(name, "max_norm", max_norm)
    _check_ord(name, ord)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm, _ = _norm(name, grads, ord, None, error_if_nonfinite, frozen=False)
        return _clipped(name, grads, max_norm, norm), state

    return Optimizer(lambda params: (), update)


def _check_ord(function: str, ord: Any) -> None:
    if isinstance(ord, bool) or not isinstance(ord, (int, float)) or not ord > 0:
        rule = f"ord must be a number > 0, got {ord!r}"
        raise PolicyError(message(function, rule, hint="2 is the Euclidean norm, math.inf the largest absolute value"))


def _clipped(function: str, grads: Any, max_norm: float, norm: Any) -> Any:
    # A norm of 0 counts as 1, as 0 / 0 is NaN: gradients of zeros stay zeros, whatever the limit.
    factor = max_norm / (norm + (norm == 0))
    return scaled_tree(function, grads, min(factor, 1.0) if isinstance(factor, float) else factor.clamp(max=1.0))


def _norm(
    function: str, tree: Any, ord: float, groups: Callable[[str, Any], Hashable] | None, raises: bool, *, frozen: bool
) -> tuple[Any, dict[Any, Any]]:
    """Returns the norm of all leaves, and that of each group."""
    leaves, ops = leaves_of(function, "tree", tree, frozen=frozen)
    refuse_partial_sums(function, leaves, "which have no norm")
    if not leaves.leaves:
        return 0.0, {}
    paths = [] if groups is None else dotted_paths(leaves.tree, is_sharded)
    labels = [None] * len(leaves.leaves) if groups is None else list(map(groups, paths, leaves.leaves))
    powers = _powers(leaves, ops, ord, labels)
    total = powers[0] if len(powers) == 1 else powers.max() if ord == math.inf else powers.sum()
    norm = _root(ops, total, ord)
    if raises and not holds(function, (norm - norm) == 0):
        _refuse(function, leaves, ops, norm)
    return norm, {label: _root(ops, powers[i], ord) for i, label in enumerate(dict.fromkeys(labels))}


def _root(ops: Foreach, power: Tensor, ord: float) -> Tensor:
    return power if ord == math.inf else ops.root(power, ord)


def _powers(leaves: Leaves, ops: Foreach, ord: float, labels: Sequence[Hashable]) -> Tensor:
    """Returns for each label the sum of ``abs(x) ** ord`` over its leaves, or their largest value; 1-d.

    See Note [One collective for a norm].
    """
    meshes = list(dict.fromkeys(leaf.mesh for leaf in leaves.leaves if is_sharded(leaf)))
    found = None
    for mesh in meshes or [None]:
        cuts = [_cut(leaf, mesh, is_first=mesh in meshes[:1] or not meshes) for leaf in leaves.leaves]
        axes = () if mesh is None else mesh.sort(axis for cut in cuts for axis in cut or ())
        parts: dict[Hashable, list[Tensor]] = {label: [] for label in labels}
        for value, label, cut in zip(leaves.locals, labels, cuts, strict=True):
            if cut is not None and (mesh is None or not any(mesh.coordinate[axis] for axis in axes if axis not in cut)):
                parts[label].append(value)
        powers = ops.powers(list(parts.values()), ord, leaves.locals)
        if axes:
            powers = (pmax if ord == math.inf else psum)(powers, axes, mesh=mesh)
        found = powers if found is None else found.maximum(powers) if ord == math.inf else found + powers
    return found


def _cut(leaf: Any, mesh: Mesh | None, *, is_first: bool) -> set[str] | None:
    """Returns the axes that cut a leaf; None if it counts on another mesh. Plain tensors count on the first."""
    if not is_sharded(leaf):
        return set() if is_first else None
    return {axis for axis in leaf.spec.axes if leaf.mesh.axis_size(axis) > 1} if leaf.mesh == mesh else None


def _refuse(function: str, leaves: Leaves, ops: Foreach, norm: Tensor) -> None:
    """Raises LeafError naming every leaf with elements that are not finite, which all ranks learn by one collective."""
    largest = [float(x) for x in _powers(leaves, ops, math.inf, range(len(leaves.leaves)))]
    rows = zip(leaves.paths(), leaves.leaves, largest, strict=True)
    bad = [f"{path}: {describe(leaf)}, largest {x}" for path, leaf, x in rows if not math.isfinite(x)]
    hint = "nothing was updated: skip the batch, or let hpfunc.optim.apply_if_finite skip such steps"
    if not bad:
        hint = "each element is finite, but their powers overflow when they are added up: scale the loss down"
    raise LeafError(message(function, f"the norm is {float(norm)}", bad, hint=hint))
