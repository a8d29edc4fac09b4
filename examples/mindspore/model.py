"""The layers and the loss of the transformer of ``examples/transformer.py`` on MindSpore. It knows nothing of hpfunc.

Weights go into products and `gather` as they are: what autograd saves of a view of a weight is a copy.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import transformer
from mindspore import mint, ops
from transformer import HEAD_DIM, LOOK_BACK, Config, Layers, forward

Tensor = Any


def init(config: Config) -> dict[str, Any]:
    """Returns fresh weights, drawn from numpy's global generator."""
    dtype = np.dtype(config.dtype)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return mindspore.Tensor.from_numpy((np.random.standard_normal((rows, columns)) * deviation).astype(dtype))

    return transformer.init(config, normal, lambda n: mindspore.Tensor.from_numpy(np.ones(n, dtype)))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    rows = ops.MatMul(transpose_b=True)(x.reshape(-1, x.shape[-1]), weight)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def _norm(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return ops.LayerNorm(-1, -1, 1e-5)(x, weights["scale"], weights["shift"])[0]


def embed(weights: dict[str, Any], inputs: Tensor) -> Tensor:
    """(batch, length) to (batch, length, dim)."""
    batch, length = inputs.shape
    x = weights["place"][:length] + ops.gather(weights["byte"], inputs, 0)
    for back in range(1, LOOK_BACK):
        shifted = mint.cat([mint.zeros((batch, back), dtype=inputs.dtype), inputs[:, :-back]], 1)
        x = x + ops.gather(weights[f"{back} back"], shifted, 0)
    return x


def block(weights: dict[str, Any], x: Tensor) -> Tensor:
    """Causal attention, then an MLP, both on a residual stream."""
    attention, mlp = weights["attention"], weights["mlp"]
    batch, length, dim = x.shape
    wide = _linear(_norm(attention["norm"], x), attention["inputs"])
    heads = dim // HEAD_DIM
    # On a CPU copies of strided views, and products of four dims, would take twice as long.
    parts = ops.split(ops.transpose(wide.reshape(batch, length, 3, heads, HEAD_DIM), (2, 0, 3, 1, 4)), 1)
    q, k, v = (part.reshape(batch * heads, length, HEAD_DIM) for part in parts)
    scores = ops.BatchMatMul(transpose_b=True)(q, k) * HEAD_DIM**-0.5
    future = mindspore.Tensor.from_numpy(np.triu(np.ones((length, length), bool), 1))
    seen = ops.BatchMatMul()(ops.softmax(ops.masked_fill(scores, future, -1e9), -1), v)
    seen = ops.transpose(seen.reshape(batch, heads, length, HEAD_DIM), (0, 2, 1, 3))
    x = x + _linear(seen.reshape(batch, length, dim), attention["output"])
    return x + _linear(ops.gelu(_linear(_norm(mlp["norm"], x), mlp["inputs"]), "none"), mlp["output"])


def head(weights: dict[str, Any], x: Tensor) -> Tensor:
    """(batch, length, dim) to a score for each next byte, (batch, length, 256)."""
    return _linear(_norm(weights["norm"], x), weights["output"])


PLAIN = Layers(embed, block, head)


def loss(layers: Layers, params: dict[str, Any], inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats."""
    scores = forward(layers, params, inputs)
    return ops.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


def generate(params: dict[str, Any], prompt: bytes, count: int, context: int, seed: int) -> bytes:
    """Returns the prompt and `count` bytes drawn after it, from whole weights."""
    rng, text = np.random.default_rng(seed), list(prompt)
    for _ in range(count):
        recent = text[-context:]
        inputs = np.zeros((1, context), np.int32)  # always of one size: operators prepare themselves for each anew
        inputs[0, : len(recent)] = recent
        scores = forward(PLAIN, params, mindspore.Tensor.from_numpy(inputs))
        scores = scores[0, len(recent) - 1].asnumpy().astype(np.float64) / 0.8
        odds = np.exp(scores - scores.max())
        text.append(int(rng.choice(len(odds), p=odds / odds.sum())))
    return bytes(text)
