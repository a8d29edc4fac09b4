"""More programs of `tests.device.cases`: one for each optimizer, and each way to hold its state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import hpfunc as hp
from tests.device.cases import FEWER, STEPS, batch, case, chain, local, plain_mesh, sharded_layers, train
from tests.device.harness import never_waits

HALF = hp.Numerics(param_dtype="float16", reduce_dtype="float16", cast_inputs=True)


# --- donated ---------------------------------------------------------------------------------------------------------
@case()
def train_sgd(rank: int) -> list[torch.Tensor]:
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=hp.optim.sgd(0.1, momentum=0.9))


@case()
def train_clipped(rank: int) -> list[torch.Tensor]:
    optimizer = hp.optim.chain(hp.optim.clip_by_global_norm(0.01), hp.optim.adamw(1e-2))
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer)


@case()
def train_finite(rank: int) -> list[torch.Tensor]:
    optimizer, because = hp.optim.apply_if_finite(hp.optim.adamw(1e-2)), "the host decides whether to apply an update"
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer, waits_because=because)


@case()
def train_from_torch(rank: int) -> list[torch.Tensor]:
    optimizer = hp.optim.from_torch(torch.optim.AdamW, lr=1e-2)
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer)


@case(slow=FEWER)
def train_scheduled(rank: int) -> list[torch.Tensor]:
    optimizer = hp.optim.chain(
        hp.optim.scale_by_adam(),
        hp.optim.add_decayed_weights(0.1),
        hp.optim.scale_by_learning_rate(hp.optim.warmup_cosine(0.1, 2, STEPS)),
    )
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer)


# --- not donated -----------------------------------------------------------------------------------------------------
@case(slow=FEWER)
def train_kept(rank: int) -> list[torch.Tensor]:
    """The weights of each step stay as they are, beside those of the next."""
    return train(plain_mesh(), sharded_layers(plain_mesh()), donates=False)


@case(slow=FEWER)
def train_sgd_kept(rank: int) -> list[torch.Tensor]:
    optimizer = hp.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer, donates=False)


@case(slow=FEWER)
def train_from_torch_kept(rank: int) -> list[torch.Tensor]:
    optimizer = hp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    return train(plain_mesh(), sharded_layers(plain_mesh()), optimizer=optimizer, donates=False)


# --- loops of their own ----------------------------------------------------------------------------------------------
@case(slow=FEWER)
def bound(rank: int) -> list[torch.Tensor]:
    """An optimizer of torch writes into the weights, on the compute stream, between two steps."""
    mesh = plain_mesh()
    bound = hp.optim.bind(sharded_layers(mesh))
    optimizer = torch.optim.AdamW(bound.parameters, lr=1e-2, foreach=False)
    step = hp.sharded(hp.value_and_grad(chain), mesh, policy=hp.Policy(pack_below_bytes=0))
    for number in range(STEPS):
        x = batch(mesh, number)
        with never_waits() if step.followed_plan else nullcontext():
            _, grads = step(bound.params, x)
            bound.set_grads(grads)
            optimizer.step()
    assert step.followed_plan
    return local(bound.params)


@case(slow=FEWER)
def loss_scaled(rank: int) -> list[torch.Tensor]:
    """float16, with a scale that the host adjusts, so it waits. The first ones overflow on one rank: all ranks skip."""
    mesh, scaling = plain_mesh(), hp.optim.DynamicLossScale(period=2)
    optimizer = hp.optim.apply_if_finite(hp.optim.sgd(0.1))

    def step(params: Any, state: Any, scale: Any, x: torch.Tensor, factor: float) -> Any:
        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return scaling.scale(chain(params, x) * factor, scale)

        value, grads = hp.value_and_grad(loss, numerics=HALF)(params, x)
        updates, state = optimizer.update(scaling.unscale(grads, scale), state, params)
        scale = scaling.adjust(scale, state.is_finite)
        return hp.apply_updates(params, updates), state, scale, value

    run = hp.sharded(step, mesh, policy=hp.Policy(pack_below_bytes=0), donate_argnums=(0, 1))
    params, scale, values, skipped = sharded_layers(mesh), scaling.init(1024.0), [], []
    state = optimizer.init(params)
    for number in range(STEPS):
        factor = 1e6 if number < 2 and rank == 1 else 1.0
        params, state, scale, value = run(params, state, scale, batch(mesh, number), factor)
        values.append(value)
        skipped.append(state.num_skipped)
    assert skipped == [1, 2, 2, 2]
    assert run.followed_plan
    return local(params, values)
