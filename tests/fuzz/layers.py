"""Layers as models have them, and what makes their gradients strided, expanded or shared.

Each takes activations of shape (batch, 6) and weights, and returns activations.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F

from tests.fuzz import functions as fn
from tests.fuzz.cases import WIDTH as W
from tests.fuzz.registry import Need, Options, Tensor, World, op
from tests.fuzz.views import SHAPES


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


@op((7, W), weight=0.15)
def sparse_embedding(x: Tensor, w: Tensor, world: World) -> Tensor:
    return x + F.embedding((x.detach() > 0).long().sum(1), w, sparse=True)


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
