"""`torch.autograd.grad` inside of a loss: forces, gradient penalties, adversarial examples; first and second order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hpfunc as hp
from tests.helpers.ranks import Pool, mesh_of

pytestmark = pytest.mark.processes
Tensor = torch.Tensor
Call = Callable[..., Any]
D = torch.float64
WIDTH = 6
grad: Any = torch.autograd.grad


# --- units ------------------------------------------------------------------------------------------------------------
def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(F.linear(x, p["w"], p["b"]))


def energy(p: Any, x: Tensor) -> Tensor:
    distances = (x[:, None] - x[None]).square().sum(-1)
    return F.softplus(distances @ distances @ F.linear(x, p["w"])).sum() + (p["b"] * x.sin()).sum()


def forces_inside(p: Any, x: Tensor) -> Tensor:
    """The whole differentiation is inside of one unit."""
    x = x.detach().requires_grad_()
    return grad(energy(p, x), x, create_graph=True)[0]


def first_order_inside(p: Any, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (step,) = grad(energy(p, y), y)
    return block(p, x + 0.1 * step)


# --- losses -----------------------------------------------------------------------------------------------------------
def chain(call: Call, ps: Any, x: Tensor) -> Tensor:
    for p in ps:
        x = call(p, x)
    return x


def gradient_penalty(call: Call, ps: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = chain(call, ps, x)
    (g,) = grad(y.sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean() + y.mean()


def forces(call: Call, ps: Any, x: Tensor) -> Tensor:
    """The loss uses the forces alone, so the energy itself has no gradient."""
    x = x.clone().requires_grad_()
    return grad(chain(call, ps, x).square().sum(), x, create_graph=True)[0].square().mean()


def hessian_vector_product(call: Call, ps: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (g,) = grad(chain(call, ps, x).square().sum(), x, create_graph=True)
    (h,) = grad((g * torch.linspace(-1, 1, WIDTH, dtype=D)).sum(), x, create_graph=True)
    return h.square().mean()


def of_a_hidden_state(call: Call, ps: Any, x: Tensor) -> Tensor:
    """The inner differentiation ends between two units."""
    hidden = call(ps[0], x)
    y = chain(call, ps[1:], hidden)
    (g,) = grad(y.square().sum(), hidden, create_graph=True)
    return g.square().mean() + y.mean()


def through_a_part(call: Call, ps: Any, x: Tensor) -> Tensor:
    """One unit takes part, another one comes between it and the loss."""
    x = x.clone().requires_grad_()
    (g,) = grad(call(ps[1], x).square().sum(), x, create_graph=True)
    return call(ps[2], call(ps[0], g)).square().mean()


def adversarial(call: Call, ps: Any, x: Tensor) -> Tensor:
    """First order, and the graph is freed."""
    x = x.clone().requires_grad_()
    (g,) = grad(chain(call, ps, x).square().sum(), x)
    return chain(call, ps, (x + 0.1 * g.sign()).detach()).square().mean()


def adversarial_of_a_part(call: Call, ps: Any, x: Tensor) -> Tensor:
    """First order; the freed graph has gradients of nothing else, and a weight is used by no other call."""
    y = x.clone().requires_grad_()
    (g,) = grad(chain(call, ps[:2], y).square().sum(), y)
    return chain(call, ps[1:], x + g).square().mean()


def retained(call: Call, ps: Any, x: Tensor) -> Tensor:
    """First order, and the graph serves the loss too."""
    x = x.clone().requires_grad_()
    y = chain(call, ps, x)
    (g,) = grad(y.square().sum(), x, retain_graph=True)
    return (y * g).mean()


def twice(call: Call, ps: Any, x: Tensor) -> Tensor:
    """Several steps of an inner descent, unrolled."""
    for _ in range(2):
        x = x if x.requires_grad else x.clone().requires_grad_()
        (g,) = grad(chain(call, ps, x).square().mean(), x, create_graph=True)
        x = x - 0.5 * g
    return chain(call, ps, x).square().mean()


def values_alone(call: Call, ps: Any, x: Tensor) -> Tensor:
    return chain(call, ps, x).square().mean()


CASES: dict[str, tuple[Call, Call]] = {
    **{
        loss.__name__: (loss, block)
        for loss in (
            *(gradient_penalty, forces, hessian_vector_product, of_a_hidden_state, through_a_part),
            *(adversarial, adversarial_of_a_part, retained, twice),
        )
    },
    "forces inside of a unit": (values_alone, forces_inside),
    "first order inside of a unit": (values_alone, first_order_inside),
}


def weights() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [
        {"w": torch.randn(WIDTH, WIDTH, generator=g, dtype=D) / 3, "b": torch.randn(WIDTH, generator=g, dtype=D)}
        for _ in range(3)
    ]


def batch(rank: int) -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(5), dtype=D)[rank]


@cache
def plain(name: str) -> list[Tensor]:
    loss, fn = CASES[name]
    tree = weights()
    leaves = [x.requires_grad_() for p in tree for x in p.values()]
    total = torch.stack([loss(fn, tree, batch(rank)) for rank in range(2)]).mean()
    found = grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


POLICIES = {
    "default": hp.Policy(pack_below_bytes=0),
    "kept": hp.Policy(release="backward"),
    "no prefetch": hp.Policy(prefetch=0, pack_below_bytes=0),
}


def sharded(rank: int, remat: bool, policy: str) -> dict[str, list[list[Tensor]]]:
    """Returns the gradients of eager, recorded and planned calls, by case."""
    mesh = mesh_of((2,), ("shard",))
    params = hp.shard(weights(), mesh, hp.P("shard"))
    found = {}
    for name, (loss, fn) in CASES.items():
        unit = hp.unit(fn, name="block", remat=remat)
        differentiate = hp.value_and_grad(partial(loss, unit))
        step = hp.sharded(differentiate, mesh, policy=POLICIES[policy], debug=True)
        calls = [run(params, batch(rank))[1] for run in (differentiate, step, step, step)]
        assert step.followed_plan
        found[name] = [[g[key] for g in hp.unshard(grads) for key in ("w", "b")] for grads in calls]
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_those_of_plain_torch(pool: Callable[[int], Pool], remat: bool, policy: str) -> None:
    for found in pool(2).run(sharded, remat, policy):
        for name, calls in found.items():
            for got in calls:
                for g, w in zip(got, plain(name), strict=True):
                    torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-13, msg=name)
