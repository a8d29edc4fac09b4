"""Second order and torch.func through `unshard`, `reduce` and the collectives, against one process without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import hpfunc as hp
from hpfunc._values import layout as _layout
from tests.helpers.ranks import mesh_of, pool
from tests.helpers.reference import Grid
from tests.helpers.strategies import grids, seeds
from tests.helpers.zoo import assert_close

GRIDS = [
    Grid((1,), ("shard",), ("shard",)),
    Grid((3,), ("shard",), ("shard",)),
    Grid((2, 2), ("replicate", "shard"), ("replicate", "shard")),
]
Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on the first jvp


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(w: Tensor, x: Tensor) -> Tensor:
    """A scalar with derivatives of every order."""
    return torch.tanh(x @ w).pow(2).sum() + (w**3).sum()


class Whole:
    """How one rank sees a whole weight through its own part, by public functions only."""

    def __init__(self, grid: Grid, p: hp.P, shape: tuple[int, ...]) -> None:
        self.mesh, self.p, self.shape = mesh_of(grid.sizes, grid.names, grid.data_axes), p, shape

    def local(self, whole: Tensor) -> Tensor:
        return hp.shard(whole, self.mesh, self.p).local

    def gather(self, local: Tensor) -> Tensor:
        return hp.unshard(hp.ShardedArray(local, self.shape, self.p, self.mesh))


# Each takes a function of one tensor to a value; applied to the part on every rank, and to the whole in one process.
def second_derivative(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    return grad(lambda u: (grad(f)(u) * v).sum())(w)


def forward_over_reverse(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    return jvp(grad(f), (w,), (v,))[1]


def double_backward(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(w), w, create_graph=True)
    return torch.autograd.grad((g * v).sum(), w)[0]


def first_derivative(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    return grad(f)(w)


def pulled(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    out, pull, *_ = vjp(f, w)
    return pull(torch.full_like(out, 2.0))[0]


DERIVATIVES = [first_derivative, pulled, second_derivative, forward_over_reverse, double_backward]


def through_unshard(rank: int, grid: Grid, p: hp.P, derive: Any, w: Tensor, v: Tensor, xs: list[Tensor]) -> Tensor:
    whole = Whole(grid, p, tuple(w.shape))
    x = xs[rank]
    # The sum over ranks of their losses has, for a part, the derivative that the transposed gather adds up.
    return derive(lambda local: model(whole.gather(local), x), whole.local(w), whole.local(v))


@pytest.mark.parametrize("derive", DERIVATIVES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("p", [hp.P("shard"), hp.P(None, "shard"), hp.P()], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_derivatives_through_unshard(pool: Any, grid: Grid, p: hp.P, derive: Any) -> None:
    w, v, xs = random((4, 3), 0), random((4, 3), 1), [random((2, 4), 2 + rank) for rank in range(grid.num_ranks)]
    results = pool(grid.num_ranks).run(through_unshard, grid, p, derive, w, v, xs)
    for rank, got in enumerate(results):
        mine = [xs[peer] for peer in grid.peers(rank, p.axes)]
        want = derive(lambda u, mine=mine: sum(model(u, x) for x in mine), w, v)
        local = hp.Mesh(grid.names, grid.sizes, grid.data_axes, tuple(range(grid.num_ranks)), rank=rank)
        assert_close(got, want[_slices(w, p, local)])


def _slices(w: Tensor, p: hp.P, mesh: hp.Mesh) -> tuple[slice, ...]:
    return _layout.Layout(tuple(w.shape), p, mesh).local_slices(mesh.coordinate)


def mapped(rank: int, grid: Grid, p: hp.P, ws: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of weights, each cut by `p`: one by one, and by vmap."""
    whole = Whole(grid, p, tuple(ws.shape[1:]))
    locals_ = torch.stack([whole.local(w) for w in ws])

    def loss(local: Tensor) -> Tensor:
        return model(whole.gather(local), x)

    one_by_one = torch.stack([grad(loss)(local) for local in locals_])
    at_once = vmap(grad(loss))(locals_)
    along_last = vmap(grad(loss), in_dims=-1, out_dims=-1)(locals_.movedim(0, -1))
    assert_close(along_last.movedim(-1, 0), at_once)
    return at_once, one_by_one


