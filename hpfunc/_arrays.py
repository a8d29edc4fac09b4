"""From plain tensors to sharded arrays: `shard` and `init`, and the checks of specs and leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import backends
from ._agree import agreeing, control
from ._array import ShardedArray, describe, is_sharded, layout_of
from ._comm import comm
from ._errors import LeafError, SpecError, message
from ._mesh import Mesh, PartitionSpec, did_you_mean
from ._numerics import dtype_name
from ._tree import broadcast_prefix, flatten, paths, unflatten
from .backends import uncompiled

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
            faults.setdefault(fault, []).append(f"{path}: shape {shape}, spec {spec!r}")
            hint = hint or hint_here
    if faults:
        rule, bad = next(iter(faults.items()))
        others = [f"{line} ({other})" for other, lines in list(faults.items())[1:] for line in lines]
        raise SpecError(message(function, rule, bad + others, mesh=mesh, hint=hint))
    return kept


def _spec_fault(spec: Any, shape: tuple[int, ...], mesh: Mesh, allow_unreduced: bool) -> tuple[str | None, str | None]:
    if not isinstance(spec, PartitionSpec):
        return "a spec is a P, or None for P()", "write hpfunc.P('shard') for an array whose first dim is cut"
    for axis in (*spec.axes, *sorted(spec.unreduced)):
        if axis not in mesh.axis_names:
            return "spec names a mesh axis that does not exist", did_you_mean(axis, mesh)
    if len(spec.entries) > len(shape):
        return "spec has more entries than the array has dims", f"give at most {len(shape)}"
    if spec.unreduced and not allow_unreduced:
        return "spec is unreduced, but the values are whole", "drop unreduced=..., or use hpfunc.reduce"
    return None, None


def cut(tensor: Tensor, spec: PartitionSpec, mesh: Mesh) -> ShardedArray:
    """Returns this rank's part of a whole tensor, in memory of its own."""
    backend = backends.get(mesh.framework)
    layout = layout_of(tuple(tensor.shape), spec, mesh)
    part = backend.detach(tensor)[layout.local_slices(mesh.coordinate)]
    local = backend.empty(tuple(part.shape), backend.dtype_name(tensor), mesh.device)
    backend.copy(local, part)
    return ShardedArray(backend.give(local), tuple(tensor.shape), spec, mesh)


def check_tensors(function: str, name: str, tree: Any, mesh: Mesh) -> None:
    """Raises LeafError naming every leaf that is no tensor of the mesh's framework."""
    leaves = flatten(tree, is_sharded)[0]
    backend = backends.of(function, leaves)
    bad = [
        f"{path}: {type(leaf).__name__}, {describe(leaf)}"
        for path, leaf in zip(paths(tree, name, is_sharded), leaves, strict=True)
        if not backend.is_tensor(leaf)
    ]
    if bad:
        hint = "a ShardedArray is moved by hpfunc.reshard" if any(map(is_sharded, leaves)) else "make it a tensor first"
        raise LeafError(message(function, f"a leaf is no {mesh.framework} tensor", bad, hint=hint))
    if backend.name != mesh.framework:
        raise LeafError(message(function, f"{backend.name} tensors on a mesh of {mesh.framework}", mesh=mesh))


@uncompiled
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
    options = f"broadcast_from={broadcast_from}, check_replicas={check_replicas}"
    with agreeing(mesh, "hpfunc.shard", lambda: f"{_spec_facts(tree, specs_of)}\n{options}"):
        check_tensors("hpfunc.shard", "tree", tree, mesh)
        specs_of += leaf_specs("hpfunc.shard", tree, "tree", specs, mesh)
        if broadcast_from is not None and broadcast_from not in mesh.ranks:
            raise SpecError(
                message("hpfunc.shard", f"broadcast_from={broadcast_from} is no rank of the mesh", mesh=mesh)
            )
    if broadcast_from is not None:
        channel = comm(mesh, mesh.axis_names, "user")
        leaves = [channel.broadcast(leaf, mesh.ranks.index(broadcast_from)) for leaf in leaves]
    arrays = [cut(leaf, spec or PartitionSpec(), mesh) for leaf, spec in zip(leaves, specs_of, strict=True)]
    if check_replicas:
        _check_replicas("hpfunc.shard", arrays, paths(tree, "tree"), mesh)
    return unflatten(treedef, arrays)


def facts(tree: Any, wanted: Sequence[str]) -> str:
    """Returns what ranks compare before they move a tree: each leaf, and what is to become of it."""
    leaves, names = flatten(tree, is_sharded)[0], paths(tree, "tree", is_sharded)
    return "\n".join(
        f"{name}: {describe(leaf)}, {dtype_name(leaf.dtype)}, {target}"
        for name, leaf, target in zip(names, leaves, wanted, strict=True)
    )


def _spec_facts(tree: Any, specs: Sequence[PartitionSpec | None]) -> str:
    return facts(tree, [f"spec {spec}" for spec in specs])


def _check_replicas(function: str, arrays: Sequence[ShardedArray], names: Sequence[str], mesh: Mesh) -> None:
    bad = []
    for name, array in zip(names, arrays, strict=True):
        axes = mesh.sort(set(mesh.axis_names) - set(array.spec.axes))
        if mesh.axis_size(axes) > 1 and 0 not in array._value.shape:
            copies = comm(mesh, axes, "user").all_gather(array._value)
            first = copies[0]
            alike = [(x == first) | ((x != x) & (first != first)) for x in copies]  # noqa: PLR0124 - NaN is alike NaN
            if not all(bool(same.all()) for same in alike):
                bad.append(f"{name}: {describe(array)}")
    with agreeing(mesh, function, lambda: ""):
        if bad:
            hint = "seed every rank alike, or give broadcast_from=0"
            raise LeafError(message(function, "ranks hold different values of one part", bad, mesh=mesh, hint=hint))


@uncompiled
def init(init_fn: Callable[[], Any], mesh: Mesh, specs: Any) -> Any:
    """Builds a sharded tree without the whole model on any rank.

    `init_fn` first runs without data. What it does is then replayed operator by operator; each tensor is cut as soon as
    it is final, so that about one of them is whole at a time. Values, and the numbers drawn from the random generator,
    are those of ``shard(init_fn(), mesh, specs)``. MindSpore cannot replay: there the whole tree is made first.

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
    compared = False

    def prepare(tree: Any) -> Callable[[int, Tensor], ShardedArray]:
        nonlocal compared
        compared = True
        specs_of: list[PartitionSpec | None] = []
        with agreeing(mesh, "hpfunc.init", lambda: _spec_facts(tree, specs_of)):
            check_tensors("hpfunc.init", "tree", tree, mesh)
            specs_of += leaf_specs("hpfunc.init", tree, "tree", specs, mesh)
        return lambda index, leaf: cut(leaf, specs_of[index] or PartitionSpec(), mesh)

    try:
        return backends.get(mesh.framework).deferred(init_fn, prepare)
    except Exception as error:
        if not compared:  # the others wait to compare what they have
            control(mesh).agree("hpfunc.init", lambda: "", error)
        raise
