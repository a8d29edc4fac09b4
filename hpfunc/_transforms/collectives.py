"""Collectives over named mesh axes, on plain tensors, with the transposes of JAX's `shard_map`.

A plain tensor is each rank's own value. ``psum <-> pvary`` and ``all_gather <-> psum_scatter`` are transposes of each
other. The transpose of `all_to_all` has its two dims exchanged, that of `ppermute` its sources and targets. Every
function takes `mesh`; the default is the mesh in use (of a `sharded` step, or of `use_mesh`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree

from .. import backends
from .._errors import LeafError, MeshError, UsageError, message
from .._running.caller_collectives import pinned, refusing_together
from .._running.channel import Comm, comm
from .._running.comparisons import compared
from .._running.context import current_mesh, current_run
from .._values.argument_names import names_of_others
from .._values.array import describe
from .._values.mesh import AxisNames, Mesh
from .._values.numerics import check_sums, dtype_name
from .._values.reduction_axes import mean_axes
from .._values.tree import paths
from ..backends import uncompiled
from ..backends.protocol import Backend

Tensor = Any
Map = Callable[[Tensor], Tensor]
Maps = tuple[Map, Map | None]  # a linear map and its transpose
Check = Callable[[str, Sequence[Tensor], Callable[[], Sequence[str]]], None]


@uncompiled
def _apply(
    function: str,
    tree: Any,
    axis_name: AxisNames,
    mesh: Mesh | None,
    maps: Callable[[Comm, Tensor], Maps],
    check: Check | None = None,
) -> Any:
    """Applies the linear map that `maps` returns for a leaf to each leaf. Checks all leaves before it sends anything.

    `check` gets the leaves, and a function that returns their paths.
    """
    mesh = current_mesh(function, mesh)
    with refusing_together(function, mesh):
        channel = comm(mesh, mesh.check_axes(function, axis_name), "user")
        leaves, treedef = optree.tree_flatten(tree)
        backend = backends.of(function, leaves)
        bad = [repr(leaf) for leaf in leaves if not backend.is_tensor(leaf)]
        if bad:
            hint = "collectives take tensors; inside a step use `hpfunc.unshard` or `.local` for a ShardedArray"
            if all(isinstance(leaf, int) for leaf in leaves if not backend.is_tensor(leaf)):
                hint = (
                    f"hpfunc.axis_size({axis_name!r}) is the number of ranks, which is psum(1, ...) in JAX; any other "
                )
                hint += "number, make it a tensor first: ranks may have different ones"
            raise LeafError(message(function, "a leaf is not a tensor", bad, hint=hint))
        if check is not None:
            check(function, leaves, lambda: paths(tree, "x"))
        found = [maps(channel, leaf) for leaf in leaves]
    results = [backend.linear(*pair, leaf) for pair, leaf in zip(found, leaves, strict=True)]
    return optree.tree_unflatten(treedef, results)


def _refuse_in_mean(function: str, channel: Comm, tensor: Tensor) -> None:
    run = current_run()
    axes = [] if run is None else [axis for axis in channel.axes if axis in mean_axes(run.session.mesh, run.numerics)]
    if axes and channel.backend.is_transformed([tensor]):
        rule = f"a differentiated function reduces over the data axis {axes[0]!r}, over which its gradient is a mean"
        hint = "return each rank's own loss, and reduce it after value_and_grad; or use Numerics(reduce_op='sum')"
        raise UsageError(message(function, rule, mesh=channel.mesh, hint=hint))


def _pinned(kind: str, channel: Comm, work: Map) -> Map:
    return pinned(kind, channel.axes, channel.mesh, work)


@names_of_others("hpfunc.psum", axis="axis_name")
def psum(x: Any, axis_name: AxisNames, *, mesh: Mesh | None = None) -> Any:
    """Returns the sum of `x` over ranks along an axis. Its transpose is `pvary`.

    Args:
        x: pytree of tensors, of the same shapes on these ranks.
        axis_name: one axis, or several, major first.
        mesh: default: the mesh in use.

    Raises:
        MeshError: no such axis, or no mesh is in use.
        LeafError: a leaf is not a tensor, or its elements cannot be added up (bool, float8).
        UsageError: called on a differentiated tensor, over a data axis, inside a mean-reduced `value_and_grad`.

    Communication: one all-reduce per leaf; 2 (n-1)/n of its bytes leave each of n ranks.

    >>> import torch
    >>> psum(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """

    def maps(channel: Comm, t: Tensor) -> Maps:
        _refuse_in_mean("hpfunc.psum", channel, t)
        transpose = compared("hpfunc.psum", "cotangent", channel.mesh, channel.axes)
        return _pinned("psum", channel, channel.all_reduce), transpose

    return _apply("hpfunc.psum", x, axis_name, mesh, maps, check_sums)


@names_of_others("hpfunc.pvary", axis="axis_name")
def pvary(x: Any, axis_name: AxisNames, *, mesh: Mesh | None = None) -> Any:
    """Returns `x`, marked as varying along an axis from here on: the gradients of these ranks are summed.

    Its transpose is `psum`. Args and errors: as `psum`.

    Communication: none; in backward an all-reduce.

    >>> import torch
    >>> pvary(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """

    def maps(channel: Comm, t: Tensor) -> Maps:
        _refuse_in_mean("hpfunc.pvary", channel, t)
        mark = compared("hpfunc.pvary", "argument", channel.mesh, channel.axes)
        return mark, _pinned("psum", channel, channel.all_reduce)

    return _apply("hpfunc.pvary", x, axis_name, mesh, maps)


@names_of_others("hpfunc.pmean", axis="axis_name")
def pmean(x: Any, axis_name: AxisNames, *, mesh: Mesh | None = None) -> Any:
    """Returns the mean of `x` over ranks along an axis: `psum` divided by the number of ranks.

    Args, errors and communication: as `psum`.

    >>> import torch
    >>> pmean(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """
    mesh = current_mesh("hpfunc.pmean", mesh)
    totals = psum(x, axis_name, mesh=mesh)
    return optree.tree_map(lambda total: total / mesh.axis_size(axis_name), totals)


@names_of_others("hpfunc.pmax", axis="axis_name")
def pmax(x: Any, axis_name: AxisNames, *, mesh: Mesh | None = None) -> Any:
    """Returns the element-wise maximum of `x` over ranks along an axis. It has no derivative.

    Args and errors: as `psum`; UsageError also if `x` is being differentiated.

    Communication: one all-gather per leaf.

    >>> import torch
    >>> pmax(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """
    return _apply("hpfunc.pmax", x, axis_name, mesh, _extreme_maps("pmax", "amax"), _check_order)


@names_of_others("hpfunc.pmin", axis="axis_name")
def pmin(x: Any, axis_name: AxisNames, *, mesh: Mesh | None = None) -> Any:
    """Returns the element-wise minimum of `x` over ranks along an axis. It has no derivative.

    Args, errors and communication: as `pmax`.

    >>> import torch
    >>> pmin(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """
    return _apply("hpfunc.pmin", x, axis_name, mesh, _extreme_maps("pmin", "amin"), _check_order)


def _extreme_maps(kind: str, method: str) -> Callable[[Comm, Tensor], Maps]:
    def maps(channel: Comm, t: Tensor) -> Maps:
        return _pinned(kind, channel, lambda t: _extreme(method, channel.backend, channel.all_gather(t))), None

    return maps


def _check_order(function: str, leaves: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> None:
    kinds = [dtype_name(leaf.dtype) for leaf in leaves]
    if any(kind.startswith("complex") for kind in kinds):
        rows = zip(names(), leaves, kinds, strict=True)
        bad = [f"{name}: {describe(x)}, {kind}" for name, x, kind in rows if kind.startswith("complex")]
        extreme = "minimum" if function == "hpfunc.pmin" else "maximum"
        hint = f"take the {extreme} of its absolute values, or of its parts"
        raise LeafError(message(function, "complex numbers have no order", bad, hint=hint))


def _extreme(method: str, backend: Backend, rows: Tensor) -> Tensor:
    """Returns ``rows.amax(0)`` or ``rows.amin(0)``, computed in a dtype that the framework can compare."""
    dtype = backend.dtype_name(rows)
    if dtype == "uint64":
        lowest = -(1 << 63)  # shifts the numbers down by half of their range
        return backend.cast(getattr(backend.cast(rows, "int64") ^ lowest, method)(0) ^ lowest, dtype)
    wide = "float32" if dtype.startswith("float8") else "int64" if dtype in ("uint16", "uint32") else dtype
    return backend.cast(getattr(backend.cast(rows, wide), method)(0), dtype)


def _dim(function: str, tensor: Tensor, dim: int, extra: int = 0) -> int:
    ndim = len(tensor.shape) + extra
    if not -ndim <= dim < ndim:
        raise MeshError(message(function, f"dim {dim} is out of range", [f"shape {tuple(tensor.shape)}"]))
    return dim % ndim


def _move(tensor: Tensor, source: int, target: int) -> Tensor:
    order = [dim for dim in range(len(tensor.shape)) if dim != source]
    order.insert(target, source)
    return tensor.permute(tuple(order))


def _parts(tensor: Tensor, dim: int, count: int, tiled: bool) -> Tensor:
    """Returns the parts along a dim as rows; the dim goes with them, or with `tiled` becomes `count` times smaller."""
    if tiled:
        shape = tuple(tensor.shape)
        tensor = tensor.reshape((*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]))
    return _move(tensor, dim, 0)


def _joined(rows: Tensor, dim: int, tiled: bool) -> Tensor:
    """Returns rows stacked along a new dim, or with `tiled` joined along a dim: undoes `_parts`."""
    stacked, shape = _move(rows, 0, dim), tuple(rows.shape[1:])
    return stacked.reshape((*shape[:dim], len(rows) * shape[dim], *shape[dim + 1 :])) if tiled else stacked


def _gather_maps(channel: Comm, dim: int, tiled: bool) -> tuple[Map, Map]:
    def gather(t: Tensor) -> Tensor:
        return _joined(channel.all_gather(t), dim, tiled)

    def scatter(t: Tensor) -> Tensor:
        return channel.reduce_scatter(_parts(t, dim, channel.size, tiled))

    return _pinned("all_gather", channel, gather), _pinned("psum_scatter", channel, scatter)


@names_of_others("hpfunc.all_gather", axis="dim")
def all_gather(x: Any, axis_name: AxisNames, *, dim: int = 0, tiled: bool = False, mesh: Mesh | None = None) -> Any:
    """Returns the tensors of all ranks along an axis. Its transpose is `psum_scatter`.

    Args:
        x: pytree of tensors, of the same shapes on these ranks.
        axis_name: one axis, or several, major first.
        dim: position of the new dim of size n; with `tiled`, the dim along which the tensors are joined.
        tiled: join along `dim` instead of stacking.
        mesh: default: the mesh in use.

    Raises:
        MeshError: no such axis or dim, or no mesh is in use.
        LeafError: a leaf is not a tensor.

    Communication: one all-gather per leaf; (n-1) times its bytes leave each rank.

    >>> import torch
    >>> all_gather(torch.ones(2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",))).shape
    torch.Size([1, 2])
    """

    def maps(channel: Comm, t: Tensor) -> Maps:
        return _gather_maps(channel, _dim("hpfunc.all_gather", t, dim, extra=not tiled), tiled)

    return _apply("hpfunc.all_gather", x, axis_name, mesh, maps)


@names_of_others("hpfunc.psum_scatter", scatter_dimension="scatter_dim", dim="scatter_dim")
def psum_scatter(
    x: Any, axis_name: AxisNames, *, scatter_dim: int = 0, tiled: bool = False, mesh: Mesh | None = None
) -> Any:
    """Returns this rank's part of the sum over ranks along an axis. Its transpose is `all_gather`.

    Args:
        x: pytree of tensors, of the same shapes on these ranks.
        axis_name: one axis, or several, major first.
        scatter_dim: the dim that is cut into n parts; its size is n, or with `tiled` a multiple of n.
        tiled: keep the dim, n times smaller, instead of dropping it.
        mesh: default: the mesh in use.

    Raises:
        MeshError: no such axis or dim, the dim does not divide, or no mesh is in use.
        LeafError: as `psum`.

    Communication: one reduce-scatter per leaf; (n-1)/n of its bytes leave each rank.

    >>> import torch
    >>> psum_scatter(torch.ones(1, 2), "shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """

    def maps(channel: Comm, t: Tensor) -> Maps:
        place = _dim("hpfunc.psum_scatter", t, scatter_dim)
        _check_cut("hpfunc.psum_scatter", t, place, channel, tiled)
        gather, scatter = _gather_maps(channel, place, tiled)
        return scatter, gather

    return _apply("hpfunc.psum_scatter", x, axis_name, mesh, maps, check_sums)


def _check_cut(function: str, t: Tensor, dim: int, channel: Comm, tiled: bool) -> None:
    n = t.shape[dim]
    if n % channel.size if tiled else n != channel.size:
        wanted = f"{'be a multiple of' if tiled else 'have size'} {channel.size}"
        rule = f"dim {dim} must {wanted}, the ranks along {channel.axes}"
        raise MeshError(message(function, rule, [f"shape {tuple(t.shape)}"], mesh=channel.mesh))


@names_of_others("hpfunc.all_to_all", split_axis="split_dim", concat_axis="concat_dim")
def all_to_all(
    x: Any, axis_name: AxisNames, split_dim: int, concat_dim: int, *, tiled: bool = False, mesh: Mesh | None = None
) -> Any:
    """Cuts `x` along one dim, sends part r to rank r, and joins the received parts along another dim.

    Args:
        x: pytree of tensors, of the same shapes on these ranks.
        axis_name: one axis, or several, major first.
        split_dim: the dim that is cut into n parts; its size is n, or with `tiled` a multiple of n.
        concat_dim: where the received parts are stacked; with `tiled` the dim along which they are joined.
        tiled: keep the number of dims per part.
        mesh: default: the mesh in use.

    Raises:
        MeshError: no such axis or dim, the dim does not divide, or no mesh is in use.
        LeafError: a leaf is not a tensor.

    Communication: one all-to-all per leaf, and one in backward; (n-1)/n of its bytes leave each rank.

    >>> import torch
    >>> all_to_all(torch.ones(1, 2), "shard", 0, 1, mesh=hpfunc.make_mesh((1,), ("shard",))).shape
    torch.Size([2, 1])
    """

    def exchange(channel: Comm, split: int, concat: int) -> Map:
        def run(t: Tensor) -> Tensor:
            return _joined(channel.all_to_all(_parts(t, split, channel.size, tiled)), concat, tiled)

        return _pinned("all_to_all", channel, run)

    def maps(channel: Comm, t: Tensor) -> Maps:
        split, concat = _dim("hpfunc.all_to_all", t, split_dim), _dim("hpfunc.all_to_all", t, concat_dim)
        _check_cut("hpfunc.all_to_all", t, split, channel, tiled)
        return exchange(channel, split, concat), exchange(channel, concat, split)

    return _apply("hpfunc.all_to_all", x, axis_name, mesh, maps)


def ppermute(x: Any, axis_name: AxisNames, perm: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> Any:
    """Sends `x` from rank to rank along an axis; ranks that receive nothing get zeros.

    Args:
        x: pytree of tensors, of the same shapes on these ranks.
        axis_name: one axis, or several, major first.
        perm: pairs (source, target) of places along the axis. Each source and each target appears at most once.
        mesh: default: the mesh in use.

    Raises:
        MeshError: no such axis or place, a place appears twice, or no mesh is in use.
        LeafError: a leaf is not a tensor.

    Communication: at most one message out and one in per rank and leaf, the reverse in backward.

    >>> import torch
    >>> ppermute(torch.ones(2), "shard", [(0, 0)], mesh=hpfunc.make_mesh((1,), ("shard",)))
    tensor([1., 1.])
    """

    def maps(channel: Comm, t: Tensor) -> Maps:
        pairs = tuple((int(source), int(target)) for source, target in perm)
        for side, places in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
            if len(set(places)) != len(places) or any(not 0 <= place < channel.size for place in places):
                rule = f"perm {list(pairs)} has a {side} twice, or outside of 0..{channel.size - 1}"
                raise MeshError(message("hpfunc.ppermute", rule, mesh=channel.mesh))
        back = tuple((target, source) for source, target in pairs)
        send, send_back = (_pinned("ppermute", channel, partial(channel.permute, pairs=p)) for p in (pairs, back))
        return send, send_back

    return _apply("hpfunc.ppermute", x, axis_name, mesh, maps)


def axis_index(axis_name: AxisNames, *, mesh: Mesh | None = None) -> int:
    """Returns this rank's place along an axis, or along several together, major first.

    >>> axis_index("shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    0
    """
    mesh = current_mesh("hpfunc.axis_index", mesh)
    return mesh.axis_index(mesh.check_axes("hpfunc.axis_index", axis_name))


def axis_size(axis_name: AxisNames, *, mesh: Mesh | None = None) -> int:
    """Returns the number of ranks along an axis, or along several together.

    >>> axis_size("shard", mesh=hpfunc.make_mesh((1,), ("shard",)))
    1
    """
    mesh = current_mesh("hpfunc.axis_size", mesh)
    return mesh.axis_size(mesh.check_axes("hpfunc.axis_size", axis_name))
