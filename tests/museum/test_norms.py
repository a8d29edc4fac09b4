"""Norms of gradients that are cut, replicated and shared, and what is clipped by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of
from tests.museum.steps import MESHES, assert_all_close, draw, gradient, grid, in_all_ways, plain, size_of

pytestmark = pytest.mark.processes
LIMIT = 0.05
P = hp.P


def weights() -> Any:
    return {"b": draw(5, seed=1), "scale": draw(seed=2), "w": draw(5, 5, seed=3)}


def loss(params: Any, x: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    """The matrix is used by two units; the vector and the scalar are replicated."""
    first = unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]) * p["scale"])
    second = unit(lambda w, x: x @ w.t())
    return second(params["w"], first(params, x)).square().mean()


def clipped_step(params: Any, x: torch.Tensor) -> Any:
    grads = hp.grad(loss)(params, x)
    clipped, _ = hp.clip_by_global_norm(LIMIT).update(grads, ())
    return hp.global_norm(grads), hp.global_norm(clipped), clipped


def clipped(rank: int, mesh_name: str) -> Any:
    mesh = grid(mesh_name)
    params = hp.shard(weights(), mesh, {"b": P("shard"), "scale": P(), "w": P("shard")})
    return in_all_ways(clipped_step, mesh, params, draw(4, 5, seed=50 + rank))


def local_norms(rank: int) -> float:
    """Returns what the issue's loop took for the norm: that of the local parts."""
    grads = hp.shard(weights(), grid("two shards"), P("shard"))
    return float(sum(x.local.square().sum() for x in (grads["w"],)) ** 0.5)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_clipping_goes_by_the_norm_of_all_elements(pool: Callable[[int], Pool], mesh_name: str) -> None:
    """pytorch 170862: the norm that came back was that of the local part, and gradients were scaled by it.

    Each rank then has another factor, so the shards of one weight are clipped differently. Here every element counts
    once: cut ones over their ranks, replicated ones and those of a weight with two uses once, an uneven cut without
    its padding.
    """
    num_ranks = size_of(mesh_name)
    batches = [draw(4, 5, seed=50 + rank) for rank in range(num_ranks)]
    _, *grads = gradient(lambda p: torch.stack([loss(p, x, plain) for x in batches]).mean(), weights())
    norm = torch.cat([g.reshape(-1) for g in grads]).norm()
    assert norm > LIMIT
    factor = torch.tensor(LIMIT, dtype=torch.float64) / norm
    want = [norm, torch.tensor(LIMIT, dtype=torch.float64), *(g * factor for g in grads)]
    assert_all_close(pool(num_ranks).run(clipped, mesh_name), want)


def test_local_norms_differ(pool: Callable[[int], Pool]) -> None:
    """So the test above can fail."""
    first, second = pool(2).run(local_norms)
    assert first != pytest.approx(second)


# --- a mesh of two kinds of axes ------------------------------------------------------------------------------------
def mixed(rank: int) -> Any:
    mesh = mesh_of((2, 2), ("shard", "tp"), ("shard",))
    specs = {"b": P("shard"), "scale": P(), "w": P("shard", "tp")}
    grads = hp.shard(weights(), mesh, specs)
    return in_all_ways(hp.global_norm, mesh, grads)


def test_norms_of_arrays_that_are_cut_over_different_axes(pool: Callable[[int], Pool]) -> None:
    """pytorch 180346, Megatron-LM 7452: some gradients are cut over "tp", others replicated over it.

    To stack the norms of both fails, and to sum squares over all ranks counts the replicated ones twice. Here only the
    first rank along "tp" adds these up.
    """
    norm = torch.cat([x.reshape(-1) for x in weights().values()]).norm()
    assert_all_close(pool(4).run(mixed), [norm])


# --- axes of one rank -----------------------------------------------------------------------------------------------
SIZES = [((1, 2), 2), ((2, 1), 2), ((1, 1), 1)]


def on_thin_mesh(rank: int, shape: tuple[int, ...]) -> Any:
    mesh = mesh_of(shape, ("replicate", "shard"))
    params = hp.shard(weights(), mesh, P("shard") if shape[1] > 1 else P())
    params = {name: params[name] for name in sorted(params)}
    return in_all_ways(hp.grad(loss), mesh, params, draw(4, 5, seed=50 + rank))


@pytest.mark.parametrize(("shape", "num_ranks"), SIZES)
def test_an_axis_of_one_rank_changes_nothing(
    pool: Callable[[int], Pool], shape: tuple[int, ...], num_ranks: int
) -> None:
    """verl 7493, Megatron-LM 6773: sharding over one rank of several switched the reduction off, silently.

    Every rank trained for itself. Here the gradient is the mean over all data axes, whatever the size of each, and
    whether an array is cut over them or not.
    """
    batches = [draw(4, 5, seed=50 + rank) for rank in range(num_ranks)]
    _, *want = gradient(lambda p: torch.stack([loss(p, x, plain) for x in batches]).mean(), weights())
    assert_all_close(pool(num_ranks).run(on_thin_mesh, shape), want)
