"""Programs, layouts and policies that are drawn at random, planned by hpfunc and run on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hpfunc as hp
from tests.device.cases import DELAYS, local
from tests.device.harness import Conditions, on_device
from tests.helpers.models import Layout, Model, layouts, models, policies, sgd
from tests.helpers.ranks import mesh_of

pytestmark = pytest.mark.processes
STEPS = 3
# As in tests.steps.test_parity: what is drawn is small, so it is not made smaller.
EXAMPLES = settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
NUMERICS = [hp.Numerics(), hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32")]


def train(rank: int, model: Model, layout: Layout, policy: hp.Policy, numerics: hp.Numerics) -> list[torch.Tensor]:
    mesh = mesh_of(layout.shape, layout.names)
    weights = model.weights()
    params = hp.shard(weights, mesh, layout.specs(weights))

    def step(params: Any, batch: torch.Tensor) -> Any:
        return hp.value_and_grad(lambda p, b: model.loss(p, b, hp.unit), numerics=numerics)(params, batch)

    run, losses = hp.sharded(step, mesh, policy=policy), []
    for number in range(STEPS):
        loss, grads = run(params, model.batch(rank, number).to(mesh.device))
        params = sgd(params, grads)
        losses.append(loss)
    assert run.followed_plan
    return local(losses, grads, hp.unshard(params, mesh.axis_names))


@EXAMPLES
@given(
    model=models(),
    layout=layouts([(2,), (2, 1), (1, 2), (2, 2), (4,)]),
    policy=policies,
    numerics=st.sampled_from(NUMERICS),
    slow=st.sampled_from(sorted(DELAYS)),
)
def test_drawn_programs_do_not_race(
    model: Model, layout: Layout, policy: hp.Policy, numerics: hp.Numerics, slow: str
) -> None:
    conditions = Conditions(delays={slow: DELAYS[slow]})
    on_device(train, conditions, model, layout, policy, numerics, world=layout.num_ranks)
