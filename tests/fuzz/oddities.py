"""Operators that are seldom: chains of views, odd sizes, writes in place, functions that keep their gradients, axes."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz import functions as fn
from tests.fuzz.cases import WIDTH as W
from tests.fuzz.registry import Need, Options, Tensor, World, op
from tests.fuzz.views import CONSUMERS, SHAPES, consume, draw_steps, follow


# --- views ----------------------------------------------------------------------------------------------------------
def _draw_views(rng: Random) -> tuple[list[Need], Options]:
    shape = rng.choice(SHAPES)
    consumer = rng.choice(list(CONSUMERS))
    return [Need(shape)], {"steps": draw_steps(rng, shape, rng.randint(1, 4)), "into": consumer}


@op(draw=_draw_views, weight=8, tags=["view"])
def view(x: Tensor, w: Tensor, world: World, steps: Any, into: str) -> Tensor:
    return x * (1 + 0.3 * consume(into, follow(w, steps), x))


@op((3, 2), weight=2, tags=["complex view"])
def rotary(x: Tensor, w: Tensor, world: World) -> Tensor:
    z = torch.view_as_complex(x.reshape(-1, 3, 2))
    return torch.view_as_real(z * torch.view_as_complex(w)).reshape(-1, W)


@op((3, 2), tags=["complex view"])
def rotary_conj(x: Tensor, w: Tensor, world: World) -> Tensor:
    z = torch.view_as_complex(x.reshape(-1, 3, 2))
    return torch.view_as_real(z * torch.view_as_complex(w).conj()).reshape(-1, W)


@op((4, 2), tags=["complex view"])
def spectral(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x + torch.fft.irfft(torch.fft.rfft(x, n=W) * torch.view_as_complex(w), n=W)


def _draw_complex(rng: Random) -> tuple[list[Need], Options]:
    steps = draw_steps(rng, (3,), rng.randint(0, 2), torch.complex128)
    return [Need((3,), "complex128")], {"steps": steps, "into": rng.choice(list(CONSUMERS))}


@op(draw=_draw_complex, weight=0.5, tags=["complex weight"])
def complex_weight(x: Tensor, w: Tensor, world: World, steps: Any, into: str) -> Tensor:
    return x * (1 + 0.3 * consume(into, follow(w, steps), x))


@op(Need((W,), "int64"), weight=0.7, tags=["integer weight"])
def table(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x[:, w]


@op(Need((W,), "bool"), weight=0.5, tags=["integer weight"])
def masked(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.where(w, x, 0.5 * x)


# --- sizes ----------------------------------------------------------------------------------------------------------
@op(draw=lambda rng: ([Need((rng.choice([0, 1, 2]), W)), Need((rng.choice([0, 3]), 2))], {}), weight=1.5)
def empty(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return x + F.linear(x, a).sum(1, keepdim=True) + b.sum()


@op((3, 0), (W, 0))
def empty_columns(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return x + a.sum() + (x @ b) @ b.t()


@op(())
def scalar(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x * w


# --- in place -------------------------------------------------------------------------------------------------------
@op((W, W), weight=2, tags=["in place"])
def relu_(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.linear(x, w).relu_()


@op((W, W), (W,), tags=["in place"])
def added_in_place(x: Tensor, w: Tensor, b: Tensor, world: World) -> Tensor:
    y = F.linear(x, w)
    y += b
    y[:, 0].mul_(2)
    return y.add_(x)


@op((W, W), (W,), weight=0.8, tags=["in place", "bad"])
def saved_then_written(x: Tensor, w: Tensor, b: Tensor, world: World) -> Tensor:
    y = torch.sigmoid(F.linear(x, w))
    return y.add_(b)


@op((W, W), weight=0.8, tags=["in place", "bad"])
def squared_then_written(x: Tensor, w: Tensor, world: World) -> Tensor:
    y = F.linear(x, w)
    z = y.square()
    y[0].zero_()
    return z + 0.1 * y


@op((W,), weight=0.3, tags=["in place", "writes input"])
def input_written(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x.add_(0.5) * w


# --- functions whose gradients are not theirs to give ---------------------------------------------------------------
@op((W, W), tags=["function"])
def keeps_gradient(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.KeepsGradient.apply(x, w)


@op((W, W), tags=["function", "strided gradient"])
def gives_transposed(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.Transposed.apply(x, w)


@op((W, W), tags=["function"])
def gives_slice(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.Attribute.apply(x, w)


@op(draw=lambda rng: ([Need(rng.choice(SHAPES))], {}), tags=["function", "expanded gradient"])
def gives_expanded(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.Expanded.apply(x, w)


@op((W,), tags=["function", "conj or neg gradient"])
def gives_negated(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.Negated.apply(x, w)


@op((W,), tags=["function", "conj or neg gradient"])
def gives_imaginary(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.ImaginaryPart.apply(x, w)


@op((W,), tags=["function", "gradient None"])
def gives_none(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.NoGradient.apply(x, w)


@op((W,), tags=["function", "the weight as gradient"])
def gives_weight(x: Tensor, w: Tensor, world: World) -> Tensor:
    return fn.WeightItself.apply(x, w)


@op((W,), (W,), tags=["function", "the weight as gradient"])
def gives_other(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return fn.OtherWeight.apply(x, a, b)


@op((W, W), (W, W), tags=["function", "one gradient for two weights"])
def passes_on(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, fn.PassesOn.apply(a) + b)


@op((W, W), tags=["hook"])
def hooked(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.linear(x, fn.hooked(w))


@op((W,))
def without_grad(x: Tensor, w: Tensor, world: World) -> Tensor:
    with torch.no_grad():
        scale = (x * w).mean()
    return x * scale


@op((W, W))
def detached(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.linear(x, w.detach())


# --- other axes -----------------------------------------------------------------------------------------------------
@op(Need((8, W), kind="tp", tp_dim=0), Need((W, 8), kind="tp", tp_dim=1), weight=6, only="tp")
def tensor_parallel(x: Tensor, up: Tensor, down: Tensor, world: World) -> Tensor:
    return x + world.psum(F.gelu(F.linear(world.pvary(x), up)) @ down.t())


@op(Need((4, W, W), kind="ep"), weight=6, only="ep", tags=["strided gradient"])
def experts(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.bmm(x.expand(w.shape[0], *x.shape), w.transpose(1, 2)).sum(0)


@op(Need((4, W), kind="ep"), weight=3, only="ep")
def expert_gains(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x * w.sum(0)
