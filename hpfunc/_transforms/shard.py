"""`shard` and `init`, which make sharded arrays from plain tensors, and the checks of specs and leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .. import backends
from .._errors import AgreementError, LeafError, PeerError, SpecError, message
from .._running.agreement import agreeing, control, digest_of_text
from .._running.channel import comm
from .._running.random_numbers import numbers_of_one_process
from .._running.writes import watch
from .._values.argument_names import check_function, check_mesh
from .._values.array import ShardedArray, born, describe, is_sharded, layout_of
from .._values.mesh import Mesh, PartitionSpec, did_you_mean
from .._values.numerics import dtype_name
from .._values.tree import broadcast_prefix, flatten, paths, unflatten
from ..backends import uncompiled
from .freeze import marks_of

Tensor = Any


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def leaf_specs(
    function: str, tree: Any, name: str, specs: Any, mesh: Mesh, *, allow_unreduced: bool = False
) -> list[PartitionSpec | None]:
    """Checks and returns the spec of every leaf of `tree`.

    A spec that stands for several leaves means `P()` for leaves without dims.

    Raises:
        SpecError: a spec does not fit the shape of its leaf or the mesh. Names every such leaf.
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


def cut(tensor: Tensor, spec: PartitionSpec, mesh: Mesh, trains: bool | None = None) -> ShardedArray:
    """Returns a copy of this rank's part of a whole tensor. `trains`: see `marks_of`."""
    backend = backends.get(mesh.framework)
    layout = layout_of(tuple(tensor.shape), spec, mesh)
    part = backend.detach(tensor)[layout.local_slices(mesh.coordinate)]
    local = backend.empty(tuple(part.shape), backend.dtype_name(tensor), mesh.device)
    backend.copy(local, part)
    return watch(ShardedArray(backend.give(local), tuple(tensor.shape), spec, mesh, trains=trains))


def check_tensors(function: str, name: str, tree: Any, mesh: Mesh) -> None:
    """Raises LeafError naming every leaf that is not a tensor of the mesh's framework."""
    leaves = flatten(tree, is_sharded)[0]
    backend = backends.of(function, leaves)
    bad = [
        f"{path}: {type(leaf).__name__}, {describe(leaf)}"
        for path, leaf in zip(paths(tree, name, is_sharded), leaves, strict=True)
        if not backend.is_tensor(leaf)
    ]
    if bad:
        hint = _tensor_hint([leaf for leaf in leaves if not backend.is_tensor(leaf)])
        raise LeafError(message(function, f"a leaf is not a {mesh.framework} tensor", bad, hint=hint))
    if backend.name != mesh.framework:
        raise LeafError(message(function, f"{backend.name} tensors on a mesh of {mesh.framework}", mesh=mesh))
    pairs = zip(paths(tree, name, is_sharded), leaves, strict=True)
    if empty := [f"{path}: {describe(leaf)}" for path, leaf in pairs if backend.device_of(leaf) == "meta"]:
        hint = "hpfunc.init and hpfunc.init_module make values part by part"
        raise LeafError(message(function, "a leaf is on the meta device, where it has no values", empty, hint=hint))


def _tensor_hint(leaves: Sequence[Any]) -> str:
    """Returns what to do about leaves that are not tensors."""
    if any(map(is_sharded, leaves)):
        return "a ShardedArray is moved by hpfunc.reshard"
    for leaf in leaves:
        name = type(leaf).__name__
        if hasattr(leaf, "named_parameters") or hasattr(leaf, "parameters_and_names"):
            return "a module is not a tree: apply, params = hpfunc.from_module(module), then shard params"
        if dataclasses.is_dataclass(leaf) or hasattr(type(leaf), "__attrs_attrs__"):
            return f"hpfunc.register_dataclass({name}) makes the objects of this class trees"
        if isinstance(leaf, Iterator):
            return f"a {name} can be read only once: give a dict or a list, such as dict(module.named_parameters())"
    return "make it a tensor first"


