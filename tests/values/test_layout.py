"""Laws of the arithmetic of layouts: against numpy, without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import hpfunc as hp
from hpfunc._values.layout import Gather, Layout
from hpfunc._values.reduction_axes import reduce_axes, scatter_axes
from tests.helpers import reference
from tests.helpers.reference import Axes, Grid
from tests.helpers.strategies import axes_of, entries, grids, shapes, spec


def meshes(grid: Grid) -> list[hp.Mesh]:
    ranks = tuple(range(grid.num_ranks))
    return [hp.Mesh(grid.names, grid.sizes, grid.data_axes, ranks, rank=rank) for rank in ranks]


@st.composite
def cases(draw: Any) -> tuple[Grid, tuple[int, ...], tuple[Axes, ...]]:
    grid, shape = draw(grids()), draw(shapes())
    return grid, shape, draw(entries(grid, len(shape)))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """An array with another number, from 1, in each place."""
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape)


def message(x: np.ndarray, layout: Layout, gather: Gather) -> np.ndarray:
    """The padded blocks of the ranks of one gather, in rank order, as they would travel."""
    mesh = layout.mesh
    blocks = []
    for rank in mesh.group(gather.axes):
        part = x[layout.local_slices(mesh.coordinate_of(rank))]
        block = np.zeros(layout.block_shape, part.dtype)
        block[tuple(map(slice, part.shape))] = part
        blocks.append(block)
    return np.stack(blocks).reshape(-1)


@given(cases())
def test_local_slices_are_those_of_the_reference(case: Any) -> None:
    grid, shape, cuts = case
    x = numbered(shape)
    for mesh in meshes(grid):
        layout = Layout(shape, spec(cuts), mesh)
        part = x[layout.local_slices(mesh.coordinate)]
        np.testing.assert_array_equal(part, x[reference.part(shape, cuts, grid, mesh.rank)])
        assert part.shape == layout.local_shape(mesh.coordinate)


@given(cases())
def test_the_parts_tile_the_array(case: Any) -> None:
    grid, shape, cuts = case
    held = np.zeros(shape, int)
    for mesh in meshes(grid):
        held[Layout(shape, spec(cuts), mesh).local_slices(mesh.coordinate)] += 1
    copies = grid.num_ranks // grid.size(tuple(axis for axes in cuts for axis in axes))
    assert (held == copies).all()


@given(cases())
def test_blocks_bound_every_part_and_even_means_no_padding(case: Any) -> None:
    grid, shape, cuts = case
    layouts = [Layout(shape, spec(cuts), mesh) for mesh in meshes(grid)]
    parts = [layout.local_shape(layout.mesh.coordinate) for layout in layouts]
    assert layouts[0].block_shape == tuple(max(sizes) for sizes in zip(*parts, strict=True)) or not shape
    assert layouts[0].is_even == all(part == layouts[0].block_shape for part in parts)


@given(cases(), st.data())
def test_a_gather_puts_the_blocks_in_order(case: Any, data: Any) -> None:
    grid, shape, cuts = case
    over = data.draw(axes_of(grid))
    x = numbered(shape)
    for mesh in meshes(grid):
        layout = Layout(shape, spec(cuts), mesh)
        assume(layout.misplaced(over) is None)
        gather = layout.gather(over)
        assert gather.num_blocks == len(mesh.group(gather.axes))
        sent = message(x, layout, gather)
        joined = sent.reshape(gather.split_shape).transpose(gather.order)
        assert joined.shape == gather.joined_shape
        np.testing.assert_array_equal(joined.transpose(np.argsort(gather.order)), sent.reshape(gather.split_shape))
        whole = joined.reshape(gather.padded_shape)[tuple(map(slice, gather.whole_shape(mesh.coordinate)))]
        np.testing.assert_array_equal(whole, x[reference.whole(shape, cuts, grid, mesh.rank, gather.axes)])


@given(cases(), st.data())
def test_is_direct_says_whether_the_message_is_the_whole(case: Any, data: Any) -> None:
    grid, shape, cuts = case
    over = data.draw(axes_of(grid))
    x = numbered(shape)
    for mesh in meshes(grid):
        layout = Layout(shape, spec(cuts), mesh)
        assume(layout.misplaced(over) is None)
        gather = layout.gather(over)
        sent = message(x, layout, gather)
        ordered = sent.reshape(gather.split_shape).transpose(gather.order).reshape(gather.padded_shape)
        whole = ordered[tuple(map(slice, gather.whole_shape(mesh.coordinate)))]
        as_it_stands = np.array_equal(sent[: whole.size], whole.reshape(-1))
        if gather.is_direct:
            assert as_it_stands
        elif layout.is_even and min(layout.block_shape) > 1:  # else it may be so by chance
            assert not as_it_stands


def test_a_data_axis_outside_of_one_that_stays_is_misplaced() -> None:
    mesh = hp.Mesh(("shard", "tp"), (2, 2), ("shard",), (0, 1, 2, 3))
    assert Layout((8, 8), hp.P(None, ("shard", "tp")), mesh).misplaced(("shard",)) == 1
    assert Layout((8, 8), hp.P(None, ("tp", "shard")), mesh).misplaced(("shard",)) is None
    assert Layout((8, 8), hp.P("tp", "shard"), mesh).misplaced(("shard",)) is None
    assert Layout((8, 8), hp.P(("shard", "tp")), mesh).misplaced(("shard", "tp")) is None


def test_data_axes_are_split_into_those_that_cut_and_those_that_do_not() -> None:
    mesh = hp.Mesh(("replicate", "shard", "tp"), (2, 2, 2), ("replicate", "shard"), tuple(range(8)))
    layout = Layout((8, 8), hp.P("tp", "shard"), mesh)
    assert (scatter_axes(layout), reduce_axes(layout)) == (("shard",), ("replicate",))
    assert layout.gather(mesh.data_axes).axes == ("shard",)
    assert layout.gather(mesh.data_axes) is layout.gather(mesh.data_axes)
