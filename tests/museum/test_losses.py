"""Losses that are means over tokens, of which ranks and micro-batches have different numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.leaves import assert_close
from tests.helpers.ranks import Pool
from tests.museum.steps import assert_all_close, draw, gradient, grid, in_all_ways, plain

pytestmark = pytest.mark.processes
ROWS, TOKENS = 4, 5
SUM = hp.Numerics(reduce_op="sum")


def weights() -> Any:
    return {"a": draw(3, 3, seed=1), "b": draw(3, seed=2)}


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of tokens, and which of them count: from 1 to all of a row, on each rank others."""
    generator = torch.Generator().manual_seed(90 + rank)
    x = torch.randn(ROWS, TOKENS, 3, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 3 + 2 * rank, (ROWS, 1), generator=generator).clamp_max(TOKENS)
    return x, (torch.arange(TOKENS) < lengths).double()


def token_losses(p: Any, x: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    layer = unit(lambda p, x: torch.tanh(x @ p["a"]) @ p["b"])
    return layer(p, x).square()


def total(p: Any, x: torch.Tensor, mask: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    return (token_losses(p, x, unit) * mask).sum()


def mean_of_own(p: Any, x: torch.Tensor, mask: torch.Tensor, unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    return total(p, x, mask, unit) / mask.sum()


def want(num_ranks: int) -> list[torch.Tensor]:
    """The mean over all tokens of all ranks, in one process."""
    x, mask = (torch.cat(parts) for parts in zip(*map(batch, range(num_ranks)), strict=True))
    return gradient(lambda p: mean_of_own(p, x, mask, plain), weights())


def by_sum(rank: int, count: int, mode: str) -> Any:
    mesh = grid("two replicas of two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))

    def step(params: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        num_tokens = hp.psum(mask.sum(), mesh.axis_names)
        grad_fn = hp.value_and_grad(lambda p, x, mask: total(p, x, mask) / num_tokens, numerics=SUM)
        value, grads = hp.accumulate(grad_fn, count, mode=mode)(params, x, mask)
        return hp.psum(value, mesh.axis_names), grads

    return in_all_ways(step, mesh, params, *batch(rank))


@pytest.mark.parametrize(("count", "mode"), [(1, "scatter"), (4, "scatter"), (2, "local")])
def test_each_token_counts_once(pool: Callable[[int], Pool], count: int, mode: str) -> None:
    """prime-rl 2358, 2562; miles 3231; torchtitan 2206: each rank divided by the number of its own tokens.

    The mean of such means gives tokens of short batches more weight. Here each rank takes its sum over the number of
    all tokens, which is one more `psum`, and gradients are summed (``reduce_op="sum"``).
    """
    assert_all_close(pool(4).run(by_sum, count, mode), want(4))


def by_mean(rank: int, scaled: bool) -> Any:
    mesh = grid("two replicas of two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))

    def step(params: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        share = 4 * mask.sum() / hp.psum(mask.sum(), mesh.axis_names) if scaled else torch.ones(()).double()
        return hp.grad(lambda p, x, mask: mean_of_own(p, x, mask) * share)(params, x, mask)

    return in_all_ways(step, mesh, params, *batch(rank))


def test_a_mean_of_means_is_another_gradient(pool: Callable[[int], Pool]) -> None:
    """verl 5366, Automodel 3830: whether to multiply by the number of ranks depends on who divides by what.

    With gradients that are means over ranks, a rank's mean has to be scaled by its share of the tokens times the
    number of ranks. Both ways give the right gradient; the mean of means does not, so the tests here can fail.
    """
    assert_all_close(pool(4).run(by_mean, True), want(4)[1:])
    naive = [gradient(lambda p, r=r: mean_of_own(p, *batch(r), plain), weights())[1:] for r in range(4)]
    means = [torch.stack(parts).mean(dim=0) for parts in zip(*naive, strict=True)]
    assert_all_close(pool(4).run(by_mean, False), means)
    with pytest.raises(AssertionError):
        assert_close(means, want(4)[1:], 1e-2)


def weighted_by_rows(rank: int) -> Any:
    """Micro-batches of one and of three rows, by hand: their sums are added, with one denominator."""
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))

    def step(params: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        num_tokens = hp.psum(mask.sum(), "shard")
        grads = [
            hp.grad(lambda p, x, m: total(p, x, m) / num_tokens, numerics=SUM)(params, x[rows], mask[rows])
            for rows in (slice(0, 1), slice(1, 4))
        ]
        return {name: grads[0][name].with_local(grads[0][name].local + grads[1][name].local) for name in params}

    return in_all_ways(step, mesh, params, *batch(rank))


def test_micro_batches_are_not_weighted_by_their_rows(pool: Callable[[int], Pool]) -> None:
    """verl 5625: each micro-batch's mean over tokens was weighted by its share of the samples.

    Numerators of tokens and weights of samples do not fit. Here sums are added, and what they are divided by is
    counted once, before the first micro-batch.
    """
    assert_all_close(pool(2).run(weighted_by_rows), want(2)[1:])
