"""Named-axis collectives against numpy, forward and backward: the transposes are those of JAX's `shard_map`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome, pool
from tests.helpers.reference import Axes, Grid, as_numpy, expected, transposed
from tests.helpers.strategies import KINDS, calls, float_dtypes, seeds
from tests.helpers.zoo import assert_same, tensor


# --- forward --------------------------------------------------------------------------------------------------------
def called(rank: int, grid: Grid, axes: Axes, kind: str, options: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    before = xs[rank].clone()
    name = axes[0] if len(axes) == 1 else axes
    result = getattr(hp, kind)(xs[rank], name, mesh=mesh, **options)
    result += 0  # results are new tensors: to write into one does not change the argument
    assert_same(xs[rank], before)
    with hp.use_mesh(mesh):
        assert (hp.axis_index(axes), hp.axis_size(axes)) == (grid.index(rank, axes), grid.size(axes))
        tree = getattr(hp, kind)({"a": (xs[rank], None)}, axes, **options)
    return result, tree["a"][0]


@given(
    calls((*KINDS, "pmax", "pmin")), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]), seeds
)
def test_collectives_are_those_of_numpy(call: Any, dtype: torch.dtype, seed: int) -> None:
    grid, axes, kind, shape, options = call
    if kind == "pmean" and dtype == torch.int64:
        dtype = torch.float64
    xs = [tensor(shape, dtype, seed + rank) for rank in range(grid.num_ranks)]
    for rank, (got, leaf) in enumerate(pool(grid.num_ranks).run(called, grid, axes, kind, options, xs)):
        want = expected(kind, as_numpy(xs), grid, rank, axes, options)
        assert_same(got, torch.from_numpy(np.array(want)).to(dtype))
        assert_same(leaf, got)


def waiting(rank: int) -> torch.Tensor:
    def step_fn(x: torch.Tensor, late: bool) -> torch.Tensor:
        if late:
            time.sleep(1.5)
        return hp.ppermute(x, "shard", [(0, 1), (1, 0)])

    step = hp.sharded(step_fn, mesh_of((2,), ("shard",)))
    x = torch.full((3,), float(rank))
    step(x, False)
    return step(x, rank == 1)  # by its plan, where ranks do not meet to compare before


def test_a_permutation_waits_for_a_slow_rank(pool: Any) -> None:
    first, second = pool(2).run(waiting)
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(second, torch.zeros(3))


# --- backward -------------------------------------------------------------------------------------------------------
def pulled_back(
    rank: int, grid: Grid, axes: Axes, kind: str, options: dict[str, Any], xs: Any, ys: Any
) -> list[torch.Tensor]:
    """The gradient by autograd and by torch.func, for the same cotangent."""
    x, y = xs[rank].clone().requires_grad_(), ys[rank]
    with hp.use_mesh(mesh_of(grid.sizes, grid.names, grid.data_axes)):
        out = getattr(hp, kind)(x, axes, **options)
        (by_autograd,) = torch.autograd.grad(out, x, y)
        _, pull, *_ = torch.func.vjp(lambda t: getattr(hp, kind)(t, axes, **options), xs[rank])
        (by_func,) = pull(y)
    return [by_autograd, by_func]


@given(calls(), float_dtypes, seeds)
def test_gradients_are_those_of_shard_map(call: Any, dtype: torch.dtype, seed: int) -> None:
    grid, axes, kind, shape, options = call
    ranks = range(grid.num_ranks)
    xs = [tensor(shape, dtype, seed + rank) for rank in ranks]
    out = expected(kind, as_numpy(xs), grid, 0, axes, options)
    ys = [tensor(np.shape(out), dtype, seed + 100 + rank) for rank in ranks]
    for rank, got in enumerate(pool(grid.num_ranks).run(pulled_back, grid, axes, kind, options, xs, ys)):
        want = np.array(transposed(kind, as_numpy(ys), grid, rank, axes, options))
        for gradient in got:
            assert_same(gradient, torch.from_numpy(want).to(dtype))


@given(calls(("psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute")), seeds)
def test_jvp_applies_the_map_to_the_tangent(call: Any, seed: int) -> None:
    grid, axes, kind, shape, options = call
    xs, ts = ([tensor(shape, torch.float64, seed + rank + k) for rank in range(grid.num_ranks)] for k in (0, 50))
    for rank, (out, tangent) in enumerate(pool(grid.num_ranks).run(pushed, grid, axes, kind, options, xs, ts)):
        for got, parts in ((out, xs), (tangent, ts)):
            want = np.array(expected(kind, as_numpy(parts), grid, rank, axes, options))
            assert_same(got, torch.from_numpy(want))


def pushed(rank: int, grid: Grid, axes: Axes, kind: str, options: dict[str, Any], xs: Any, ts: Any) -> Any:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    return torch.func.jvp(lambda t: getattr(hp, kind)(t, axes, mesh=mesh, **options), (xs[rank],), (ts[rank],))


# --- what is refused ------------------------------------------------------------------------------------------------
def refused(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    x = torch.ones(3, 2)
    with hp.use_mesh(mesh):
        return [
            outcome(hp.psum, x, "shrad"),
            outcome(hp.psum, x, ("shard", "shard")),
            outcome(hp.psum, {"w": 1.0}, "shard"),
            outcome(hp.all_gather, x, "shard", dim=3),
            outcome(hp.psum_scatter, x, "shard", scatter_dim=0, tiled=True),
            outcome(hp.psum_scatter, x, "shard", scatter_dim=0),
            outcome(hp.all_to_all, x, "shard", 0, 1),
            outcome(hp.ppermute, x, "shard", [(0, 1), (0, 0)]),
            outcome(hp.ppermute, x, "shard", [(0, 2)]),
            outcome(hp.pmax, x.clone().requires_grad_(), "shard"),
        ]


def test_what_does_not_fit_is_refused_on_all_ranks(pool: Any) -> None:
    first, second = pool(2).run(refused)
    assert first == second
    kinds = [text.split(":")[0] for text in first]
    assert kinds == ["MeshError"] * 2 + ["LeafError"] + ["MeshError"] * 6 + ["UsageError"], first


def test_without_a_mesh_there_are_no_axes() -> None:
    with pytest.raises(hp.MeshError, match="no mesh is in use"):
        hp.psum(torch.ones(1), "shard")


def disagreeing(rank: int) -> str:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    # Ranks 0 and 1 could go on, as the sums are among pairs. But all ranks run one program.
    return outcome(hp.psum, torch.ones(3 + (rank == 3)), "shard", mesh=mesh)


def test_ranks_that_disagree_hear_of_it(pool: Any) -> None:
    texts = pool(4).run(disagreeing)
    assert len(set(texts)) == 1
    assert "rank 0: psum over ('shard',): shape (3,), float32" in texts[0]
    assert "rank 3: psum over ('shard',): shape (4,), float32" in texts[0]
