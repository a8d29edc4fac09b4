"""torch's memory and `DTensor` for others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._errors import MeshError, message
from ..._values.mesh import Mesh
from ..interop import Placements


class TorchInterop:
    """See `DTensors`."""

    def __init__(self) -> None:
        self._made: dict[Mesh, tuple[Any, DeviceMesh]] = {}

    def device_mesh(self, function: str, mesh: Mesh) -> DeviceMesh:
        if not dist.is_initialized():
            hint = "start it by torchrun, or call torch.distributed.init_process_group first"
            raise MeshError(message(function, "no process group is initialized", mesh=mesh, hint=hint))
        world, made = self._made.get(mesh, (None, None))
        if made is None or world is not dist.group.WORLD:  # the groups of a world end with it
            ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
            made = DeviceMesh(mesh.device.partition(":")[0], ranks, mesh_dim_names=mesh.axis_names)
            self._made[mesh] = dist.group.WORLD, made
        return made

    def dtensor(self, local: torch.Tensor, shape: tuple[int, ...], placements: Placements, device_mesh: Any) -> DTensor:
        kinds = [
            Partial() if kind == "partial" else Replicate() if dim is None else Shard(dim) for kind, dim in placements
        ]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, device_mesh, kinds, run_check=False, shape=torch.Size(shape), stride=stride)

    def taken(self, value: Any) -> tuple[torch.Tensor, Placements, DeviceMesh] | None:
        if not isinstance(value, DTensor):
            return None
        return value.to_local().detach(), [_kind(placement) for placement in value.placements], value.device_mesh

    def as_tensor(self, value: Any) -> torch.Tensor:
        return value.detach() if isinstance(value, torch.Tensor) else torch.from_dlpack(value)

    def as_numpy(self, tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy()


def _kind(placement: Any) -> tuple[str, int | None]:
    if type(placement) is Shard:
        return "shard", placement.dim
    if type(placement) is Replicate:
        return "shard", None
    return ("partial" if type(placement) is Partial and placement.reduce_op == "sum" else "other"), None


INTEROP = TorchInterop()
