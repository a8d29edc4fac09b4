"""The same weights and data give the same training on torch and on MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpfunc as hp
from tests.helpers.frameworks import needs_mindspore, to_framework, to_torch
from tests.helpers.models import Layout, Model, P, sgd
from tests.helpers.ranks import Pool, mesh_of

pytestmark = [pytest.mark.processes, needs_mindspore]
NUM_STEPS = 20
LAYOUTS = [Layout((4,), ("shard",), P("shard"), P("shard")), Layout((2, 2), ("replicate", "shard"), P("shard"), P())]


def losses_of(rank: int, layout: Layout, policy: hp.Policy) -> list[float]:
    model, mesh = Model(width=16, num_inputs=8), mesh_of(layout.shape, layout.names)
    weights = model.weights()
    params = hp.shard(to_framework(weights), mesh, layout.specs(weights))
    grad = hp.value_and_grad(lambda p, batch: model.loss(p, batch, hp.unit))

    def step_fn(params: Any, batch: Any) -> Any:
        loss, grads = grad(params, batch)
        return sgd(params, grads), hp.pmean(loss, mesh.data_axes)

    step, found = hp.sharded(step_fn, mesh, policy=policy), []
    for number in range(NUM_STEPS):
        params, loss = step(params, to_framework(model.batch(rank, number)))
        found.append(float(to_torch(loss)))
    assert step.followed_plan
    return found


@pytest.mark.parametrize("pack_below_bytes", [0, float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["FSDP", "HSDP"])
def test_twenty_steps_of_sgd_have_the_same_losses(
    pool: Callable[..., Pool], layout: Layout, pack_below_bytes: float
) -> None:
    policy = hp.Policy(pack_below_bytes=pack_below_bytes)
    of_torch = pool(4, "torch").run(losses_of, layout, policy)[0]
    of_mindspore = pool(4).run(losses_of, layout, policy)[0]
    torch.testing.assert_close(of_mindspore, of_torch, rtol=1e-4, atol=0.0)