@uncompiled
def shard(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    *,
    broadcast_from: int | None = None,
    check_replicas: bool = True,
) -> Any:
    """Cuts a tree of whole tensors: every rank keeps its own part.

    Args:
        tree: pytree of tensors, of the same shapes and values on all ranks.
        mesh: where the arrays lie.
        specs: one `P`, or a tree of them that is a prefix of `tree`.
        broadcast_from: use the values of this rank; of the other ranks' tensors only the shapes are used.
        check_replicas: compare the values on all ranks bit by bit. Without it the caller guarantees that they are
            equal; parts of different values do not form one array. Under torch.func nothing is compared.

    Returns:
        The tree with a `ShardedArray` for each tensor, in new memory on the mesh's device. The array of a module's
        parameter without gradient is frozen (see `freeze`).

    Raises:
        SpecError: a spec does not fit.
        LeafError: a leaf is not a tensor of the mesh's framework, or ranks give different values.
        AgreementError: ranks disagree on the tree, shapes, dtypes or specs.

    Communication: a digest; with `broadcast_from` one broadcast of each tensor, else a second digest, of all values;
        if that differs, a digest per leaf.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.shard({"w": torch.ones(4, 2)}, mesh, hpfunc.P("shard"))
    {'w': ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard'))}
    """
    name = "hpfunc.shard"
    check_mesh(name, mesh, "hpfunc.shard(tree, mesh, specs)")
    specs_of: list[PartitionSpec | None] = []
    digests: list[int] = []
    leaves, treedef = flatten(tree, is_sharded)
    marks: list[bool | None] = []
    options = f"broadcast_from={broadcast_from}, check_replicas={check_replicas}"
    with agreeing(mesh, name, lambda: f"{_spec_facts(tree, specs_of, marks)}\n{options}"):
        check_tensors(name, "tree", tree, mesh)
        marks += marks_of(name, leaves)
        specs_of += leaf_specs(name, tree, "tree", specs, mesh)
        if broadcast_from is not None and broadcast_from not in mesh.ranks:
            raise SpecError(message(name, f"broadcast_from={broadcast_from} is not a rank of the mesh", mesh=mesh))
        if broadcast_from is None and check_replicas:
            digests += [digest_of(mesh, leaf) for leaf in leaves]
    if broadcast_from is not None:
        channel = comm(mesh, mesh.axis_names, "user")
        leaves = [channel.broadcast(leaf, mesh.ranks.index(broadcast_from)) for leaf in leaves]
    elif check_replicas:
        hint = "make them alike (the same seed on all ranks: torch.manual_seed(0)), or give broadcast_from=0"
        compare_values(name, "ranks give different values for one array", tree, digests, mesh, hint)
    rows = zip(leaves, specs_of, marks, control(mesh).births(len(leaves)), strict=True)
    arrays = [born(cut(leaf, spec or PartitionSpec(), mesh, trains), birth) for leaf, spec, trains, birth in rows]
    return unflatten(treedef, arrays)


def digest_of(mesh: Mesh, tensor: Tensor) -> int:
    """Returns a digest of a whole tensor; 0 on a mesh of one rank, and for a tensor that is abstract or transformed."""
    backend = backends.get(mesh.framework)
    if mesh.size == 1 or backend.is_abstract(tensor) or backend.is_transformed(()):
        return 0
    return backend.digest(tensor)


def compare_values(function: str, rule: str, tree: Any, digests: Sequence[int], mesh: Mesh, hint: str) -> None:
    """Compares the digests of the leaves of a tree between all ranks.

    Raises:
        LeafError: some differ. Raised on all ranks; names every leaf and the ranks.

    Communication: 8 bytes from each rank; 8 more for each leaf if values differ.
    """
    if mesh.size == 1 or not digests:
        return
    label, total = f"comparison of values in {function}", digest_of_text(repr(list(digests)))
    if len({number for (number,) in control(mesh).exchange(label, [total])}) == 1:
        return
    columns = zip(*control(mesh).exchange(label, digests), strict=True)
    leaves, names = flatten(tree, is_sharded)[0], paths(tree, "tree", is_sharded)
    bad = [
        f"{name}: {describe(leaf)}; {_spell_groups(mesh.ranks, column)}"
        for name, leaf, column in zip(names, leaves, columns, strict=True)
        if len(set(column)) > 1
    ]
    raise LeafError(message(function, rule, bad, mesh=mesh, hint=hint))


def _spell_groups(ranks: Sequence[int], column: Sequence[int]) -> str:
    groups: dict[int, list[int]] = {}
    for rank, number in zip(ranks, column, strict=True):
        groups.setdefault(number, []).append(rank)
    return "alike are ranks " + ", ".join(map(str, groups.values()))


