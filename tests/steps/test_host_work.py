"""What a step costs the host grows with the number of weights, and not faster: counted in calls of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes


def weights_of(p: Any, x: torch.Tensor) -> torch.Tensor:
    for weight in p.values():
        x = torch.tanh(x * weight)  # autograd saves each weight
    return x


def calls_in_a_step(rank: int, num_units: int, num_weights: int, planned: bool) -> int:
    mesh = mesh_of((2,), ("shard",))
    blocks = [{str(i): torch.full((4,), 0.5) for i in range(num_weights)} for _ in range(num_units)]
    params, unit = hp.shard(blocks, mesh, hp.P("shard")), hp.unit(weights_of)
    optimizer = hp.optim.adamw(1e-3)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params:
            x = unit(block, x)
        return x.sum()

    def step_fn(params: Any, state: Any, x: torch.Tensor) -> Any:
        _, grads = hp.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state

    step: Callable[..., Any] = hp.sharded(step_fn, mesh) if planned else step_fn
    state, x = optimizer.init(params), torch.ones(2, 4)
    for _ in range(3):
        params, state = step(params, state, x)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step(params, state, x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("planned", [False, True])
def test_twice_the_weights_are_at_most_twice_the_calls(pool: Callable[[int], Pool], planned: bool) -> None:
    def calls(num_units: int, num_weights: int) -> int:
        return pool(2).run(calls_in_a_step, num_units, num_weights, planned)[0]

    base = calls(4, 16)
    assert calls(8, 16) <= 2.1 * base
    assert calls(4, 32) <= 2.1 * base
