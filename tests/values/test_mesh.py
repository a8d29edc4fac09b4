"""`Mesh` and `PartitionSpec` as values."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.reference import Grid
from tests.helpers.strategies import axes_of, entries, grids, spec


def mesh_on(grid: Grid, rank: int = 0) -> hp.Mesh:
    return hp.Mesh(grid.names, grid.sizes, grid.data_axes, tuple(range(grid.num_ranks)), rank=rank)


@given(grids(), st.data())
def test_places_and_groups_are_those_of_a_grid(grid: Grid, data: Any) -> None:
    axes = data.draw(axes_of(grid))
    for rank in range(grid.num_ranks):
        mesh = mesh_on(grid, rank)
        assert mesh.coordinate == grid.place(rank)
        assert mesh.group(axes) == tuple(grid.peers(rank, axes))
        assert mesh.axis_index(axes) == grid.index(rank, axes)
        assert mesh.axis_size(axes) == grid.size(axes)
    assert mesh_on(grid).shape == dict(zip(grid.names, grid.sizes, strict=True))


@given(grids(), st.data())
def test_groups_follow_the_ranks_of_the_mesh(grid: Grid, data: Any) -> None:
    order = data.draw(st.permutations(range(10, 10 + grid.num_ranks)))
    axes = data.draw(axes_of(grid))
    mesh = hp.Mesh(grid.names, grid.sizes, grid.data_axes, tuple(order), rank=order[0])
    assert mesh.group(axes) == tuple(order[i] for i in grid.peers(0, axes))
    assert mesh.coordinate_of(order[-1]) == grid.place(grid.num_ranks - 1)


@given(grids(), st.data())
def test_specs_are_values(grid: Grid, data: Any) -> None:
    cuts = data.draw(entries(grid, 3))
    one, other = spec(cuts), hp.P(*cuts)
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert eval(repr(one), {"P": hp.P}) == one
    assert one.axes == tuple(axis for axes in cuts for axis in axes)
    assert [one.dim_axes(dim) for dim in range(4)] == [*cuts, ()]


def test_trailing_dims_that_are_not_cut_do_not_matter() -> None:
    assert hp.P("shard") == hp.P("shard", None) == hp.P("shard", None, ())
    assert hp.P(None, "shard") != hp.P("shard")
    assert hp.P("shard") != hp.P("shard", unreduced={"replicate"})
    assert hp.P(("a", "b")) != hp.P(("b", "a"))
    assert hp.P("shard") != ("shard",)


def test_values_are_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        hp.P("shard").entries = ()
    with pytest.raises(AttributeError):
        mesh_on(Grid((2,), ("shard",), ("shard",))).rank = 1  # pyright: ignore[reportAttributeAccessIssue] - it is refused


def test_meshes_are_values() -> None:
    grid = Grid((2, 2), ("replicate", "shard"), ("shard",))
    assert mesh_on(grid) == mesh_on(grid)
    assert hash(mesh_on(grid)) == hash(mesh_on(grid))
    assert mesh_on(grid, 0) != mesh_on(grid, 1)
    assert pickle.loads(pickle.dumps(mesh_on(grid, 3))) == mesh_on(grid, 3)
    assert repr(mesh_on(grid)) == "Mesh(replicate=2, shard=2)"


def test_whether_data_axes_were_given_is_part_of_a_mesh() -> None:
    silent, told = hp.make_mesh((1, 1), ("x", "y")), hp.make_mesh((1, 1), ("x", "y"), ())
    assert silent.data_axes == told.data_axes == ()
    assert (silent.knows_data_axes, told.knows_data_axes) == (False, True)
    assert silent != told
    assert hash(silent) == hash(told)
    assert repr(silent) == repr(told) == "Mesh(x=1, y=1)"
    for mesh in (silent, told):
        assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert silent.describe(told) == "Mesh(x=1, y=1) with knows_data_axes=False"
    by_name, by_hand = (hp.make_mesh((1, 1), ("dp", "tp"), given) for given in (None, "dp"))
    assert by_name == by_hand


@pytest.mark.parametrize(
    ("names", "data_axes"),
    [
        (("dp", "tp"), ("dp",)),
        (("data", "model"), ("data",)),
        (("Data", "Model"), ("Data",)),
        (("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("dp_replicate", "dp_shard")),
        (("batch", "fsdp", "tensor"), ("batch", "fsdp")),
        (("ranks",), ("ranks",)),  # alone
        (("tp",), ()),  # alone, and named after something else
        (("model",), ()),
        (("nodes", "devices"), ()),
    ],
)
def test_data_axes_are_known_by_their_names(names: tuple[str, ...], data_axes: tuple[str, ...]) -> None:
    mesh = hp.make_mesh((1,) * len(names), names)
    assert mesh.data_axes == data_axes
    assert mesh.knows_data_axes == bool(data_axes)
    mesh.check_data_axes("hpfunc.test")  # one rank has nobody to share with
    large = hp.Mesh(names, (2,) * len(names), data_axes, tuple(range(2 ** len(names))), knows_data_axes=bool(data_axes))
    if data_axes:
        large.check_data_axes("hpfunc.test")
    else:
        with pytest.raises(hp.MeshError, match="not known along which axes"):
            large.check_data_axes("hpfunc.test")


def test_axes_are_sorted_in_mesh_order() -> None:
    mesh = mesh_on(Grid((1, 1, 1), ("c", "a", "b"), ()))
    assert mesh.sort({"b", "c"}) == ("c", "b")
    assert list(mesh.coordinates()) == [{"c": 0, "a": 0, "b": 0}]


@given(grids())
def test_ranks_load_the_same_data_if_they_differ_along_other_axes_only(grid: Grid) -> None:
    meshes = [mesh_on(grid, rank) for rank in range(grid.num_ranks)]
    others = [tuple(mesh.coordinate[axis] for axis in grid.data_axes) for mesh in meshes]
    parts = dict(zip(others, (mesh.data_rank for mesh in meshes), strict=True))
    assert [parts[place] for place in others] == [mesh.data_rank for mesh in meshes]
    assert sorted(parts.values()) == list(range(meshes[0].num_data_ranks))
    assert [mesh.is_main for mesh in meshes] == [True] + [False] * (grid.num_ranks - 1)
