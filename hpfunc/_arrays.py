"""From plain tensors to sharded arrays and back: `shard`, `init`, `unshard`, `reduce`, `reshard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import backends
from ._agree import agreeing
from ._array import ShardedArray, check_sharded, describe, is_sharded, layout_of
from ._comm import comm, gather_whole, reduce_whole
from ._errors import LeafError, SpecError, message
from ._mesh import AxisNames, Mesh, PartitionSpec, did_you_mean
from ._tree import broadcast_prefix, flatten, paths, unflatten
from ._world import current_mesh

Tensor = Any


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def leaf_specs(
    function: str, tree: Any, name: str, specs: Any, mesh: Mesh, *, allow_unreduced: bool = False
) -> list[PartitionSpec | None]:
    """Returns the spec of every leaf of `tree`, all of them checked.

    A spec that stands above several leaves means `P()` on those of them that have no dims.

    Raises:
        SpecError: names every leaf whose spec does not fit its shape or the mesh.
    """
    found = broadcast_prefix(
        function, specs, tree, argument="specs", name=name, is_prefix_leaf=_is_spec, is_leaf=is_sharded
    )
    leaves, names = flatten(tree, is_sharded)[0], paths(tree, name, is_sharded)
    kept: list[PartitionSpec | None] = []
    faults: dict[str, list[str]] = {}
    hint = None
    for (given, exact), leaf, path in zip(found, leaves, names, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        spreads = isinstance(given, PartitionSpec) and not exact and not shape
        spec = PartitionSpec(unreduced=given.unreduced) if spreads else given
        kept.append(spec)
        fault, hint_here = (None, None) if spec is None else _spec_fault(spec, shape, mesh, allow_unreduced)
        if fault is not None:
            faults.setdefault(fault, []).append(f"{path}: shape {shape}, spec {spec}")
            hint = hint or hint_here
    if faults:
        rule, bad = next(iter(faults.items()))
        others = [f"{line} ({other})" for other, lines in list(faults.items())[1:] for line in lines]
        raise SpecError(message(function, rule, bad + others, mesh=mesh, hint=hint))
    return kept


def _spec_fault(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, allow_unreduced: bool
) -> tuple[str | None, str | None]:
    for axis in (*spec.axes, *sorted(spec.unreduced)):
        if axis not in mesh.axis_names:
            return "spec names a mesh axis that does not exist", did_you_mean(axis, mesh)
    if len(spec.entries) > len(shape):
        return "spec has more entries than the array has dims", f"drop entries, or use P() for {len(shape)} dims"
    if spec.unreduced and not allow_unreduced:
        return "spec is unreduced, but the values are whole", "drop unreduced=..., or use hpfunc.reduce"
    return None, None


def _cut(tensor: Tensor, spec: PartitionSpec, mesh: Mesh) -> ShardedArray:
    backend = backends.get(mesh.framework)
    layout = layout_of(tuple(tensor.shape), spec, mesh)
    part = backend.detach(tensor)[layout.local_slices(mesh.coordinate)]
    local = backend.empty(tuple(part.shape), backend.dtype_name(tensor), mesh.device)
    backend.copy(local, part)
    return ShardedArray(local, tuple(tensor.shape), spec, mesh)


def _check_tensors(function: str, name: str, tree: Any, mesh: Mesh) -> None:
    leaves = flatten(tree, is_sharded)[0]
    backend = backends.of(function, leaves)
    bad = [
        f"{path}: {describe(leaf)}"
        for path, leaf in zip(paths(tree, name, is_sharded), leaves, strict=True)
        if not backend.is_tensor(leaf)
    ]
    if bad:
        hint = "a ShardedArray is moved by hpfunc.reshard" if any(map(is_sharded, leaves)) else "make it a tensor first"
        raise LeafError(message(function, f"a leaf is no {mesh.framework} tensor", bad, hint=hint))
    if backend.name != mesh.framework:
        raise LeafError(message(function, f"{backend.name} tensors on a mesh of {mesh.framework}", mesh=mesh))


def shard(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    *,
    broadcast_from: int | None = None,
    check_replicas: bool = False,
) -> Any:
    """Cuts a tree of whole tensors: every rank keeps its own part.

    Args:
        tree: pytree of tensors, of the same shapes on all ranks.
        mesh: where the arrays lie.
        specs: one `P`, or a tree of them that is a prefix of `tree`.
        broadcast_from: take the values of this rank; the other ranks' tensors only give shapes.
        check_replicas: compare the parts that several ranks hold alike.

    Returns:
        The tree with a `ShardedArray` for each tensor; its memory is its own, on the mesh's device.

    Raises:
        SpecError: a spec does not fit.
        LeafError: a leaf is no tensor of the mesh's framework, or replicas differ.
        AgreementError: ranks disagree on the tree, shapes, dtypes or specs.

    Communication: a digest; with `broadcast_from` one broadcast of each tensor; with `check_replicas` a digest per
        leaf.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.shard({"w": torch.ones(4, 2)}, mesh, hpfunc.P("shard"))
    {'w': ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard'))}
    """
    specs_of: list[PartitionSpec | None] = []
    leaves, treedef = flatten(tree, is_sharded)
    with agreeing(mesh, "hpfunc.shard", lambda: _facts(tree, specs_of)):
        _check_tensors("hpfunc.shard", "tree", tree, mesh)
        specs_of += leaf_specs("hpfunc.shard", tree, "tree", specs, mesh)
        if broadcast_from is not None and broadcast_from not in mesh.ranks:
            raise SpecError(
                message("hpfunc.shard", f"broadcast_from={broadcast_from} is no rank of the mesh", mesh=mesh)
            )
    if broadcast_from is not None:
        channel = comm(mesh, mesh.axis_names, "user")
        leaves = [channel.broadcast(leaf, mesh.ranks.index(broadcast_from)) for leaf in leaves]
    arrays = [_cut(leaf, spec or PartitionSpec(), mesh) for leaf, spec in zip(leaves, specs_of, strict=True)]
    if check_replicas:
        _check_replicas("hpfunc.shard", arrays, paths(tree, "tree"), mesh)
    return unflatten(treedef, arrays)


def _facts(tree: Any, specs: Sequence[Any]) -> str:
    leaves, names = flatten(tree, is_sharded)[0], paths(tree, "tree", is_sharded)
    padded = [*specs, *[None] * (len(leaves) - len(specs))]
    return "\n".join(
        f"{name}: shape {tuple(leaf.shape)}, {leaf.dtype}, spec {spec}"
        for name, leaf, spec in zip(names, leaves, padded, strict=True)
    )


def _check_replicas(function: str, arrays: Sequence[ShardedArray], names: Sequence[str], mesh: Mesh) -> None:
    bad = []
    for name, array in zip(names, arrays, strict=True):
        axes = mesh.sort(set(mesh.axis_names) - set(array.spec.axes))
        if mesh.axis_size(axes) > 1 and 0 not in array._value.shape:
            copies = comm(mesh, axes, "user").all_gather(array._value)
            if any(not bool((copies[i] == copies[0]).all()) for i in range(1, copies.shape[0])):
                bad.append(f"{name}: {describe(array)}")
    with agreeing(mesh, function, lambda: ""):
        if bad:
            hint = "seed every rank alike, or give broadcast_from=0"
            raise LeafError(message(function, "ranks hold different values of one part", bad, mesh=mesh, hint=hint))


def init(init_fn: Callable[[], Any], mesh: Mesh, specs: Any) -> Any:
    """Builds a sharded tree without the whole model on any rank.

    `init_fn` first runs without data. What it does is then replayed operator by operator; each tensor is cut as soon as
    it is final, so that about one of them is whole at a time. Values, and the numbers drawn from the random generator,
    are those of ``shard(init_fn(), mesh, specs)``.

    Args:
        init_fn: takes nothing, returns a pytree of tensors; the same on all ranks, random seeds included.
        mesh: where the arrays lie.
        specs: one `P`, or a tree of them that is a prefix of the result.

    Raises:
        SpecError, LeafError, AgreementError: as `shard`.
        LoweringError: `init_fn` needs the value of a tensor.

    Communication: a digest.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.init(lambda: {"w": torch.zeros(4, 2)}, mesh, hpfunc.P("shard"))
    {'w': ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard'))}
    """

    def prepare(tree: Any) -> Callable[[int, Tensor], ShardedArray]:
        specs_of: list[PartitionSpec | None] = []
        with agreeing(mesh, "hpfunc.init", lambda: _facts(tree, specs_of)):
            _check_tensors("hpfunc.init", "tree", tree, mesh)
            specs_of += leaf_specs("hpfunc.init", tree, "tree", specs, mesh)
        return lambda index, leaf: _cut(leaf, specs_of[index] or PartitionSpec(), mesh)

    return backends.get(mesh.framework).deferred(init_fn, prepare)


def _gather_axes(function: str, array: ShardedArray, axes: tuple[str, ...] | None) -> tuple[str, ...]:
    mesh = array.mesh
    wanted = mesh.sort(set(mesh.data_axes if axes is None else axes) & set(array.spec.axes))
    dim = array.layout.misplaced(wanted)
    if dim is not None:
        rule = f"cannot gather over {wanted} alone: dim {dim} is cut by another axis inside of them"
        hint = "gather over all axes (axes=mesh.axis_names), or reshard first"
        raise SpecError(message(function, rule, [describe(array)], mesh=mesh, hint=hint))
    return wanted


def unshard_array(function: str, array: ShardedArray, axes: tuple[str, ...] | None = None) -> Tensor:
    """Returns the whole of one array over `axes`, differentiable with `reduce` as its transpose."""
    wanted = _gather_axes(function, array, axes)
    backend, shape, spec, mesh = backends.get(array.mesh.framework), array.shape, array.spec, array.mesh
    if array.spec.unreduced:
        hint = "finish it with hpfunc.reduce first"
        raise SpecError(message(function, "the array still is a partial sum", [describe(array)], hint=hint))

    def gather(local: Tensor) -> Tensor:  # dims beyond those of the array come from an outer vmap
        extra = tuple(local.shape[len(shape) :])
        return gather_whole(local, layout_of(shape + extra, spec, mesh).gather(wanted), "user")

    def scatter(whole: Tensor) -> Tensor:
        extra = tuple(whole.shape[len(shape) :])
        return reduce_whole(whole, layout_of(shape + extra, spec, mesh).gather(wanted), (), ("user", "user"))

    return backend.linear(gather, scatter, array.local)


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
        LeafError: a leaf is no `ShardedArray`.
        SpecError: an array cannot be gathered over `axes` alone, or still is a partial sum.

    Communication: per array one all-gather; a rank sends its part to each other rank along `axes`.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.unshard(hpfunc.shard(torch.arange(3), mesh, hpfunc.P("shard")))
    tensor([0, 1, 2])
    """
    check_sharded("hpfunc.unshard", "tree", tree, "only sharded arrays can be gathered")
    leaves, treedef = flatten(tree, is_sharded)
    wanted = leaves[0].mesh.check_axes("hpfunc.unshard", axes) if leaves and axes is not None else None
    return unflatten(treedef, [unshard_array("hpfunc.unshard", leaf, wanted) for leaf in leaves])


def reduce(tree: Any, mesh: Mesh | None = None, specs: Any = None) -> Any:
    """Sums a tree over the data axes and keeps this rank's part: the transpose of `unshard`.

    Plain tensors are each rank's own summands, whole over the data axes: a reduce-scatter over the data axes that cut
    them by `specs`, an all-reduce over the others, save those that the spec calls unreduced. A `ShardedArray` that
    still is a partial sum is finished by the all-reduce that it lacks.

    Args:
        tree: pytree of tensors, or of `ShardedArray`.
        mesh: for plain tensors; default: the mesh in use.
        specs: for plain tensors, one `P` or a tree prefix; `P(..., unreduced={"replicate"})` leaves that sum for later.

    Returns:
        The tree with a `ShardedArray` for each leaf.

    Raises:
        SpecError: a spec does not fit.
        LeafError: a leaf is neither a tensor nor a `ShardedArray`.

    Communication: per leaf a reduce-scatter and an all-reduce, each only where its axes have more than one rank.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.reduce(torch.ones(3), mesh, hpfunc.P("shard")).local
    tensor([1., 1., 1.])
    """
    leaves, treedef = flatten(tree, is_sharded)
    if all(map(is_sharded, leaves)):
        return unflatten(treedef, [_finish(leaf) for leaf in leaves])
    mesh = current_mesh("hpfunc.reduce", mesh)
    _check_tensors("hpfunc.reduce", "tree", tree, mesh)
    if specs is None:
        raise SpecError(message("hpfunc.reduce", "plain tensors need specs", hint="give the specs of the result"))
    found = leaf_specs("hpfunc.reduce", tree, "tree", specs, mesh, allow_unreduced=True)
    specs_of = [spec or PartitionSpec() for spec in found]
    _check_wholes("hpfunc.reduce", paths(tree, "tree"), leaves, specs_of, mesh)
    return unflatten(treedef, [_reduce_tensor(x, s, mesh) for x, s in zip(leaves, specs_of, strict=True)])


def _cuts(spec: PartitionSpec, dim: int, mesh: Mesh) -> tuple[int, int]:
    """Returns over how many ranks the data axes cut a dim, and the axes that stay."""
    axes = spec.dim_axes(dim)
    over_data = mesh.axis_size([axis for axis in axes if axis in mesh.data_axes])
    return over_data, mesh.axis_size(axes) // over_data


def _check_wholes(
    function: str, names: Sequence[str], leaves: Sequence[Tensor], specs: Sequence[PartitionSpec], mesh: Mesh
) -> None:
    """Raises SpecError naming every tensor that cannot be what the data axes gather of an array of its spec."""
    misplaced, uneven = [], []
    for name, leaf, spec in zip(names, leaves, specs, strict=True):
        layout, place = layout_of(tuple(leaf.shape), spec, mesh), f"{name}: {describe(leaf)}, spec {spec}"
        if layout.misplaced(layout.gather_axes) is not None:
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


def _whole_of(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The global shape of an array whose whole over the data axes has `shape` (other axes cut it evenly)."""
    return tuple(n * _cuts(spec, dim, mesh)[1] for dim, n in enumerate(shape))


def _reduce_tensor(tensor: Tensor, spec: PartitionSpec, mesh: Mesh) -> ShardedArray:
    backend, shape = backends.get(mesh.framework), _whole_of(tuple(tensor.shape), spec, mesh)
    axes = layout_of(shape, spec, mesh).reduce_axes
    axes = tuple(axis for axis in axes if axis not in spec.unreduced)
    wanted = layout_of(shape, spec, mesh).gather_axes

    def scatter(whole: Tensor) -> Tensor:
        extra = tuple(whole.shape[len(shape) :])
        return reduce_whole(whole, layout_of(shape + extra, spec, mesh).gather(wanted), axes, ("user", "user"))

    def gather(local: Tensor) -> Tensor:
        extra = tuple(local.shape[len(shape) :])
        return gather_whole(local, layout_of(shape + extra, spec, mesh).gather(wanted), "user")

    return ShardedArray(backend.linear(scatter, gather, tensor), shape, spec, mesh)


def _finish(array: ShardedArray) -> ShardedArray:
    axes = array.mesh.sort(array.spec.unreduced)
    if not axes:
        return array
    backend, channel = backends.get(array.mesh.framework), comm(array.mesh, axes, "user")
    local = backend.linear(channel.all_reduce, lambda x: x, array.local)
    return ShardedArray(local, array.shape, PartitionSpec(*array.spec.entries), array.mesh)


def reshard(tree: Any, specs: Any) -> Any:
    """Lays sharded arrays out anew on their mesh; partial sums are finished first.

    Args:
        tree: pytree of `ShardedArray`.
        specs: one `P`, or a tree prefix: the new specs.

    Raises:
        LeafError: a leaf is no `ShardedArray`.
        SpecError: a spec does not fit.

    Communication: per array whose spec changes, one all-gather over the axes that cut it; one array is whole at a time.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.reshard(hpfunc.shard(torch.ones(2, 2), mesh, hpfunc.P("shard")), hpfunc.P(None, "shard")).spec
    P(None, 'shard')
    """
    check_sharded("hpfunc.reshard", "tree", tree, "shard it first")
    leaves, treedef = flatten(tree, is_sharded)
    if not leaves:
        return tree
    specs_of = leaf_specs("hpfunc.reshard", tree, "tree", specs, leaves[0].mesh)
    return unflatten(treedef, [_reshard(a, s or PartitionSpec()) for a, s in zip(leaves, specs_of, strict=True)])


def _reshard(array: ShardedArray, spec: PartitionSpec) -> ShardedArray:
    array = _finish(array)
    if array.spec == spec:
        return array
    return _cut(unshard_array("hpfunc.reshard", array, array.mesh.axis_names), spec, array.mesh)
