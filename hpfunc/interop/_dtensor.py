"""`ShardedArray` and `DTensor`: the same parts under two descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import backends
from .._errors import LeafError, MeshError, SpecError, message
from .._running.writes import share
from .._values.array import ShardedArray, check_sharded, describe, is_sharded, layout_of
from .._values.layout import Layout
from .._values.mesh import AxisNames, Mesh, PartitionSpec
from .._values.tree import flatten, paths, unflatten

if TYPE_CHECKING:
    from ..backends.torch.dtensor import Placements

_TO, _FROM = "hpfunc.interop.to_dtensor", "hpfunc.interop.from_dtensor"

# Note [Cut as DTensor cuts]
# A placement says for each mesh axis, in mesh order, which dim it cuts. A dim that two axes cut is cut by the first of
# them, then each part by the second. Every cut makes parts of ceil(n / ranks), as ours does, so one axis on a dim
# always agrees. With two, the first in the mesh must be the major one here too; and where sizes do not divide, parts
# may differ: 5 over 2 x 2 ranks is 2, 1, 1, 1 there and 2, 2, 1, 0 here. Whether they agree is computed, from global
# facts.


def _check_framework(function: str, mesh: Mesh) -> None:
    if mesh.framework != "torch":
        hint = "parts go from one framework to the other by hpfunc.interop.from_local, or by a checkpoint"
        rule = f"the mesh is one of {mesh.framework}, DTensor is torch's"
        raise MeshError(message(function, rule, mesh=mesh, hint=hint))


def to_device_mesh(mesh: Mesh) -> Any:
    """Returns the torch `DeviceMesh` with the ranks, sizes and axis names of a mesh.

    The same object each time, as long as the process group lives. `from_device_mesh` is the inverse; it has to be told
    the data axes, which a `DeviceMesh` does not know.

    Raises:
        MeshError: no process group is initialized, as in a world of one; or the mesh is a mesh of MindSpore.

    Communication: the first time the process groups of the axes are made, which all ranks of the world must do.
    """
    _check_framework("hpfunc.interop.to_device_mesh", mesh)
    from ..backends.torch.dtensor import device_mesh_of  # it loads much of torch

    return device_mesh_of("hpfunc.interop.to_device_mesh", mesh)


def from_device_mesh(device_mesh: Any, data_axes: AxisNames | None = None, timeout_s: float = 300.0) -> Mesh:
    """Returns the mesh of a torch `DeviceMesh`: `Mesh.from_device_mesh`.

    Raises:
        MeshError: the device mesh has no dim names.

    Communication: none.
    """
    return Mesh.from_device_mesh(device_mesh, data_axes, timeout_s)


def to_dtensor(tree: Any, device_mesh: Any = None) -> Any:
    """Returns a tree with a `DTensor` for each `ShardedArray`, in the same memory.

    An axis that cuts a dim becomes ``Shard``, an axis over which the array is still a partial sum ``Partial``, any
    other ``Replicate``.

    Args:
        tree: pytree of `ShardedArray`, all on one mesh.
        device_mesh: a `DeviceMesh` with the ranks of the mesh; default: that of `to_device_mesh`.

    Raises:
        LeafError: a leaf is not a `ShardedArray`.
        SpecError: several axes cut a dim in a way that placements do not say: the first is not the major one, or
            sizes do not divide. See `reshard` for another spec.
        MeshError: `device_mesh` has other ranks, or leaves lie on two meshes, or on one of MindSpore.

    Communication: none, beside that of `to_device_mesh`.
    """
    check_sharded(_TO, "tree", tree, "get arrays from hpfunc.shard or hpfunc.init")
    leaves, treedef = flatten(tree, is_sharded)
    if not leaves:
        return tree
    mesh = leaves[0].mesh
    _check_framework(_TO, mesh)
    named = list(zip(paths(tree, "tree", is_sharded), leaves, strict=True))
    if bad := [f"{path}: on {leaf.mesh}" for path, leaf in named if leaf.mesh != mesh]:
        raise MeshError(message(_TO, "arrays lie on different meshes", bad, mesh=mesh))
    if bad := [f"{path}: {describe(leaf)}" for path, leaf in named if not _agrees(leaf.layout)]:
        hint = "use one axis for each dim, or sizes that divide with the axes in mesh order: hpfunc.reshard"
        raise SpecError(message(_TO, "a dim is cut as no DTensor is", bad, mesh=mesh, hint=hint))
    if device_mesh is None:
        device_mesh = to_device_mesh(mesh)
    else:
        _check_mesh(_TO, mesh, device_mesh)
    from ..backends.torch.dtensor import dtensor_of

    return unflatten(treedef, [dtensor_of(share(x).local, x.shape, _placements(x.layout), device_mesh) for x in leaves])


def from_dtensor(tree: Any, mesh: Mesh | None = None) -> Any:
    """Returns a tree with a `ShardedArray` for each `DTensor`, in the same memory. Other leaves stay as they are.

    Args:
        tree: pytree of `DTensor`, such as the parameters of a model under FSDP2.
        mesh: a mesh with the ranks of their `DeviceMesh`; default: `from_device_mesh` of it.

    Raises:
        LeafError: no leaf is a `DTensor`.
        SpecError: a placement has no spec: a strided shard, a partial maximum, or a dim that several axes cut
            into parts of other sizes than here.
        MeshError: the ranks of `mesh` are not those of the `DeviceMesh`.

    Communication: none.
    """
    leaves, treedef = flatten(tree, is_sharded)
    if mesh is not None:
        _check_framework(_FROM, mesh)
    from ..backends.torch.dtensor import taken

    names = paths(tree, "tree", is_sharded)
    found = [(name, leaf, taken(leaf)) for name, leaf in zip(names, leaves, strict=True)]
    if all(part is None for *_, part in found):
        raise LeafError(message(_FROM, "tree has no leaf that is a DTensor", names[:3]))
    bad, arrays = [], []
    for name, leaf, part in found:
        if part is None:
            arrays.append(leaf)
            continue
        local, placements, device_mesh = part
        its = from_device_mesh(device_mesh) if mesh is None else mesh
        _check_mesh(_FROM, its, device_mesh)
        shape, spec = tuple(leaf.shape), _spec(placements, its)
        if spec is None or not _agrees(layout_of(shape, spec, its)):
            bad.append(f"{name}: shape {shape}, placements {tuple(leaf.placements)}")
        else:
            trains = backends.get(its.framework).trains(leaf)
            arrays.append(share(ShardedArray(local, shape, spec, its, trains=trains)))
    if bad:
        hint = "redistribute it: one axis for each dim, or sizes that divide; a sum for what is partial"
        raise SpecError(message(_FROM, "placements that no spec says", bad, mesh=mesh, hint=hint))
    return unflatten(treedef, arrays)


def _placements(layout: Layout) -> Placements:
    spec = layout.spec
    dims = {axis: dim for dim in range(len(layout.shape)) for axis in spec.dim_axes(dim)}
    return [
        ("partial", None) if axis in spec.unreduced else ("shard", dims.get(axis)) for axis in layout.mesh.axis_names
    ]


def _spec(placements: Placements, mesh: Mesh) -> PartitionSpec | None:
    if any(kind == "other" for kind, _ in placements):
        return None
    placed = list(zip(mesh.axis_names, placements, strict=True))
    num_dims = 1 + max((dim for _, (_, dim) in placed if dim is not None), default=-1)
    entries = [[axis for axis, (_, its) in placed if its == dim] for dim in range(num_dims)]
    return PartitionSpec(*entries, unreduced=[axis for axis, (kind, _) in placed if kind == "partial"])


def _agrees(layout: Layout) -> bool:
    """Returns whether a DTensor with these placements has the same parts. See Note [Cut as DTensor cuts]."""
    mesh = layout.mesh
    for dim, size in enumerate(layout.shape):
        axes = mesh.sort(axis for axis in layout.spec.dim_axes(dim) if mesh.shape[axis] > 1)
        for place in mesh.coordinates() if len(axes) > 1 else ():
            there, here = _part(size, axes, place, mesh), range(size)[layout.local_slices(place)[dim]]
            if there != here:  # empty ranges are equal
                return False
    return True


def _part(size: int, axes: tuple[str, ...], place: dict[str, int], mesh: Mesh) -> range:
    part = range(size)
    for axis in axes:
        block = -(-len(part) // mesh.shape[axis])
        part = part[place[axis] * block : (place[axis] + 1) * block]
    return part


def _check_mesh(function: str, mesh: Mesh, device_mesh: Any) -> None:
    shape, ranks = tuple(device_mesh.mesh.shape), tuple(device_mesh.mesh.flatten().tolist())
    if (shape, ranks) != (mesh.sizes, mesh.ranks):
        rule = f"the DeviceMesh has shape {shape} and ranks {ranks}, and the mesh others"
        raise MeshError(message(function, rule, mesh=mesh, hint="hpfunc.interop.from_device_mesh(device_mesh)"))
