"""What hpfunc is compared with, and hpfunc: every variant trains the same model on the same data with AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import measure
import torch
import torch.distributed as dist
from models import Model
from torch import Tensor

import hpfunc as hp
from hpfunc.backends import Counters

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, on which mesh.

    Attributes:
        model: see `Model`.
        mesh: sizes of the axes; of two, the first is ``"replicate"``, the last always ``"shard"``.
        micro_batches: gradients of so many are added up in a step.
        bf16: weights are gathered and used in bfloat16; gradients are reduced in float32.
        framework: ``"torch"`` or ``"mindspore"``.
    """

    model: Model = field(default_factory=Model)
    mesh: tuple[int, ...] = (2,)
    micro_batches: int = 1
    bf16: bool = False
    framework: str = "torch"

    def batches(self) -> list[Tensor]:
        """Returns the micro-batches of this rank."""
        return [self.model.batch(dist.get_rank(), index) for index in range(self.micro_batches)]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Attributes:
        step: one step of training.
        weights: returns all weights, whole.
        counters: returns what hpfunc counted in the last step, if it did.
        schedule: returns the schedule of the last step, if there is one.
    """

    step: measure.Step
    weights: Callable[[], list[Tensor]] = list
    counters: Callable[[], Counters | None] = lambda: None
    schedule: Callable[[], hp.Schedule | None] = lambda: None


Mark = Callable[[str], None]


def train_hpfunc(
    task: Task,
    policy: hp.Policy | None,
    *,
    mark: Mark = lambda phase: None,
    sharded: Callable[..., Any] = hp.sharded,
) -> Variant:
    """Trains with hpfunc, eagerly if there is no policy. See `training` for the other arguments."""
    mesh = hp.make_mesh(task.mesh, ("replicate", "shard")[-len(task.mesh) :])
    params = hp.shard(task.model.weights(), mesh, hp.P("shard"))
    block = hp.unit(task.model.block, name="block")
    numerics = hp.Numerics(param_dtype="bfloat16", reduce_dtype="float32") if task.bf16 else hp.Numerics()
    batches = [x.bfloat16() if task.bf16 else x for x in task.batches()]

    def loss_fn(params: list[Any], x: Tensor) -> Tensor:
        for weights in params:
            x = block(weights, x)
        loss = x.float().pow(2).mean(-1).sum()
        mark("forward")
        return loss

    grad_fn = hp.value_and_grad(loss_fn, numerics=numerics)
    batch: Any = batches[0]
    if task.micro_batches > 1:
        grad_fn = hp.accumulate(grad_fn, task.micro_batches)
        batch = torch.cat(batches)

    return training(policy, params, grad_fn, batch, mark=mark, sharded=sharded)


def training(
    policy: hp.Policy | None,
    params: list[Any],
    grad_fn: Callable[..., Any],
    batch: Any,
    finish: Callable[[Any], Any] = lambda loss: None,
    whole: Callable[[Any], Tensor] = lambda weight: weight,
    mark: Mark = lambda phase: None,
    sharded: Callable[..., Any] = hp.sharded,
) -> Variant:
    """Returns a variant that trains with AdamW, on any framework.

    Args:
        policy: None trains eagerly.
        params: a dict of arrays for each block.
        grad_fn: takes params and a batch, returns the loss and its gradients.
        batch: that of this rank.
        finish: is called with the loss of each step.
        whole: makes a tensor of torch of a whole weight.
        mark: is called when a phase of the step has ended, here that of the gradients: ``"backward"``.
        sharded: what makes a planned step.
    """
    optimizer, mesh = hp.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY), next(iter(params[0].values())).mesh
    state = optimizer.init(params)

    def step_fn(params: list[Any], state: Any, x: Any) -> tuple[list[Any], Any, Any]:
        loss, grads = grad_fn(params, x)
        mark("backward")
        updates, state = optimizer.update(grads, state, params)
        return hp.apply_updates(params, updates), state, loss

    train: Any = sharded(step_fn, mesh, policy=policy, donate_argnums=(0, 1)) if policy is not None else step_fn

    def step() -> None:
        nonlocal params, state
        params, state, loss = train(params, state, batch)
        finish(loss)

    def weights() -> list[Tensor]:
        return [whole(weight) for block in hp.unshard(params) for weight in block.values()]

    if policy is None:
        return Variant(step, weights)
    return Variant(step, weights, lambda: train.last_counters, lambda: train.last_schedule)


POLICIES = {
    "hpfunc": hp.Policy(),
    "hpfunc packs nothing": hp.Policy(pack_below_bytes=0),
    "hpfunc packs all": hp.Policy(pack_below_bytes=math.inf),
    "hpfunc prefetch 2": hp.Policy(prefetch=2),
}


def make(name: str, task: Task) -> Variant:
    """Returns a variant of hpfunc by its name."""
    if name in POLICIES:
        return train_hpfunc(task, POLICIES[name])
    if name == "hpfunc eager":
        return train_hpfunc(task, None)
    raise ValueError(name)
