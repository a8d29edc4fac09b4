"""Ranks that do not do the same: who notices, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome
from tests.museum.steps import draw, grid

pytestmark = pytest.mark.processes
TIMEOUT_S = 3.0


def weights() -> Any:
    return [draw(3, 3, seed=seed) for seed in range(3)]


def in_order(order: list[int]) -> Callable[..., torch.Tensor]:
    """Returns a loss that calls three equal layers in an order."""
    layer = hp.unit(lambda w, x: torch.tanh(x @ w))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for index in order:
            x = layer(params[index], x)
        return x.square().mean()

    return loss


def crossed(rank: int, way: str) -> str:
    """Rank 1 calls two of three layers, whose weights have equal shapes, in the other order."""
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))
    order = [0, 1, 2]
    step = hp.sharded(hp.grad(in_order(order)), mesh)
    for _ in range(2 if way == "planned" else 0):
        step(params, draw(4, 3, seed=rank))
    if rank == 1:
        order[:] = [0, 2, 1]
    return outcome(step, params, draw(4, 3, seed=rank))


@pytest.mark.parametrize("way", ["recorded", "planned"])
def test_one_rank_calls_its_layers_in_another_order(pool: Callable[[int], Pool], way: str) -> None:
    """trl 6798, vllm-ascend 15500 (from the list), nccl 783: the collectives of one rank come in another order.

    With equal shapes nothing hangs: each rank gets a mixture of two layers, and goes on. With others it hangs. Here
    a recorded step compares each event, and a planned one says where it leaves the plan.
    """
    texts = pool(2).run(crossed, way)
    for text in texts:
        assert "AgreementError" in text, texts


def planned_by_rank(rank: int) -> str:
    mesh = grid("two shards")
    params = hp.shard(weights(), mesh, hp.P("shard"))
    step = hp.sharded(hp.grad(in_order([0, 1, 2])), mesh, policy=hp.Policy(prefetch=1 + rank))
    for _ in range(3):
        text = outcome(step, params, draw(4, 3, seed=rank))
        if text != "returned":
            break
    return text


def test_ranks_plan_by_other_policies(pool: Callable[[int], Pool]) -> None:
    """nccl 195, rccl 1600: both orders are good, their mixture is not (`test_communicators.py` shows how it hangs).

    Here a value that each process reads from its own environment makes another plan on one rank. The policy is one of
    the facts that ranks compare when they make a step.
    """
    texts = pool(2).run(planned_by_rank)
    for text in texts:
        assert "AgreementError" in text, texts


def silent(rank: int) -> tuple[str, float]:
    """Rank 1 never comes to the third call: it is alive, and does something else."""
    mesh = mesh_of((2,), ("shard",), None, TIMEOUT_S)
    params = hp.shard(weights(), mesh, hp.P("shard"))
    step = hp.sharded(hp.grad(in_order([0, 1, 2])), mesh)
    for _ in range(2):
        step(params, draw(4, 3, seed=rank))
    start = time.monotonic()
    text = outcome(step, params, draw(4, 3, seed=rank)) if rank == 0 else "elsewhere"
    return text, time.monotonic() - start


def test_a_rank_that_does_not_come_is_named(pool: Callable[[int], Pool]) -> None:
    """marin 7344: 512 devices hung in a collective; no error, no warning, all processes "running", for a quarter hour.

    What hung there was below the order of collectives, which was right, so no checker of schedules would have found
    it. What can be done is to end: the rank that waits says, after the mesh's timeout, for whom and in what.
    """
    (text, elapsed_s), _ = pool(2).run(silent)
    pool(2).stop()  # one rank has given up, the other one does not know it
    assert text.startswith("PeerError"), text
    assert "rank 1" in text
    assert elapsed_s < 10 * TIMEOUT_S  # a promise: the timeout ends the wait, also on a loaded machine


def drifted(rank: int, debug: bool) -> list[str]:
    """The second weight of rank 1 is another one."""
    mesh = mesh_of((2, 1), ("replicate", "shard"))
    params = hp.shard(weights(), mesh, hp.P())
    params[1] = params[1].with_local(params[1].local + rank)
    step = hp.sharded(hp.grad(in_order([0, 1, 2])), mesh, debug=debug)
    return [outcome(step, params, draw(4, 3, seed=rank)) for _ in range(2)]


def test_replicas_that_differ_are_found(pool: Callable[[int], Pool]) -> None:
    """Megatron-LM 5281: a rank fetched its replica's copy, which was damaged, and nobody compared them.

    Three steps later all was NaN. Gradients are all-reduced, weights are not: what differs stays different, and an
    averaged loss hides it. Here a step with `debug` looks at the replicas that it is given.
    """
    for texts in pool(2).run(drifted, True):
        assert "LeafError: hpfunc.sharded: ranks hold different values of one part" in texts[0], texts
