"""A decoder-only transformer on bytes, as plain functions of trees of tensors. It knows nothing of hpfunc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

NUM_BYTES = 256
HEAD_DIM = 32
LOOK_BACK = 4  # each position begins with its own byte and the three before it


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        dim: width, a multiple of 32.
        num_layers: number of blocks.
        context: the most bytes that it can look at.
        dtype: of the weights.
    """

    dim: int = 256
    num_layers: int = 4
    context: int = 128
    dtype: torch.dtype = torch.float32


class Layers(NamedTuple):
    """The functions that a model is made of; each takes its own weights first."""

    embed: Callable[..., torch.Tensor]
    block: Callable[..., torch.Tensor]
    head: Callable[..., torch.Tensor]


def init(config: Config) -> dict[str, Any]:
    """Returns fresh weights, drawn from torch's global generator."""
    dim, dtype = config.dim, config.dtype

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=dtype) * (scale / columns**0.5)

    def norm() -> dict[str, torch.Tensor]:
        return {"scale": torch.ones(dim, dtype=dtype), "shift": torch.zeros(dim, dtype=dtype)}

    def layer() -> dict[str, Any]:
        small = (2 * config.num_layers) ** -0.5
        attention = {"norm": norm(), "inputs": matrix(3 * dim, dim), "output": matrix(dim, dim, small)}
        mlp = {"norm": norm(), "inputs": matrix(4 * dim, dim), "output": matrix(dim, 4 * dim, small)}
        return {"attention": attention, "mlp": mlp}

    # Entries of size 1: Adam moves all weights at one pace, and the rows of rare bytes need time to turn.
    return {
        "embed": {
            "byte": matrix(NUM_BYTES, dim, dim**0.5),
            "place": matrix(config.context, dim),
            **{f"{back} back": matrix(NUM_BYTES, dim, dim**0.5) for back in range(1, LOOK_BACK)},
        },
        "layers": [layer() for _ in range(config.num_layers)],
        "head": {"norm": norm(), "output": matrix(NUM_BYTES, dim, 0.1)},
    }


def _norm(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weights["scale"], weights["shift"])


def embed(weights: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    """(batch, length) to (batch, length, dim)."""
    x = weights["place"][: inputs.shape[1]] + F.embedding(inputs, weights["byte"])
    for back in range(1, LOOK_BACK):
        x = x + F.embedding(F.pad(inputs, (back, 0))[:, :-back], weights[f"{back} back"])
    return x


def block(weights: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Causal attention, then an MLP, both on a residual stream."""
    attention, mlp = weights["attention"], weights["mlp"]
    batch, length, dim = x.shape
    wide = F.linear(_norm(attention["norm"], x), attention["inputs"])
    q, k, v = wide.view(batch, length, 3, dim // HEAD_DIM, HEAD_DIM).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(seen.transpose(1, 2).reshape(batch, length, dim), attention["output"])
    return x + F.linear(F.gelu(F.linear(_norm(mlp["norm"], x), mlp["inputs"])), mlp["output"])


def head(weights: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """(batch, length, dim) to a score for each next byte, (batch, length, 256)."""
    return F.linear(_norm(weights["norm"], x), weights["output"])


PLAIN = Layers(embed, block, head)


def forward(layers: Layers, params: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    """Returns the scores of all next bytes. `layers` are those of this module, or units of them."""
    x = layers.embed(params["embed"], inputs)
    for weights in params["layers"]:
        x = layers.block(weights, x)
    return layers.head(params["head"], x)


def loss(layers: Layers, params: dict[str, Any], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats."""
    return F.cross_entropy(forward(layers, params, inputs).flatten(0, 1), labels.flatten())


@torch.no_grad()
def generate(params: dict[str, Any], prompt: bytes, count: int, context: int, seed: int) -> bytes:
    """Returns the prompt and `count` bytes drawn after it, from whole weights."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        scores = forward(PLAIN, params, torch.tensor([text[-context:]]))[0, -1].float()
        text.append(int(torch.multinomial((scores / 0.8).softmax(0), 1, generator=generator)))
    return bytes(text)
