"""Plain parameters in a step on several ranks: what would train each rank by itself is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hpfunc as hp
from tests.helpers.ranks import mesh_of, outcome, pool


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def as_an_argument(apply: Any, params: Any, w: Any, x: Any) -> Any:
    return hp.value_and_grad(lambda params: apply(params, x).square().mean())(params)


def with_another_array(apply: Any, params: Any, w: Any, x: Any) -> Any:
    head = hp.unit(lambda w, x: (x @ w).mean())
    return hp.value_and_grad(lambda w, params: head(w, apply(params, x)), argnums=(0, 1))(w, params)


def cast_before(apply: Any, params: Any, w: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return apply({path: p.double().float() for path, p in params.items()}, x).square().mean()

    return hp.value_and_grad(loss)(params)


def with_buffers(apply: Any, params: Any, w: Any, x: Any) -> Any:
    return hp.value_and_grad(lambda params: apply.with_buffers(params, {}, x)[0].square().mean())(params)


def accumulated(apply: Any, params: Any, w: Any, x: Any) -> Any:
    grad_fn = hp.value_and_grad(lambda params, x: apply(params, x).square().mean())
    return hp.accumulate(grad_fn, 3)(params, x)


def by_torch_func(apply: Any, params: Any, w: Any, x: Any) -> Any:
    return torch.func.grad(lambda params: apply(params, x).square().mean())(params)


def by_backward(apply: Any, params: Any, w: Any, x: Any) -> Any:
    apply(params, x).square().mean().backward()
    return [p.grad for p in params.values()]


REFUSED = [as_an_argument, with_another_array, cast_before, with_buffers, accumulated, by_torch_func, by_backward]


def attempt(rank: int, use: Callable[..., Any], shape: Any, names: Any) -> list[str]:
    mesh = mesh_of(shape, names)
    apply, params = hp.from_module(build())
    w = hp.shard(torch.ones(2, 1), mesh, hp.P("shard"))
    step = hp.sharded(lambda params, w, x: use(apply, params, w, x), mesh)
    texts = [outcome(step, params, w, batch(rank)) for _ in range(3)]
    if use in (by_torch_func, by_backward):  # without a step that is torch's own business
        return texts
    with hp.use_mesh(mesh):
        return [*texts, outcome(use, apply, params, w, batch(rank))]


@pytest.mark.parametrize("use", REFUSED)
def test_training_each_rank_alone_is_refused(use: Any) -> None:
    for texts in pool(2).run(attempt, use, (2,), ("shard",)):
        for text in texts:
            assert "UsageError: hpfunc.ModuleFunction: plain parameters are differentiated" in text, text
            assert all(path in text for path in ("0.weight", "0.bias", "2.weight", "2.bias", "hpfunc.shard(params"))


@pytest.mark.parametrize("use", [as_an_argument, with_another_array, cast_before, with_buffers, accumulated])
def test_one_rank_of_data_trains_plain_parameters(use: Any) -> None:
    assert pool(2).run(attempt, use, (1, 2), ("shard", "tp")) == [["returned"] * 4] * 2


def evaluated(rank: int) -> Any:
    mesh = mesh_of((2,), ("shard",))
    apply, params = hp.from_module(build())
    x, want = batch(rank), build()(batch(rank))
    with hp.use_mesh(mesh):
        found = [apply(params, x)]
    with torch.no_grad():
        step = hp.sharded(apply, mesh)
        found += [step(params, x), step(params, x)]
    return all(torch.equal(y, want) for y in found)


def test_plain_evaluation_goes_on_to_work() -> None:
    assert pool(2).run(evaluated) == [True, True]


def distilled(rank: int, frozen: bool) -> Any:
    """A plain teacher on each rank, a sharded student."""
    mesh = mesh_of((2,), ("shard",))
    teacher = build().requires_grad_(not frozen)
    teach, known = hp.from_module(teacher)
    apply, params = hp.from_module(build())
    params = hp.shard(params, mesh, hp.P("shard"))

    def loss(params: Any, x: Any) -> Any:
        return (apply(params, x) - teach(known, x) - 1).square().mean()

    step = hp.sharded(hp.value_and_grad(loss), mesh)
    return [hp.unshard(step(params, batch(rank))[1]) for _ in range(3)]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_plain_module_that_is_not_differentiated_stands_beside_one_that_is(frozen: bool) -> None:
    model, teacher = build(), build()
    x = torch.cat([batch(0), batch(1)])
    (model(x) - teacher(x).detach() - 1).square().mean().backward()
    for results in pool(2).run(distilled, frozen):
        for grads in results:
            for path, p in model.named_parameters():
                torch.testing.assert_close(grads[path], p.grad)
