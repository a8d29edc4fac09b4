"""Laws of `shard`, `unshard`, `reshard` and `reduce` on real ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers import reference
from tests.helpers.ranks import mesh_of, outcome, pool
from tests.helpers.reference import Axes, Grid
from tests.helpers.strategies import axes_of, dtypes, entries, float_dtypes, grids, seeds, shapes, spec
from tests.helpers.zoo import assert_close, assert_same, tensor, trees

HSDP = Grid((2, 2), ("replicate", "shard"), ("replicate", "shard"))
FSDP = Grid((3,), ("shard",), ("shard",))


def on(grid: Grid) -> hp.Mesh:
    return mesh_of(grid.sizes, grid.names, grid.data_axes)


def with_axes(cuts: tuple[Axes, ...]) -> Axes:
    return tuple(axis for axes in cuts for axis in axes)


def is_misplaced(cuts: tuple[Axes, ...], over: Axes) -> bool:
    """Whether a gathered axis is major to one that stays, in some dim."""
    flags = [[axis in over for axis in axes] for axes in cuts]
    return any(dim != sorted(dim) for dim in flags)


@st.composite
def layouts(draw: Any, max_dims: int = 3) -> tuple[Grid, tuple[int, ...], tuple[Axes, ...]]:
    grid, shape = draw(grids()), draw(shapes(max_dims))
    return grid, shape, draw(entries(grid, len(shape)))


# --- shard and unshard ----------------------------------------------------------------------------------------------
def round_trip(rank: int, grid: Grid, x: torch.Tensor, p: hp.P, over: Axes) -> Any:
    array = hp.shard(x, on(grid), p)
    assert (array.shape, array.spec, array.dtype) == (tuple(x.shape), p, x.dtype)
    got = []
    try:
        got.append(hp.unshard(array, axes=over))
    except hp.SpecError as error:
        got.append(str(error))
    return array.local, hp.unshard(array, axes=grid.names), *got


@given(layouts(), dtypes, seeds, st.data())
def test_unshard_undoes_shard(layout: Any, dtype: torch.dtype, seed: int, data: Any) -> None:
    grid, shape, cuts = layout
    over = data.draw(axes_of(grid))
    x = tensor(shape, dtype, seed)
    for rank, (local, whole, some) in enumerate(pool(grid.num_ranks).run(round_trip, grid, x, spec(cuts), over)):
        assert_same(local, x[reference.part(shape, cuts, grid, rank)])
        assert_same(whole, x)
        gathered = tuple(axis for axis in over if axis in with_axes(cuts))
        if is_misplaced(cuts, over):
            assert "cannot gather over" in some
        else:
            assert_same(some, x[reference.whole(shape, cuts, grid, rank, gathered)])


def tree_round_trip(rank: int, grid: Grid, tree: Any, specs: Any) -> Any:
    before = optree.tree_map(torch.clone, tree)
    arrays = hp.shard(tree, on(grid), specs)
    assert_same(tree, before)
    return hp.unshard(arrays, axes=grid.names)


@pytest.mark.parametrize("name", trees())
@pytest.mark.parametrize("grid", [HSDP, FSDP], ids=["HSDP", "FSDP"])
def test_every_tree_comes_back(pool: Any, name: str, grid: Grid) -> None:
    tree = trees()[name]
    for whole in pool(grid.num_ranks).run(tree_round_trip, grid, tree, hp.P("shard")):
        assert_same(whole, tree)


# --- reshard --------------------------------------------------------------------------------------------------------
def resharded(rank: int, grid: Grid, x: torch.Tensor, first: hp.P, second: hp.P, third: hp.P) -> Any:
    array = hp.shard(x, on(grid), first)
    there = hp.reshard(hp.reshard(array, second), third)
    direct = hp.reshard(array, third)
    assert there.spec == direct.spec == third
    assert there.shape == direct.shape == tuple(x.shape)
    return there.local, direct.local


@given(layouts(), dtypes, seeds, st.data())
def test_reshard_composes(layout: Any, dtype: torch.dtype, seed: int, data: Any) -> None:
    grid, shape, first = layout
    second, third = (data.draw(entries(grid, len(shape))) for _ in range(2))
    x = tensor(shape, dtype, seed)
    results = pool(grid.num_ranks).run(resharded, grid, x, spec(first), spec(second), spec(third))
    for rank, (there, direct) in enumerate(results):
        assert_same(there, direct)
        assert_same(direct, x[reference.part(shape, third, grid, rank)])


# --- reduce ---------------------------------------------------------------------------------------------------------
def other_axes(cuts: tuple[Axes, ...], grid: Grid) -> tuple[Axes, ...]:
    """The axes of `cuts` that are no data axes."""
    return tuple(tuple(axis for axis in axes if axis not in grid.data_axes) for axes in cuts)


@st.composite
def reductions(draw: Any) -> tuple[Grid, tuple[int, ...], tuple[Axes, ...], Axes]:
    """A spec that can be gathered over the data axes, whose other axes cut evenly, and axes to leave unreduced."""
    grid, shape, cuts = draw(layouts(max_dims=2))
    assume(not is_misplaced(cuts, grid.data_axes))
    stays = [grid.size(axes) for axes in other_axes(cuts, grid)]
    wholes = [grid.size(axes) if c > 1 else 1 for axes, c in zip(cuts, stays, strict=True)]
    shape = tuple(n - n % whole for n, whole in zip(shape, wholes, strict=True))
    free = [axis for axis in grid.data_axes if axis not in with_axes(cuts)]
    unreduced = tuple(axis for axis in free if draw(st.booleans()))
    return grid, shape, cuts, unreduced


def reduced(rank: int, grid: Grid, xs: list[torch.Tensor], p: hp.P, late: hp.P) -> Any:
    with hp.use_mesh(on(grid)):
        at_once = hp.reduce(xs[rank], specs=p)
    partial = hp.reduce(xs[rank], on(grid), late)
    assert partial.spec == late
    finished = hp.reduce(partial)
    assert at_once.spec == finished.spec == p
    return at_once.local, finished.local, at_once.shape


@given(reductions(), float_dtypes, seeds)
def test_reduce_sums_over_data_axes_only_and_may_be_finished_later(case: Any, dtype: torch.dtype, seed: int) -> None:
    grid, shape, cuts, unreduced = case
    # Each rank has its own summand, of the shape of what the data axes gather: cut by the other axes.
    stays, ranks = other_axes(cuts, grid), range(grid.num_ranks)
    summands = [tensor(shape, dtype, seed + rank)[reference.part(shape, stays, grid, rank)] for rank in ranks]
    results = pool(grid.num_ranks).run(reduced, grid, summands, spec(cuts), spec(cuts, unreduced))
    for rank, (at_once, finished, whole_shape) in enumerate(results):
        assert whole_shape == shape
        total = sum(summands[peer].double() for peer in grid.peers(rank, grid.data_axes))
        assert isinstance(total, torch.Tensor)
        data_cuts = tuple(tuple(axis for axis in axes if axis in grid.data_axes) for axes in cuts)
        want = total[reference.part(total.shape, data_cuts, grid, rank)].to(dtype)
        assert_same(at_once, want)
        assert_same(finished, want)


def inner_products(rank: int, grid: Grid, p: hp.P, shape: tuple[int, ...], seed: int) -> tuple[float, float]:
    """This rank's parts of <unshard(a), y> and of <a, reduce(y)>."""
    mesh = on(grid)
    random = torch.Generator().manual_seed(seed + 1000 * rank)
    local = hp.shard(torch.zeros(shape, dtype=torch.float64), mesh, p).local
    a = hp.ShardedArray(torch.randn(local.shape, generator=random, dtype=torch.float64), shape, p, mesh)
    whole = hp.unshard(a)
    y = torch.randn(whole.shape, generator=random, dtype=torch.float64)
    back = hp.reduce(y, mesh, hp.P(*p.entries, unreduced=set(grid.data_axes) - set(p.axes)))
    assert back.local.shape == local.shape
    return float((whole * y).sum()), float((a.local * back.local).sum())


