"""torch's `DTensor` for others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._errors import MeshError, message
from ..._values.mesh import Mesh

Placements = list[tuple[str, int | None]]
"""For each mesh axis: ``("shard", dim)`` (None: not cut), ``("partial", None)`` for a sum, ``("other", None)``."""

_made: dict[Mesh, tuple[Any, DeviceMesh]] = {}


def device_mesh_of(function: str, mesh: Mesh) -> DeviceMesh:
    """Returns the device mesh of a mesh, the same object each time.

    Raises:
        MeshError: no process group is initialized.
    """
    if not dist.is_initialized():
        hint = "start it by torchrun, or call torch.distributed.init_process_group first"
        raise MeshError(message(function, "no process group is initialized", mesh=mesh, hint=hint))
    world, made = _made.get(mesh, (None, None))
    if made is None or world is not dist.group.WORLD:  # the groups of a world end with it
        ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
        made = DeviceMesh(mesh.device.partition(":")[0], ranks, mesh_dim_names=mesh.axis_names)
        _made[mesh] = dist.group.WORLD, made
    return made


def dtensor_of(local: torch.Tensor, shape: tuple[int, ...], placements: Placements, device_mesh: Any) -> DTensor:
    """Returns the distributed tensor of which `local` is this rank's part, in its memory."""
    kinds = [Partial() if kind == "partial" else Replicate() if dim is None else Shard(dim) for kind, dim in placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, device_mesh, kinds, run_check=False, shape=torch.Size(shape), stride=stride)


def taken(value: Any) -> tuple[torch.Tensor, Placements, DeviceMesh] | None:
    """Returns local tensor, placements and mesh of a distributed tensor; None for another value."""
    if not isinstance(value, DTensor):
        return None
    return value.to_local().detach(), [_kind(placement) for placement in value.placements], value.device_mesh


def _kind(placement: Any) -> tuple[str, int | None]:
    if type(placement) is Shard:
        return "shard", placement.dim
    if type(placement) is Replicate:
        return "shard", None
    return ("partial" if type(placement) is Partial and placement.reduce_op == "sum" else "other"), None
