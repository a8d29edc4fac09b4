"""`make_mesh`: arranges the processes in a `Mesh`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

from .. import backends
from .._errors import ArgumentError, HpfuncWarning, MeshError, message
from .._values.array import ShardedArray, flatten_array, unflatten_array
from .._values.mesh import CUTTING, DATA, REPLICATING, AxisNames, Mesh, as_axes, default_data_axes


def make_mesh(
    shape: Sequence[int] | int,
    axis_names: AxisNames,
    data_axes: AxisNames | None = None,
    *,
    device: str | None = None,
    timeout_s: float = 300.0,
) -> Mesh:
    """Arranges all processes in a grid.

    Joins an existing process group, else starts one from the environment that torchrun sets, else makes a mesh of one
    process.

    Args:
        shape: number of ranks along each axis; one entry may be -1, which is inferred.
        axis_names: a name for each axis, major first.
        data_axes: axes over which ranks hold different data. Default: those that are data axes by their names
            (``"replicate"``, ``"shard"``, ``"dp"``, ``"fsdp"``, ``"data"``, ``"batch"``, ``"dp_replicate"``,
            ``"dp_shard"`` and a few more), else the only axis of a 1-D mesh that is not named after another kind of
            parallelism (``"tp"``). If this finds none, units and gradients raise on more than one rank; ``()`` says
            that no axis is a data axis.
        device: device of this process; default: its accelerator if there is one, else ``"cpu"``.
        timeout_s: seconds after which a rank that waits for another raises.

    Raises:
        ArgumentError: names and sizes are in another order; it is a UsageError, and a TypeError.
        MeshError: the shape does not match the number of processes, or a name is wrong.

    Communication: none (processes meet when they are started).

    >>> make_mesh((1, 1), ("replicate", "shard"))
    Mesh(replicate=1, shard=1)
    """
    _check_order(shape, axis_names)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    names = as_axes(axis_names)
    backend = backends.default()
    backend.register(ShardedArray, flatten_array, unflatten_array)
    world = backend.join(timeout_s, device)
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        if known and world.size % known == 0:
            sizes = tuple(world.size // known if size == -1 else size for size in sizes)
    if math.prod(sizes) != world.size or min(sizes, default=0) < 1:
        rule = f"a mesh of shape {sizes} does not match the {world.size} processes that were started"
        hint = (
            f"start {math.prod(sizes)} processes (torchrun --nproc-per-node ...)" if min(sizes, default=0) > 0 else None
        )
        raise MeshError(message("hpfunc.make_mesh", rule, hint=hint))
    found = default_data_axes(names) if data_axes is None else as_axes(data_axes)
    mesh = Mesh(
        names,
        sizes,
        found,
        tuple(range(world.size)),
        rank=world.rank,
        device=world.device,
        framework=backend.name,
        timeout_s=timeout_s,
        knows_data_axes=data_axes is not None or bool(found),
    )
    _warn_about_machines(mesh)
    return mesh


def _check_order(shape: Any, axis_names: Any) -> None:
    """Raises ArgumentError if the names stand where the sizes belong."""
    first, second = (as_axes(given) if not isinstance(given, int) else (given,) for given in (shape, axis_names))
    if any(isinstance(size, str) for size in first) or any(isinstance(name, int) for name in second):
        rule = f"the sizes come before the names, got {shape!r} and {axis_names!r}"
        names = first if all(isinstance(name, str) for name in first) else ("replicate", "shard")[-len(first) :]
        sizes = second if all(isinstance(size, int) for size in second) else (-1,) * len(names)
        hint = f"hpfunc.make_mesh({sizes!r}, {names!r})"
        raise ArgumentError(message("hpfunc.make_mesh", rule, hint=hint))


def _warn_about_machines(mesh: Mesh) -> None:
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    cutting = _long_axes(mesh, CUTTING)
    replicating = _long_axes(mesh, REPLICATING) or _long_axes(mesh, DATA)  # next to "fsdp", "dp" replicates
    machines = {axis: len({rank // per_machine for rank in mesh.group(axis)}) for axis in cutting + replicating}
    inner = next((axis for axis in replicating if machines[axis] == 1), None)
    outer = next((axis for axis in cutting if machines[axis] > 1), None)
    if inner is not None and outer is not None:
        rule = f"the {outer!r} axis spans machines while the {inner!r} axis does not"
        hint = f"make {outer!r} the last axis, so that gathers stay inside a machine"
        warnings.warn(message("hpfunc.make_mesh", rule, mesh=mesh, hint=hint), HpfuncWarning, stacklevel=3)


def _long_axes(mesh: Mesh, names: frozenset[str]) -> list[str]:
    return [axis for axis, size in mesh.shape.items() if axis.lower() in names and size > 1]
