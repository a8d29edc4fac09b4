"""`interop`: other libraries' arrays over the same memory, and what has no counterpart there is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import hpfunc as hp
from hpfunc import interop
from hpfunc._values.layout import Layout
from hpfunc.interop._dtensor import _agrees, _placements
from tests.helpers.ranks import mesh_of, outcome

P = hp.P
FLAT = ((4,), ("shard",))
GRID = ((2, 2), ("replicate", "shard"))
CASES: dict[str, tuple[Any, tuple[int, ...], hp.P]] = {
    "even": (FLAT, (8, 3), P("shard")),
    "uneven": (FLAT, (6, 3), P("shard")),  # 2, 2, 2, 0
    "one row": (FLAT, (1, 3), P("shard")),
    "no element": (FLAT, (0, 3), P("shard")),
    "second dim": (FLAT, (3, 5), P(None, "shard")),
    "a scalar": (FLAT, (), P()),
    "whole": (GRID, (3, 5), P()),
    "HSDP": (GRID, (5, 3), P("shard")),
    "two dims": (GRID, (5, 3), P("shard", "replicate")),
    "both on one": (GRID, (8, 3), P(("replicate", "shard"))),
    "both on one, uneven": (GRID, (7, 3), P(("replicate", "shard"))),  # 2, 2, 2, 1 both here and there
}


def whole_of(shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def there_and_back(rank):
    for name, ((sizes, names), shape, spec) in CASES.items():
        mesh, whole = mesh_of(sizes, names), whole_of(shape)
        array = hp.shard(whole, mesh, spec)
        tensor = interop.to_dtensor({"w": array})["w"]
        assert tensor.device_mesh is interop.to_device_mesh(mesh), name
        assert tuple(tensor.device_mesh.mesh_dim_names) == names
        assert tensor.to_local().data_ptr() == array.local.data_ptr(), name
        assert tensor.stride() == whole.stride(), name
        assert torch.equal(tensor.full_tensor(), whole), name
        by_torch = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        assert torch.equal(by_torch.to_local(), array.local), name
        for mine in (None, mesh):
            again = interop.from_dtensor([tensor, "other"], mine)
            assert again[0].layout == Layout(shape, spec, mesh if mine else again[0].mesh), name
            assert again[0].local.data_ptr() == array.local.data_ptr(), name
            assert again[1] == "other"
        assert (again[0].mesh.axis_names, again[0].mesh.ranks) == (mesh.axis_names, mesh.ranks)
    return True


@pytest.mark.processes
def test_an_array_and_a_dtensor_have_the_same_parts_in_the_same_memory(pool):
    assert pool(4).run(there_and_back) == [True] * 4


def partial_sums(rank):
    mesh = mesh_of(*GRID)
    unfinished = hp.reduce(torch.full((4,), rank + 1.0), mesh, P("shard", unreduced={"replicate"}))
    tensor = interop.to_dtensor(unfinished)
    assert tensor.placements == (Partial(), Shard(0))
    assert torch.equal(tensor.full_tensor(), torch.full((4,), 10.0))
    again = interop.from_dtensor(tensor, mesh)
    assert again.spec == unfinished.spec
    return hp.reduce(again).local


@pytest.mark.processes
def test_a_partial_sum_stays_one(pool):
    assert [x.tolist() for x in pool(4).run(partial_sums)] == [[10.0, 10.0]] * 4


def a_model_under_fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(*GRID)
    model: Any = torch.nn.Linear(3, 5)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=interop.to_device_mesh(mesh))
    params = interop.from_dtensor(dict(model.named_parameters()), mesh)
    assert params["weight"].spec == P("shard")
    assert not params["weight"].local.requires_grad
    assert params["weight"].local.data_ptr() == model.weight.to_local().data_ptr()
    return torch.equal(hp.unshard(params)["weight"], torch.ones(5, 3))


@pytest.mark.processes
def test_the_parameters_of_fsdp2_become_arrays(pool):
    assert pool(4).run(a_model_under_fsdp2) == [True] * 4


def refused(rank):
    mesh = mesh_of(*GRID)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    maximum = DTensor.from_local(torch.ones(2), other, [Partial("max")], run_check=False)
    grid = interop.to_device_mesh(mesh)
    uneven = distribute_tensor(torch.ones(5), grid, [Shard(0), Shard(0)])
    fine = hp.shard(torch.ones(4), mesh, P("shard"))
    return [
        outcome(interop.to_dtensor, {"w": hp.shard(torch.ones(5), mesh, P(("replicate", "shard")))}),
        outcome(interop.to_dtensor, {"w": hp.shard(torch.ones(8), mesh, P(("shard", "replicate")))}),
        outcome(interop.to_dtensor, fine, other),
        outcome(interop.to_dtensor, [fine, hp.shard(torch.ones(4), mesh_of(*FLAT), P())]),
        outcome(interop.from_dtensor, {"w": maximum}),
        outcome(interop.from_dtensor, {"w": uneven}),
        outcome(interop.from_dtensor, maximum, mesh),
        outcome(interop.from_dtensor, {"w": torch.ones(2)}),
        outcome(interop.from_local, torch.ones(2 if rank else 3), (8,), P("shard"), mesh_of(*FLAT)),
    ]


@pytest.mark.processes
def test_what_has_no_counterpart_is_refused_on_all_ranks(pool):
    texts = pool(4).run(refused)
    starts = [
        "SpecError: hpfunc.interop.to_dtensor: a dim is cut as no DTensor is\n  tree['w']: shape (5,)",
        "SpecError: hpfunc.interop.to_dtensor: a dim is cut as no DTensor is\n  tree['w']: shape (8,)",
        "MeshError: hpfunc.interop.to_dtensor: the DeviceMesh has shape (4,)",
        "MeshError: hpfunc.interop.to_dtensor: arrays lie on different meshes",
        "SpecError: hpfunc.interop.from_dtensor: placements that no spec says\n  tree['w']: shape (2,)",
        "SpecError: hpfunc.interop.from_dtensor: placements that no spec says\n  tree['w']: shape (5,)",
        "MeshError: hpfunc.interop.from_dtensor: the DeviceMesh has shape (4,)",
        "LeafError: hpfunc.interop.from_dtensor: tree has no leaf that is a DTensor",
    ]
    for *found, last in texts:
        for text, start in zip(found, starts, strict=True):
            assert text.startswith(start)
        assert last.startswith(("SpecError: hpfunc.interop.from_local: the part of rank 0", "AgreementError"))
    assert texts[0][-1].startswith("SpecError")


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple),
    st.sampled_from([((2, 2), P(("a", "b"))), ((2, 3), P("b", "a")), ((3, 2), P(("b", "a"))), ((1, 3), P(("b", "a")))]),
)
def test_parts_agree_exactly_where_torch_computes_the_same(shape, cut):
    sizes, spec = cut
    shape = (*shape, *[4] * (len(spec.entries) - len(shape)))
    mesh = hp.Mesh(("a", "b"), sizes, ("a", "b"), tuple(range(sizes[0] * sizes[1])))
    layout = Layout(shape, spec, mesh)
    placements = [Replicate() if dim is None else Shard(dim) for _, dim in _placements(layout)]
    same = []
    for place in mesh.coordinates():
        coordinate = list(place.values())
        their_shape, offset = _compute_local_shape_and_global_offset(shape, sizes, coordinate.__getitem__, placements)
        slices = layout.local_slices(place)
        is_empty = 0 in their_shape and 0 in layout.local_shape(place)
        starts = tuple(part.start for part in slices)
        same.append(tuple(their_shape) == layout.local_shape(place) and (is_empty or tuple(offset) == starts))
    assert _agrees(layout) == all(same)


def test_numpy_shares_the_memory_both_ways():
    mesh = hp.make_mesh((1,), ("shard",))
    part = np.arange(6.0).reshape(3, 2)
    array = interop.from_local(part, (3, 2), P("shard"), mesh)
    (back,) = interop.to_numpy([array])
    part[0, 0] = 7.0
    assert array.local[0, 0] == back[0, 0] == 7.0
    assert np.shares_memory(np.from_dlpack(array.local), part)
    with pytest.raises(hp.LeafError, match=r"numpy cannot share the memory of a part\n  tree\[0\]: .*bfloat16 on cpu"):
        interop.to_numpy([array.with_local(array.local.bfloat16())])


def test_what_cannot_be_shared_is_refused():
    mesh = hp.make_mesh((1,), ("shard",))
    with pytest.raises(hp.LeafError, match="the memory of a list cannot be shared"):
        interop.from_local([1.0], (1,), P("shard"), mesh)
    with pytest.raises(hp.LeafError, match="the part lies on meta, and the mesh on cpu"):
        interop.from_local(torch.ones(1, device="meta"), (1,), P("shard"), mesh)
    with pytest.raises(hp.SpecError, match="spec names a mesh axis that does not exist"):
        interop.from_local(torch.ones(1), (1,), P("shrad"), mesh)
    with pytest.raises(hp.MeshError, match="the DeviceMesh has no dim names"):
        interop.from_device_mesh(SimpleNamespace(mesh_dim_names=None))
    with pytest.raises(hp.MeshError, match="no process group is initialized"):
        interop.to_device_mesh(mesh)
