"""The layers and the loss of the transformer of ``examples/transformer.py`` on torch. It knows nothing of hpfunc."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformer
from transformer import HEAD_DIM, LOOK_BACK, Config, Layers, forward


def init(config: Config) -> dict[str, Any]:
    """Returns fresh weights, drawn from torch's global generator."""
    dtype = getattr(torch, config.dtype)
    return transformer.init(
        config,
        lambda rows, columns, deviation: torch.randn(rows, columns, dtype=dtype) * deviation,
        lambda n: torch.ones(n, dtype=dtype),
    )


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
