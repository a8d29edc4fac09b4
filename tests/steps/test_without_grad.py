"""Units without gradients inside of a differentiation, weights computed in it, and weights that are a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of, outcome

pytestmark = pytest.mark.processes
Tensor = torch.Tensor


def _whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _every_way(fun: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results of a gradient function: eager, recorded, planned, planned."""
    step = hp.sharded(fun, mesh_of((2,), ("shard",)), policy=hp.Policy(pack_below_bytes=0))
    results = [fun(*args), step(*args), step(*args), step(*args)]
    assert step.followed_plan
    return results


def _under_no_grad(rank: int, dtype: str, spec: hp.P, both: bool) -> list[tuple[float, Tensor]]:
    mesh, seen = mesh_of((2,), ("shard",)), []

    def linear(w: Tensor, x: Tensor) -> Tensor:
        seen.append(w.dtype)
        return torch.tanh(x @ w)

    layer = hp.unit(linear)

    def loss(w: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = layer(w[1], x)
        return ((layer(w[1] if both else w[0], x) + gate) ** 2).mean()

    w = hp.shard([_whole(0, 5, 5), _whole(1, 5, 5)], mesh, spec)
    numerics = hp.Numerics(param_dtype=dtype, reduce_dtype="float64", cast_inputs=True, output_dtype="float64")
    found = _every_way(hp.value_and_grad(loss, numerics=numerics), w, _whole(7 + rank, 3, 5))
    assert {str(x) for x in seen} == {f"torch.{dtype}"}
    return [(float(value), hp.unshard(gradients)) for value, gradients in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("spec", [hp.P("shard"), hp.P(None, "shard"), hp.P()], ids=str)
@pytest.mark.parametrize("both", [False, True])
def test_a_unit_without_gradients_computes_with_the_numerics_of_the_call(
    pool: Callable[..., Pool], dtype: str, spec: hp.P, both: bool
) -> None:
    leaves = [_whole(0, 5, 5).requires_grad_(), _whole(1, 5, 5).requires_grad_()]
    losses = []
    for rank in range(2):
        w, x = [leaf.to(getattr(torch, dtype)) for leaf in leaves], _whole(7 + rank, 3, 5).to(getattr(torch, dtype))
        gate = torch.tanh(x @ w[1]).detach().double()
        losses.append(((torch.tanh(x @ w[1 if both else 0]).double() + gate) ** 2).mean())
    wanted = torch.autograd.grad(torch.stack(losses).mean(), leaves, allow_unused=True)
    for rank, results in enumerate(pool(2).run(_under_no_grad, dtype, spec, both)):
        for value, gradients in results:
            assert value == pytest.approx(float(losses[rank].detach()), rel=1e-12)
            for got, want in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-12, atol=1e-14)


def _computed_in_the_loss(rank: int, how: str) -> list[str]:
    mesh = mesh_of((2,), ("shard",))
    w, frozen = hp.shard([_whole(0, 4, 3), _whole(1, 4, 3)], mesh, hp.P("shard"))
    layer = hp.unit(lambda p, x: (x @ p).square().mean())

    def loss(w: Any, x: Tensor) -> Tensor:
        match how:
            case "scaled":
                made = w.with_local(2 * w.local)
            case "added to what is frozen":
                made = frozen.with_local(frozen.local + 0 * w.local)
            case "a row":
                made = hp.ShardedArray(torch.stack([w.local] * 2), (2, 4, 3), hp.P(None, "shard"), mesh)[1]
            case "detached":
                made = w.with_local(2 * w.local.detach())
            case _:
                made = frozen.with_local(2 * frozen.local)
        return layer(made, x) + layer(w, x)

    fun = hp.value_and_grad(loss)
    x = _whole(5 + rank, 2, 4)
    return [outcome(fun, w, x), outcome(hp.sharded(fun, mesh), w, x)]


@pytest.mark.parametrize("how", ["scaled", "added to what is frozen", "a row"])
def test_weights_computed_of_differentiated_ones_are_refused(pool: Callable[..., Pool], how: str) -> None:
    for texts in pool(2).run(_computed_in_the_loss, how):
        assert all("are computed within the loss" in text for text in texts), texts


@pytest.mark.parametrize("how", ["detached", "of frozen ones"])
def test_weights_computed_of_constants_are_frozen(pool: Callable[..., Pool], how: str) -> None:
    for texts in pool(2).run(_computed_in_the_loss, how):
        assert texts == ["returned", "returned"]


class _Exchanges(torch.autograd.Function):
    """``x * (a @ b)``, whose backward gives each weight the other one, the very tensor, for a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b)
        return x * (a @ b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        _, a, b = ctx.saved_tensors
        return None, b, a


def _a_weight_as_gradient(rank: int, inside: bool, remat: bool) -> list[tuple[Tensor, Tensor]]:
    mesh = mesh_of((2,), ("shard",))
    a, b = hp.shard([_whole(0, 6), _whole(1, 6)], mesh, hp.P("shard"))

    def fn(p: Any, x: Tensor) -> Tensor:
        return checkpoint(_Exchanges.apply, x, *p, use_reentrant=False) if inside else _Exchanges.apply(x, *p)

    layer = hp.unit(fn, remat=remat)
    found = _every_way(hp.grad(lambda p, x: layer(p, x).sum()), [a, b], torch.ones((), dtype=torch.float64))
    return [hp.unshard(gradients) for gradients in found]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_a_whole_weight_may_be_the_gradient_of_another(pool: Callable[..., Pool], inside: bool, remat: bool) -> None:
    for results in pool(2).run(_a_weight_as_gradient, inside, remat):
        for got_a, got_b in results:
            assert torch.equal(got_a, _whole(1, 6))
            assert torch.equal(got_b, _whole(0, 6))


class _Attribute(torch.autograd.Function):
    """``x @ w.T``; it keeps both as attributes, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        return g @ ctx.w, g.t() @ ctx.x


def _penalized(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(ws: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = layer(ws[1], layer(ws[0], x))
        (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return force.square().mean() + y.mean()

    return loss


def _penalty(rank: int) -> list[list[Tensor]]:
    mesh = mesh_of((2,), ("shard",))
    ws = hp.shard([_whole(0, 5, 5), _whole(1, 5, 5)], mesh, hp.P("shard"))
    layer = hp.unit(lambda w, x: torch.tanh(_Attribute.apply(x, w)))
    return [hp.unshard(grads) for grads in _every_way(hp.grad(_penalized(layer)), ws, _whole(5 + rank, 2, 5))]


def test_a_function_that_keeps_its_weight_is_differentiated_twice(pool: Callable[..., Pool]) -> None:
    leaves = [_whole(0, 5, 5).requires_grad_(), _whole(1, 5, 5).requires_grad_()]
    loss = _penalized(lambda w, x: torch.tanh(_Attribute.apply(x, w)))
    wanted = torch.autograd.grad(
        torch.stack([loss(leaves, _whole(5 + rank, 2, 5)) for rank in range(2)]).mean(), leaves
    )
    for results in pool(2).run(_penalty):
        for grads in results:
            for got, want in zip(grads, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