@given(reductions(), seeds)
def test_reduce_is_the_transpose_of_unshard(case: Any, seed: int) -> None:
    grid, shape, cuts, _ = case
    results = pool(grid.num_ranks).run(inner_products, grid, spec(cuts), shape, seed)
    forward, backward = (torch.tensor(side, dtype=torch.float64).sum() for side in zip(*results, strict=True))
    assert_close(forward, backward)


def reduced_tree(rank: int, grid: Grid, tree: Any) -> Any:
    return hp.unshard(hp.reduce(tree, on(grid), hp.P("shard")))


@settings(max_examples=12)
@given(st.sampled_from(sorted(trees())), st.sampled_from([1, 2, 3, 4]))
def test_reduce_goes_through_trees(name: str, n: int) -> None:
    grid, tree = Grid((n,), ("shard",), ("shard",)), trees()[name]
    for got in pool(n).run(reduced_tree, grid, tree):
        assert_same(got, optree.tree_map(lambda leaf: leaf * n, tree))


def refused(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    array = hp.shard(torch.ones(4), mesh, hp.P("shard"))
    partial = hp.reduce(torch.ones(4), mesh, hp.P(unreduced={"shard"}))
    return [
        outcome(hp.unshard, {"w": torch.ones(2)}),
        outcome(hp.unshard, partial),
        outcome(hp.unshard, array, axes="shrad"),
        outcome(hp.reduce, torch.ones(4), mesh),
        outcome(hp.reshard, torch.ones(4), hp.P()),
    ]


def test_what_is_refused_is_refused_on_all_ranks(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    kinds = [text.split(":")[0] for text in first]
    assert kinds == ["LeafError", "SpecError", "MeshError", "SpecError", "LeafError"], first