def facts(tree: Any, wanted: Sequence[str]) -> str:
    """Returns the text that ranks compare before they move a tree: each leaf and what will be done with it."""
    leaves, names = flatten(tree, is_sharded)[0], paths(tree, "tree", is_sharded)
    return "\n".join(
        f"{name}: {describe(leaf)}, {dtype_name(leaf.dtype)}, {target}"
        for name, leaf, target in zip(names, leaves, wanted, strict=True)
    )


def _spec_facts(tree: Any, specs: Sequence[PartitionSpec | None], marks: Sequence[bool | None]) -> str:
    pairs = zip(specs, marks, strict=True)
    return facts(tree, [f"spec {spec}{', frozen' if trains is False else ''}" for spec, trains in pairs])


@uncompiled
def init(init_fn: Callable[[], Any], mesh: Mesh, specs: Any) -> Any:
    """Builds a sharded tree without the whole model on any rank.

    `init_fn` first runs without data. Its operators are then replayed one by one; each tensor is cut as soon as it is
    final, so that about one tensor is whole at a time. MindSpore cannot replay: there the whole tree is made first.

    Values equal those of one process, ``shard(init_fn(), mesh, specs)`` with the global random generators of the mesh's
    first rank: torch's (for the CPU and the mesh's device), `random`'s and numpy's. How other ranks are seeded does not
    matter. A generator that had the first rank's state continues after the drawn numbers; any other continues as if
    `init` had not been called. So ranks have equal states afterwards exactly if they had equal states before.

    Args:
        init_fn: takes nothing, returns a pytree of tensors. It, and any seed that it sets, is the same on all ranks.
        mesh: where the arrays lie.
        specs: one `P`, or a tree of them that is a prefix of the result.

    Raises:
        SpecError, AgreementError: as `shard`.
        LeafError: as `shard`; also if the ranks still make different values.
        LoweringError: `init_fn` needs the value of a tensor.

    Communication: digests; the states of the first rank's generators (about 10 KB each) if states of ranks differ.

    >>> import torch
    >>> mesh = hpfunc.make_mesh((1,), ("shard",))
    >>> hpfunc.init(lambda: {"w": torch.zeros(4, 2)}, mesh, hpfunc.P("shard"))
    {'w': ShardedArray(shape=(4, 2), dtype=torch.float32, spec=P('shard'))}
    """
    name = "hpfunc.init"
    check_mesh(name, mesh, "hpfunc.init(init_fn, mesh, specs)")
    check_function(name, "init_fn", init_fn, "hpfunc.shard(tree, mesh, specs) cuts values that are there")
    digests: dict[int, int] = {}
    compares = False  # whether a comparison with the other ranks is in progress: all ranks see its failure

    def prepare(tree: Any) -> Callable[[int, Tensor], ShardedArray]:
        nonlocal compares
        compares = True
        specs_of: list[PartitionSpec | None] = []
        marks: list[bool | None] = []
        with agreeing(mesh, name, lambda: _spec_facts(tree, specs_of, marks)):
            check_tensors(name, "tree", tree, mesh)
            marks += marks_of(name, flatten(tree, is_sharded)[0])
            specs_of += leaf_specs(name, tree, "tree", specs, mesh)
        compares = False
        births = control(mesh).births(len(specs_of))

        def keep(index: int, leaf: Tensor) -> ShardedArray:
            digests[index] = digest_of(mesh, leaf)
            return born(cut(leaf, specs_of[index] or PartitionSpec(), mesh, marks[index]), births[index])

        return keep

    control(mesh).agree(name, lambda: f"values are made on {mesh}")
    with numbers_of_one_process(mesh):
        try:
            made = backends.get(mesh.framework).deferred(init_fn, prepare)
        except Exception as error:
            if not compares:  # the others wait in the comparison
                with suppress(AgreementError, PeerError):
                    control(mesh).agree(name, lambda: "", error)
            raise
    control(mesh).agree(name, lambda: "values are made")
    hint = "nothing in init_fn may depend on the rank: no seed, no time; or make the values on one rank, and " + (
        "hpfunc.shard(tree, mesh, specs, broadcast_from=0)"
    )
    compare_values(name, "ranks make different values", made, [digests[i] for i in sorted(digests)], mesh, hint)
    return made
