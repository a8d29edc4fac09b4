"""What a unit may compute: each operator takes activations of shape (batch, 6) and weights, and returns activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from tests.fuzz import functions as fn
from tests.fuzz.cases import WIDTH as W
from tests.fuzz.cases import Shape
from tests.fuzz.views import CONSUMERS, SHAPES, consume, draw_steps, follow

Tensor = torch.Tensor
Options = dict[str, Any]


class World(Protocol):
    """What differs between hpfunc and plain torch inside of a unit."""

    def psum(self, x: Tensor) -> Tensor: ...

    def pvary(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Need:
    """A weight that an operator needs. See `cases.Array`."""

    shape: Shape
    dtype: str = "float64"
    kind: str = ""
    tp_dim: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """An operator: what it needs, drawn, and what it does.

    Attributes:
        weight: how often it is drawn.
        only: ``"tp"``, ``"ep"``: where.
        tags: features, for the summary; ``"bad"`` is what plain torch refuses in backward, ``"writes input"`` says
            itself.
    """

    draw: Callable[[Random], tuple[list[Need], Options]]
    apply: Callable[..., Tensor]
    weight: float = 1.0
    only: str = ""
    tags: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {}


def op(
    *shapes: Shape | Need,
    draw: Callable[[Random], tuple[list[Need], Options]] | None = None,
    weight: float = 1.0,
    only: str = "",
    tags: Sequence[str] = (),
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Adds an operator under the name of its function."""
    needs = [shape if isinstance(shape, Need) else Need(shape) for shape in shapes]

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = function.__name__.strip("_")
        KINDS[name] = Kind(draw or (lambda rng: (needs, {})), function, weight, only, tuple(tags))
        return function

    return add


def _b(x: Tensor) -> Tensor:
    return x.reshape(-1, 2, W)  # (batch, time, features)


# --- everyday layers ------------------------------------------------------------------------------------------------
@op((W, W), (W,), weight=3)
def linear(x: Tensor, w: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, w, b)


@op((3, W), (W, 3), weight=2)
def mlp(x: Tensor, up: Tensor, down: Tensor, world: World) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, up)), down)


@op((W, W), weight=2)
def matmul(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.tanh(x @ w)


@op((W, W))
def transposed_matmul(x: Tensor, w: Tensor, world: World) -> Tensor:
    return _b(x).matmul(w.t()).reshape(-1, W)


@op((W,), (W,))
def layer_norm(x: Tensor, w: Tensor, b: Tensor, world: World) -> Tensor:
    return F.layer_norm(x, (W,), w, b)


@op((W,))
def rms_norm(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.rms_norm(x, (W,), w)


@op((7, W))
def embedding(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x + F.embedding((x.detach() > 0).long().sum(1), w)


@op((W,), (5,))
def embedding_of_one(x: Tensor, w: Tensor, table: Tensor, world: World) -> Tensor:
    return x * w + table[(x.detach() > 0).long().sum(1) % 5][:, None]


@op((W, W, 1))
def conv1d(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.conv1d(_b(x).mT, w).mT.reshape(-1, W)


@op((W, W, 1, 3))
def conv2d_channels_last(x: Tensor, w: Tensor, world: World) -> Tensor:
    image = x.reshape(-1, 2, 1, W).permute(0, 3, 2, 1).contiguous(memory_format=torch.channels_last)
    return F.conv2d(image, w, padding=(0, 1)).permute(0, 3, 2, 1).reshape(-1, W)


@op((W, W), (W, W), (W, W))
def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, world: World) -> Tensor:
    heads = [F.linear(_b(x), w).view(-1, 2, 2, 3).transpose(1, 2) for w in (q, k, v)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, W)


@op((W,))
def dropout(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.dropout(x * w, 0.25)


# --- gradients that are not contiguous ------------------------------------------------------------------------------
def _draw_einsum(rng: Random) -> tuple[list[Need], Options]:
    sizes = {"f": W, "h": 2, "k": 3}
    order, out = rng.sample("fhk", 3), rng.sample("bthk", 4)
    return [Need(tuple(sizes[i] for i in order))], {"equation": f"btf,{''.join(order)}->{''.join(out)}"}


@op(draw=_draw_einsum, weight=3, tags=["strided gradient"])
def einsum(x: Tensor, w: Tensor, world: World, equation: str) -> Tensor:
    out = torch.einsum(equation, _b(x), w)
    place = [equation[-4:].index(i) for i in "bthk"]
    return out.permute(place).reshape(-1, W)


@op((W, W), weight=2, tags=["strided gradient"])
def einsum_oi(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.einsum("bti,oi->bto", _b(x), w).reshape(-1, W)


@op((2, W, W), weight=2, tags=["strided gradient"])
def bmm_transposed(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.bmm(_b(x).transpose(0, 1), w.transpose(1, 2)).transpose(0, 1).reshape(-1, W)


@op((2, W, W))
def bmm(x: Tensor, w: Tensor, world: World) -> Tensor:
    return torch.bmm(_b(x).transpose(0, 1), w).transpose(0, 1).reshape(-1, W)


@op((2, W, W))
def expert_by_row(x: Tensor, w: Tensor, world: World) -> Tensor:
    parts = _b(x).unbind(1)
    return torch.stack([F.linear(part, w[i]) for i, part in enumerate(parts)], 1).reshape(-1, W)


# --- one gradient for several weights, expanded ones ----------------------------------------------------------------
@op((W, W), (W, W), weight=3, tags=["one gradient for two weights"])
def base_plus_delta(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, a + b)


@op((W,), (W,), (W,), tags=["one gradient for two weights"])
def three_added(x: Tensor, a: Tensor, b: Tensor, c: Tensor, world: World) -> Tensor:
    return x * (a + b + c)


@op((W, W), (W, W), tags=["one gradient for two weights"])
def added_and_shared(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, fn.SharesOne.apply(a, b))


@op((W, W), (W, W), tags=["one gradient for two weights"])
def added_and_views(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, fn.SharesViews.apply(a, b))


@op((W, W), (W, W), tags=["one gradient for two weights"])
def added_transposed(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, a + b.t())


@op((W,), (1,), ())
def broadcast(x: Tensor, a: Tensor, one: Tensor, zero: Tensor, world: World) -> Tensor:
    return x * (a.expand(x.shape[0], W) + one.expand(W)) + zero


@op(draw=lambda rng: ([Need(rng.choice(SHAPES))], {}), weight=2, tags=["expanded gradient"])
def whole_sum(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x + 0.3 * w.sum()


@op((2, W), (4, W))
def cat(x: Tensor, a: Tensor, b: Tensor, world: World) -> Tensor:
    return F.linear(x, torch.cat([a, b]))


@op((W,), (W,), (W,))
def stack(x: Tensor, a: Tensor, b: Tensor, c: Tensor, world: World) -> Tensor:
    return F.linear(x, torch.stack([a, b, c]).repeat(2, 1))


@op((2 * W, W))
def chunk(x: Tensor, w: Tensor, world: World) -> Tensor:
    gate, up = w.chunk(2)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@op((8, W))
def rows_by_index(x: Tensor, w: Tensor, world: World) -> Tensor:
    return F.linear(x, w[[0, 2, 2, 5, 7, 1]])


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


@op((W, W), (W,), weight=0.3, tags=["in place", "bad"])
def saved_then_written(x: Tensor, w: Tensor, b: Tensor, world: World) -> Tensor:
    y = torch.sigmoid(F.linear(x, w))
    return y.add_(b)


@op((W, W), weight=0.3, tags=["in place", "bad"])
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
