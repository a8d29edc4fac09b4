"""`unshard`, `reduce`, `reshard`: from sharded arrays to whole tensors, back, and to other specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import backends
from .._errors import SpecError, message
from .._running.caller_collectives import together
from .._running.channel import comm, gather_whole, reduce_whole
from .._running.context import current_mesh
from .._running.writes import refuse_written
from .._values.array import ShardedArray, check_sharded, describe, is_sharded, layout_of
from .._values.layout import Gather, Layout
from .._values.mesh import AxisNames, Mesh, PartitionSpec, as_axes
from .._values.numerics import check_sums
from .._values.reduction_axes import reduce_axes, scatter_axes
from .._values.tree import flatten, paths, unflatten
from ..backends import uncompiled
from .shard import check_tensors, cut, facts, leaf_specs

Tensor = Any
_ONLY_ARRAYS = "only sharded arrays can be gathered"


def unshard_array(function: str, array: ShardedArray, axes: tuple[str, ...] | None = None) -> Tensor:
    """Returns one array gathered over `axes`. It is differentiable; its transpose is `reduce`."""
    return _unsharding(function, array, axes)()


def _unsharding(function: str, array: ShardedArray, axes: tuple[str, ...] | None) -> Callable[[], Tensor]:
    mesh = array.mesh
    if axes is None and array.spec.axes:
        mesh.check_data_axes(function)
    wanted = mesh.sort(set(mesh.data_axes if axes is None else axes) & set(array.spec.axes))
    dim = array.layout.misplaced(wanted)
    if dim is not None:
        rule = f"cannot gather over {wanted} alone: dim {dim} is cut by another axis inside of them"
        hint = "gather over all axes (axes=mesh.axis_names), or reshard first"
        raise SpecError(message(function, rule, [describe(array)], mesh=mesh, hint=hint))
    if array.spec.unreduced:
        hint = "finish it with hpfunc.reduce first"
        raise SpecError(message(function, "the array still is a partial sum", [describe(array)], hint=hint))
    gather, scatter = _maps(array.layout, wanted, ())
    return lambda: backends.get(array.mesh.framework).linear(gather, scatter, array.local)


Map = Callable[[Tensor], Tensor]


def _maps(layout: Layout, axes: tuple[str, ...], reduce_axes: tuple[str, ...]) -> tuple[Map, Map]:
    """Returns the gather of local parts over `axes`, and the reduce-scatter over them that also sums `reduce_axes`.

    They are transposes of each other; the sum over `reduce_axes` is taken as the transpose of replication.
    """

    def over(tensor: Tensor) -> Gather:  # dims beyond those of the array come from an outer vmap
        extra = tuple(tensor.shape[len(layout.shape) :])
        return layout_of(layout.shape + extra, layout.spec, layout.mesh).gather(axes)

    def gather(local: Tensor) -> Tensor:
        return gather_whole(local, over(local), "user")

    def scatter(whole: Tensor) -> Tensor:
        return reduce_whole(whole, over(whole), reduce_axes)

    return gather, scatter


@uncompiled
def unshard(tree: Any, axes: AxisNames | None = None) -> Any:
    """Returns the whole tensors of a tree of sharded arrays.

    Works anywhere: eagerly, inside `value_and_grad`, under ``torch.func``. Its transpose is `reduce`. Inside a step
    prefer `unit`, which also drops the whole weights again.

    Args:
        tree: pytree of `ShardedArray`.
        axes: gather over these; default: the data axes. Dims cut by other axes stay cut.

    Returns:
        The tree with a plain tensor for each array: the whole, or this rank's part along the axes that stay.

    Raises:
        LeafError: a leaf is not a `ShardedArray`.
        SpecError: an array cannot be gathered over `axes` alone, or is still a partial sum.
        MeshError: no axes are given, and it is not known which ones are data axes.
        AgreementError: ranks disagree on the arrays.

    Communication: a digest; per array one all-gather: a rank sends its part to each other rank along `axes`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.unshard(hpfunc.shard(torch.arange(3), mesh, hpfunc.P("shard")))
    tensor([0, 1, 2])
    """
    name = "hpfunc.unshard"
    leaves, treedef = flatten(tree, is_sharded)
    mesh = _mesh_of(leaves)
    if mesh is None:
        check_sharded(name, "tree", tree, _ONLY_ARRAYS)
        return tree
    wanted = None if axes is None else as_axes(axes)
    with together(name, mesh, lambda: facts(tree, [f"axes {wanted}"] * len(leaves))):
        check_sharded(name, "tree", tree, _ONLY_ARRAYS)
        refuse_written(name, leaves, lambda: paths(tree, "tree", is_sharded))
        if wanted is not None:
            mesh.check_axes(name, wanted)
        found = [_unsharding(name, leaf, wanted) for leaf in leaves]
    return unflatten(treedef, [gather() for gather in found])


def _full(array: ShardedArray) -> Tensor:
    return unshard(array, array.spec.axes or array.mesh.axis_names)


ShardedArray._unshard = _full


def _mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    return next((leaf.mesh for leaf in leaves if is_sharded(leaf)), None)


@uncompiled
def reduce(tree: Any, mesh: Mesh | None = None, specs: Any = None) -> Any:
    """Sums a tree over the data axes and keeps this rank's part: the transpose of `unshard`.

    Plain tensors are each rank's own summands, whole over the data axes. They are reduce-scattered over the data axes
    that cut them by `specs`, and all-reduced over the other data axes, except those that the spec calls unreduced. A
    `ShardedArray` that is still a partial sum gets the missing all-reduce.

    Args:
        tree: pytree of tensors, or of `ShardedArray`.
        mesh: for plain tensors; default: the mesh in use.
        specs: for plain tensors, one `P` or a tree prefix; `P(..., unreduced={"replicate"})` leaves that sum for later.

    Returns:
        The tree with a `ShardedArray` for each leaf.

    Raises:
        SpecError: a spec does not fit.
        LeafError: a leaf is neither a tensor nor a `ShardedArray`, or its elements cannot be added up (bool, float8).

    Communication: a digest; per leaf a reduce-scatter and an all-reduce, each only where its axes have more than one
        rank.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.reduce(torch.ones(3), mesh, hpfunc.P("shard")).local
    tensor([1., 1., 1.])
    """
    name = "hpfunc.reduce"
    leaves, treedef = flatten(tree, is_sharded)
    if not leaves:
        return tree
    if all(map(is_sharded, leaves)):
        with together(name, leaves[0].mesh, lambda: facts(tree, ["finished"] * len(leaves))):
            check_sums(name, leaves, lambda: paths(tree, "tree", is_sharded))
        return unflatten(treedef, [_finish(leaf) for leaf in leaves])
    mesh = current_mesh(name, mesh)
    specs_of: list[PartitionSpec] = []
    with together(name, mesh, lambda: facts(tree, [f"to {spec}" for spec in specs_of])):
        mesh.check_data_axes(name)
        check_tensors(name, "tree", tree, mesh)
        if specs is None:
            raise SpecError(message(name, "plain tensors need specs", hint="give the specs of the result"))
        found = leaf_specs(name, tree, "tree", specs, mesh, allow_unreduced=True)
        specs_of += [spec or PartitionSpec() for spec in found]
        check_sums(name, leaves, lambda: paths(tree, "tree"))
        _check_wholes(name, paths(tree, "tree"), leaves, specs_of, mesh)
    return unflatten(treedef, [_reduce_tensor(x, s, mesh) for x, s in zip(leaves, specs_of, strict=True)])


def _cuts(spec: PartitionSpec, dim: int, mesh: Mesh) -> tuple[int, int]:
    """Returns the number of ranks over which the data axes cut a dim, and that of the other axes."""
    axes = spec.dim_axes(dim)
    over_data = mesh.axis_size([axis for axis in axes if axis in mesh.data_axes])
    return over_data, mesh.axis_size(axes) // over_data


def _check_wholes(
    function: str, names: Sequence[str], leaves: Sequence[Tensor], specs: Sequence[PartitionSpec], mesh: Mesh
) -> None:
    """Raises SpecError naming every tensor that no array of its spec can give when it is gathered over data axes."""
    misplaced, uneven = [], []
    for name, leaf, spec in zip(names, leaves, specs, strict=True):
        layout, place = layout_of(tuple(leaf.shape), spec, mesh), f"{name}: {describe(leaf)}, spec {spec}"
        if layout.misplaced(scatter_axes(layout)) is not None:
            misplaced.append(place)
        cuts = [(n, *_cuts(spec, dim, mesh)) for dim, n in enumerate(leaf.shape)]
        if any(n % over_data and stays > 1 for n, over_data, stays in cuts):
            uneven.append(place)
    if misplaced:
        hint = "in P(('tp', 'shard')) the first axis is the major one; put data axes last"
        rule = "a data axis cuts a dim outside of an axis that stays cut"
        raise SpecError(message(function, rule, misplaced, mesh=mesh, hint=hint))
    if uneven:
        hint = "pad the dim, or cut another one"
        rule = "a dim that an axis of another kind cuts too does not divide over its data axes"
        raise SpecError(message(function, rule, uneven, mesh=mesh, hint=hint))


def _reduce_tensor(tensor: Tensor, spec: PartitionSpec, mesh: Mesh) -> ShardedArray:
    # The tensor is whole over the data axes; other axes cut the array evenly.
    shape = tuple(n * _cuts(spec, dim, mesh)[1] for dim, n in enumerate(tensor.shape))
    layout = layout_of(shape, spec, mesh)
    axes = tuple(axis for axis in reduce_axes(layout) if axis not in spec.unreduced)
    gather, scatter = _maps(layout, scatter_axes(layout), axes)
    local = backends.get(mesh.framework).linear(scatter, gather, tensor)
    return ShardedArray(local, layout.shape, spec, mesh)


def _finish(array: ShardedArray) -> ShardedArray:
    axes = array.mesh.sort(array.spec.unreduced)
    if not axes:
        return array
    backend, channel = backends.get(array.mesh.framework), comm(array.mesh, axes, "user")
    local = backend.linear(channel.all_reduce, lambda x: x, array.local)
    return ShardedArray(local, array.shape, PartitionSpec(*array.spec.entries), array.mesh, trains=array._trains)


@uncompiled
def reshard(tree: Any, specs: Any) -> Any:
    """Changes the specs of sharded arrays on their mesh. Partial sums are finished first.

    Args:
        tree: pytree of `ShardedArray`.
        specs: one `P`, or a tree prefix: the new specs.

    Raises:
        LeafError: a leaf is not a `ShardedArray`.
        SpecError: a spec does not fit.

    Communication: a digest; per array whose spec changes, one all-gather over the axes that cut it. One array is whole
        at a time.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.reshard(hpfunc.shard(torch.ones(2, 2), mesh, hpfunc.P("shard")), hpfunc.P(None, "shard")).spec
    P(None, 'shard')
    """
    name = "hpfunc.reshard"
    leaves, treedef = flatten(tree, is_sharded)
    mesh = _mesh_of(leaves)
    if mesh is None:
        check_sharded(name, "tree", tree, "shard it first")
        return tree
    specs_of: list[PartitionSpec] = []
    with together(name, mesh, lambda: facts(tree, [f"to {spec}" for spec in specs_of])):
        check_sharded(name, "tree", tree, "shard it first")
        specs_of += [spec or PartitionSpec() for spec in leaf_specs(name, tree, "tree", specs, mesh)]
    return unflatten(treedef, [_reshard(array, spec) for array, spec in zip(leaves, specs_of, strict=True)])


def _reshard(array: ShardedArray, spec: PartitionSpec) -> ShardedArray:
    array = _finish(array)
    if array.spec == spec:
        return array
    return cut(unshard_array("hpfunc.reshard", array, array.mesh.axis_names), spec, array.mesh, array._trains)
