"""`interop` on MindSpore: numpy, torch and MindSpore over the same memory, and what MindSpore lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hpfunc as hp
from hpfunc import interop
from tests.helpers.frameworks import needs_mindspore, to_torch
from tests.helpers.ranks import Pool, mesh_of, outcome

pytestmark = [pytest.mark.processes, needs_mindspore]
SHAPE, SPEC = (5, 3), hp.P("shard")  # 2, 2, 1, 0 rows


def exchanged(rank: int) -> Any:
    import mindspore

    mesh = mesh_of((4,), ("shard",))
    part = np.full(((2, 2, 1, 0)[rank], 3), float(rank), np.float32)
    sources = {"numpy": part, "torch": torch.from_numpy(part), "mindspore": mindspore.Tensor.from_numpy(part)}
    arrays = {name: interop.from_local(source, SHAPE, SPEC, mesh) for name, source in sources.items()}
    part[:] = rank + 7.0
    whole = np.repeat([7.0, 8.0, 9.0], (2, 2, 1))[:, None] * np.ones((5, 3))
    shared = [np.array_equal(hp.unshard(array).asnumpy(), whole) for array in arrays.values()]
    back = interop.to_numpy(arrays)
    shared += [not part.size or np.shares_memory(array, part) for array in back.values()]
    half = interop.from_local(torch.ones(part.shape, dtype=torch.bfloat16), SHAPE, SPEC, mesh)
    shared += [
        half.dtype == mindspore.bfloat16,
        torch.equal(to_torch(half.local), torch.ones(part.shape, dtype=torch.bfloat16)),
    ]
    capsule = mindspore.utils.to_dlpack(mindspore.Tensor.from_numpy(np.arange(3.0)))
    return shared, torch.from_dlpack(capsule).tolist()


def test_parts_are_shared_with_numpy_and_torch(pool: Callable[..., Pool]) -> None:
    for shared, from_capsule in pool(4, "mindspore").run(exchanged):
        assert shared == [True] * 8
        assert from_capsule == [0.0, 1.0, 2.0]


def refused(rank: int) -> dict[str, str]:
    mesh = mesh_of((4,), ("shard",))
    array = interop.from_local(torch.ones(2, 3, dtype=torch.bfloat16), (8, 3), SPEC, mesh)
    strided, frozen = np.ones((2, 6), np.float32)[:, ::2], np.ones((2, 3), np.float32)
    frozen.flags.writeable = False
    return {
        "strided": outcome(interop.from_local, strided, (8, 3), SPEC, mesh),
        "read-only": outcome(interop.from_local, frozen, (8, 3), SPEC, mesh),
        "list": outcome(interop.from_local, [1.0], (8, 3), SPEC, mesh),
        "bfloat16": outcome(interop.to_numpy, {"w": array}),
        "to_dtensor": outcome(interop.to_dtensor, {"w": array}),
        "from_dtensor": outcome(interop.from_dtensor, {"w": array}, mesh),
        "to_device_mesh": outcome(interop.to_device_mesh, mesh),
    }


def test_what_mindspore_lacks_is_named(pool: Callable[..., Pool]) -> None:
    start = "LeafError: hpfunc.interop.from_local: the memory of a "
    for found in pool(4, "mindspore").run(refused):
        assert found["strided"].startswith(
            start + "ndarray cannot be shared: it is strided, and MindSpore takes no such"
        )
        assert found["read-only"].startswith(start + "ndarray cannot be shared")
        assert found["list"].startswith(start + "list cannot be shared")
        assert found["bfloat16"].startswith(
            "LeafError: hpfunc.interop.to_numpy: numpy cannot share the memory of a part"
        )
        for name in ("to_dtensor", "from_dtensor", "to_device_mesh"):
            assert f"hpfunc.interop.{name}: the mesh is one of mindspore, DTensor is torch's" in found[name]
