"""Training of a random model by value_and_grad and SGD: eager, or by a policy."""

from __future__ import annotations

from typing import Any

import optree
import torch

import hpfunc as hp
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.models import Layout, Model, sgd
from tests.helpers.ranks import mesh_of

STEPS = 3


def train(
    rank: int,
    model: Model,
    layout: Layout,
    policy: hp.Policy | None,
    dtype: torch.dtype,
    numerics: hp.Numerics,
    num_steps: int = STEPS,
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Returns the local gradients of the last step, the whole final weights, and whether the last step was planned."""
    mesh = mesh_of(layout.shape, layout.names)
    weights = to_framework(model.weights(dtype))
    params = hp.shard(weights, mesh, layout.specs(weights))
    grads: Any = None

    def step(params: Any, batch: torch.Tensor) -> Any:
        _, grads = hp.value_and_grad(lambda p, b: model.loss(p, b, hp.unit), numerics=numerics)(params, batch)
        return grads

    run: Any = step if policy is None else hp.sharded(step, mesh, policy=policy, debug=True)
    for number in range(num_steps):
        grads = run(params, to_framework(model.batch(rank, number, dtype)))
        params = sgd(params, grads)
    followed = policy is not None and run.followed_plan
    wholes = hp.unshard(params, mesh.axis_names)
    return optree.tree_leaves(to_torch(grads)), optree.tree_leaves(to_torch(wholes)), followed


NUMERICS = [
    hp.Numerics(),
    hp.Numerics(param_dtype="bfloat16"),
    hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32"),
    hp.Numerics(reduce_dtype="float16"),
    hp.Numerics(reduce_op="sum", reduce_dtype="float64"),
]