@pytest.mark.parametrize("p", [hp.P("shard"), hp.P(None, "shard"), hp.P(("replicate", "shard"))], ids=str)
def test_vmap_maps_over_unshard_and_its_transpose(pool: Any, p: hp.P) -> None:
    for at_once, one_by_one in pool(4).run(mapped, GRIDS[2], p, random((5, 4, 3), 0), random((2, 4), 1)):
        assert_close(at_once, one_by_one)


def mapped_collectives(rank: int, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    mesh = mesh_of((2,), ("shard",))
    x = x + rank
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda t: hp.psum(t, "shard", mesh=mesh),
        lambda t: hp.pvary(t, "shard", mesh=mesh),
        lambda t: hp.all_gather(t, "shard", dim=1, mesh=mesh),
        lambda t: hp.all_gather(t, "shard", dim=-1, tiled=True, mesh=mesh),
        lambda t: hp.psum_scatter(t, "shard", scatter_dim=0, tiled=True, mesh=mesh),
        lambda t: hp.psum_scatter(t, "shard", scatter_dim=0, mesh=mesh),
        lambda t: hp.all_to_all(t, "shard", 0, 1, tiled=True, mesh=mesh),
        lambda t: hp.ppermute(t, "shard", [(0, 1), (1, 0)], mesh=mesh),
        lambda t: hp.reduce(t, mesh, hp.P("shard")).local,
        lambda t: hp.reduce(t, mesh, hp.P()).local,
    ]
    pairs = []
    for call in calls:
        pairs.append((vmap(call)(x), torch.stack([call(row) for row in x])))
        pairs.append((vmap(call, in_dims=1)(x), torch.stack([call(row) for row in x.movedim(1, 0)])))
    return pairs


def test_vmap_maps_over_collectives(pool: Any) -> None:
    for pairs in pool(2).run(mapped_collectives, random((2, 2, 3), 0)):
        for at_once, one_by_one in pairs:
            assert_close(at_once, one_by_one)


def hessians(rank: int, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    whole = Whole(GRIDS[1], hp.P("shard"), tuple(w.shape))
    local = whole.local(w)

    def loss(part: Tensor) -> Tensor:
        return model(whole.gather(part), x)

    return jacrev(lambda u: u * loss(u))(local), hessian(loss)(local)


def test_jacobians_and_hessians_are_maps_over_derivatives(pool: Any) -> None:
    # All ranks have the same data. A rank's basis vectors meet those of the same number on the other ranks.
    w, x, n = random((3, 2), 0), random((2, 3), 1), 3
    full = hessian(lambda u: model(u, x))(w)
    for rank, (_, got) in enumerate(pool(3).run(hessians, w, x)):
        # Rank r seeds its row with basis vector k while all others seed theirs: the sum over all ranks' rows.
        want = sum(full[rank : rank + 1, :, other : other + 1, :] for other in range(n)) * n
        assert_close(got, want)


def chained(rank: int, grid: Grid, derive: Any, xs: list[Tensor], v: Tensor) -> Tensor:
    mesh = mesh_of(grid.sizes, grid.names, grid.data_axes)
    axis = grid.names[-1]

    def f(x: Tensor) -> Tensor:
        with hp.use_mesh(mesh):
            y = hp.all_gather(torch.sin(x), axis, tiled=True)
            z = hp.psum_scatter(y**3, axis, tiled=True)
            return (hp.ppermute(z, axis, [(i, i) for i in range(grid.size((axis,)))]) ** 2).sum()

    return derive(f, xs[rank], v)


def chained_in_one(grid: Grid, xs: list[Tensor], rank: int) -> Callable[[Tensor], Tensor]:
    """The sum of the losses of all peers, as a function of the part of `rank`."""
    peers = grid.peers(rank, grid.names[-1:])

    def f(parts: Tensor) -> Tensor:
        y = torch.sin(parts).reshape(-1)
        z = len(peers) * y**3
        return (z**2).sum()

    return f


@given(grids(max_ranks=4), st.sampled_from(DERIVATIVES), seeds)
def test_derivatives_through_chains_of_collectives(grid: Grid, derive: Any, seed: int) -> None:
    xs = [random((2,), seed + rank) for rank in range(grid.num_ranks)]
    v = random((2,), seed + 99)
    for rank, got in enumerate(pool(grid.num_ranks).run(chained, grid, derive, xs, v)):
        peers = grid.peers(rank, grid.names[-1:])
        parts, tangents = torch.stack([xs[p] for p in peers]), torch.stack([v for _ in peers])
        want = derive(chained_in_one(grid, xs, rank), parts, tangents)[peers.index(rank)]
        assert_close(got, want)
