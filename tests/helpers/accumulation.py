"""Training of a random model with gradients that are accumulated, and what it should give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import optree
import torch

import hpfunc as hp
from tests.helpers.frameworks import to_framework, to_torch
from tests.helpers.models import Layout, Model, reference, sgd
from tests.helpers.ranks import mesh_of

STEPS = 2


@dataclass(frozen=True)
class Run:
    """How to accumulate."""

    num_microbatches: int
    mode: Any
    policy: hp.Policy | None
    numerics: hp.Numerics = field(default_factory=hp.Numerics)
    dtype: torch.dtype = torch.float64


def train(rank: int, model: Model, layout: Layout, run: Run) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Returns the local gradients of the last step, the whole weights after it, and whether it was planned.

    In float64 the losses are judged, too.
    """
    mesh = mesh_of(layout.shape, layout.names)
    weights = to_framework(model.weights(run.dtype))
    params = hp.shard(weights, mesh, layout.specs(weights))
    loss = hp.value_and_grad(lambda p, b: model.loss(p, b, hp.unit), numerics=run.numerics)
    grad_fn = hp.accumulate(loss, run.num_microbatches, mode=run.mode)
    step: Any = grad_fn if run.policy is None else hp.sharded(grad_fn, mesh, policy=run.policy, debug=True)
    grads: Any = None
    for number in range(STEPS):
        batch = torch.cat([model.batch(rank, 10 * number + k, run.dtype) for k in range(run.num_microbatches)])
        value, grads = step(params, to_framework(batch))
        if run.dtype == torch.float64:
            assert torch.allclose(to_torch(value), model.loss(to_torch(hp.unshard(params, mesh.axis_names)), batch))
            params = sgd(params, grads)
        else:  # gradients are of `Numerics.accum_dtype`
            params = sgd(params, optree.tree_map(lambda g: g.float(), grads))
    return (
        optree.tree_leaves(to_torch(grads)),
        optree.tree_leaves(to_torch(hp.unshard(params, mesh.axis_names))),
        run.policy is not None and step.followed_plan,
    )


def one_big_batch(model: Model, num_ranks: int, num_microbatches: int) -> list[torch.Tensor]:
    """As `tests.helpers.models.reference`, with a batch that is as large as all micro-batches together."""

    class Big(Model):
        def batch(self, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.cat([model.batch(rank, 10 * step + k, dtype) for k in range(num_microbatches)])

    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    return reference(Big(**fields), num_ranks, STEPS)


NUMERICS = [
    hp.Numerics(),
    hp.Numerics(param_dtype="bfloat16"),
    hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32", accum_dtype="float32", cast_inputs=True),
    hp.Numerics(reduce_dtype="bfloat16", accum_dtype="float64"),
    hp.Numerics(reduce_dtype="float16", reduce_op="sum"),
    hp.Numerics(accum_dtype="bfloat16", output_dtype="float32"),
]
