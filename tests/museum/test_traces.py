"""Steps that change while they are trained: other calls for a while, an evaluation between, an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.leaves import assert_close
from tests.helpers.models import sgd
from tests.helpers.ranks import Pool, outcome
from tests.museum.steps import draw, gradient, grid, plain, size_of, whole

pytestmark = pytest.mark.processes
RATE = 0.1


def weights() -> list[torch.Tensor]:
    return [draw(3, 3, seed=seed) for seed in range(4)]


def batch(rank: int, step: int) -> torch.Tensor:
    return draw(4, 3, seed=1000 * rank + step)


def loss(params: Any, x: torch.Tensor, calls: Sequence[int], unit: Callable[..., Any] = hp.unit) -> torch.Tensor:
    layer = unit(lambda w, x: x + torch.tanh(x @ w))
    for index in calls:
        x = layer(params[index], x)
    return x.square().mean()


USUAL, OTHER = (0, 1, 2, 3), (3, 1, 1)
CALLS = {
    "for one step": [USUAL] * 3 + [OTHER] + [USUAL] * 3,
    "for some steps": [USUAL] * 2 + [OTHER] * 3 + [USUAL] * 2,
    "every other step": [USUAL, OTHER] * 4,
    "shorter and longer": [(0, 1), (0, 1), (0, 1, 2, 3), (0, 1), (0,), (0, 1, 2), (0, 1)],
    "the first is another": [OTHER] + [USUAL] * 3,
}


def trained(plan: Sequence[Sequence[int]], num_ranks: int) -> list[torch.Tensor]:
    """The weights after training in one process."""
    params = weights()
    for step, calls in enumerate(plan):
        batches = [batch(rank, step) for rank in range(num_ranks)]
        _, *grads = gradient(
            lambda p, xs=batches, c=calls: torch.stack([loss(p, x, c, plain) for x in xs]).mean(), params
        )
        params = [p - RATE * g for p, g in zip(params, grads, strict=True)]
    return params


def training(rank: int, mesh_name: str, name: str, between: bool, remat: bool) -> Any:
    mesh = grid(mesh_name)
    params = hp.shard(weights(), mesh, hp.P("shard"))
    unit = (lambda fn: hp.unit(fn, remat=True)) if remat else hp.unit
    step = hp.sharded(lambda p, x, c: hp.grad(lambda p, x: loss(p, x, c, unit))(p, x), mesh)
    evaluate = hp.sharded(lambda p, x: loss(p, x, (2, 0, 1)), mesh)
    for number, calls in enumerate(CALLS[name]):
        params = sgd(params, step(params, batch(rank, number), calls), RATE)
        if between:
            evaluate(params, batch(rank, 100 + number))
    return whole(params, mesh), step.followed_plan


@pytest.mark.parametrize("mesh_name", ["two shards", "two replicas of two shards"])
@pytest.mark.parametrize("name", CALLS)
def test_the_order_of_calls_changes_and_goes_back(pool: Callable[[int], Pool], name: str, mesh_name: str) -> None:
    """DeepSpeed 5006: "invalidate trace cache", and a hang after 270 steps; 6557: what had been prefetched was kept.

    Experts, or branches, were called in another order than the recorded one. Here a step leaves its plan where it
    differs, finishes what is under way, and takes up the plan of the other order when it comes again.
    """
    num_ranks = size_of(mesh_name)
    want = trained(CALLS[name], num_ranks)
    for found, _ in pool(num_ranks).run(training, mesh_name, name, False, False):
        assert_close(found, want, 1e-12)


@pytest.mark.parametrize("remat", [False, True])
def test_an_evaluation_between_does_not_touch_the_plan(pool: Callable[[int], Pool], remat: bool) -> None:
    """DeepSpeed 8043, trl 4693: hooks were taken off to generate, and put back with the trace of before.

    The next step popped from an empty queue. Here an evaluation is a step of its own, with a plan of its own, over
    the same arrays and units.
    """
    want = trained(CALLS["for one step"], 2)
    for found, followed in pool(2).run(training, "two shards", "for one step", True, remat):
        assert_close(found, want, 1e-12)
        assert followed


# --- exceptions -----------------------------------------------------------------------------------------------------
class Interrupted(Exception):
    """What ends a step in these tests."""


def interrupted(rank: int, place: str, way: str, everywhere: bool) -> Any:
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))
    armed = [False]

    def fail(here: str) -> None:
        if armed[0] and here == place and (everywhere or rank == 1):
            raise Interrupted(here)

    def chunked(p: Any, x: torch.Tensor) -> torch.Tensor:
        layer = hp.unit(lambda w, x: x + torch.tanh(x @ w))
        x = layer(p[1], layer(p[0], x))
        sums = []
        for index, part in enumerate(x.chunk(2)):  # a loss in chunks, with one head
            y = layer(p[3], layer(p[2], part))
            if index == 0:
                fail("between chunks")
                if armed[0]:
                    y.register_hook(lambda _: fail("backward"))
            sums.append(y.square().sum())
        fail("end")
        return torch.stack(sums).sum() / 12

    step: Any = hp.grad(chunked) if way == "eager" else hp.sharded(hp.grad(chunked), mesh)
    if way == "planned":
        for _ in range(2):
            step(params, batch(rank, 0))
    armed[0] = True
    text = outcome(step, params, batch(rank, 0))
    armed[0] = False
    found = [whole(step(params, batch(rank, 0)), mesh) for _ in range(3)]
    return text, found


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("way", ["eager", "recorded", "planned"])
@pytest.mark.parametrize("place", ["between chunks", "backward", "end"])
def test_a_step_that_raises_leaves_nothing_behind(
    pool: Callable[[int], Pool], place: str, way: str, everywhere: bool
) -> None:
    """torchtitan 3724 (3123 and 1329 in the list): an exception in a chunk of the loss left flags as they were set.

    The head was no longer released, and its gradients no longer reduced, for the rest of the training. Here what a
    step changes is the step's own: after it has raised, on one rank or on all, the next one gives the right numbers.
    """
    want = gradient(lambda p: torch.stack([loss(p, batch(r, 0), USUAL, plain) for r in range(2)]).mean(), weights())
    for text, found in pool(2).run(interrupted, place, way, everywhere):
        assert "Interrupted" in text, text
        for grads in found:
            assert_close(grads, want[1:], 1e-12)
