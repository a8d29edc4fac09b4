"""The models that the benchmarks train: the same functions, weights and data for every library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

Weights = dict[str, Tensor]
NUM_HEADS = 8


@dataclass(frozen=True, slots=True)
class Model:
    """A stack of equal blocks.

    Attributes:
        kind: ``"transformer"``: pre-norm blocks without embedding and head; ``"many small"``: 200 tensors of 1 to
            64 KiB in each block; ``"few large"``: one square matrix in each block.
        num_blocks: how many.
        width: of the activations.
        num_tokens: rows of activations on a rank, in a micro-batch.
    """

    kind: Literal["transformer", "many small", "few large"] = "transformer"
    num_blocks: int = 8
    width: int = 512
    num_tokens: int = 256

    def weights(self) -> list[Weights]:
        """Returns the weights of each block, equal on all ranks."""
        generator, shapes = torch.Generator().manual_seed(0), _SHAPES[self.kind](self.width)
        return [
            {
                name: torch.ones(shape)
                if len(shape) == 1
                else torch.randn(shape, generator=generator) / shape[-1] ** 0.5  # activations keep their size
                for name, shape in shapes.items()
            }
            for _ in range(self.num_blocks)
        ]

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights in float32."""
        numel = sum(torch.Size(shape).numel() for shape in _SHAPES[self.kind](self.width).values())
        return 4 * numel * self.num_blocks

    @property
    def block(self) -> Callable[[Weights, Tensor], Tensor]:
        """The function of a block."""
        return _BLOCKS[self.kind]

    def batch(self, rank: int, index: int = 0) -> Tensor:
        """Returns the input of a rank in a micro-batch: two sequences, other ones everywhere."""
        shape = (2, self.num_tokens // 2, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1 + rank + 1000 * index))


def _transformer(p: Weights, x: Tensor) -> Tensor:
    d = x.shape[-1]
    heads = linear(layer_norm(x, (d,), p["norm1"]), p["qkv"]).unflatten(-1, (3, NUM_HEADS, d // NUM_HEADS))
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    x = x + linear(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), p["out"])
    return x + linear(gelu(linear(layer_norm(x, (d,), p["norm2"]), p["up"])), p["down"])


def _many_small(p: Weights, x: Tensor) -> Tensor:
    # Each matrix maps a slice of the activations; the slices are of 16 to 128 features.
    out = x
    for weight in p.values():
        size = weight.shape[0]
        out = torch.cat([linear(out[..., :size], weight), out[..., size:]], dim=-1).roll(size, -1)
    return x + gelu(out)


def _few_large(p: Weights, x: Tensor) -> Tensor:
    return x + gelu(linear(x, p["weight"]))


def _shapes_of_transformer(d: int) -> dict[str, tuple[int, ...]]:
    matrices = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    return {**matrices, "norm1": (d,), "norm2": (d,)}


def _shapes_of_many_small(_: int) -> dict[str, tuple[int, ...]]:
    sizes = (16, 32, 48, 64, 80, 96, 112, 128)  # 1 to 64 KiB
    return {f"weight{i:03}": (sizes[i % len(sizes)],) * 2 for i in range(200)}


_SHAPES: dict[str, Callable[[int], dict[str, tuple[int, ...]]]] = {
    "transformer": _shapes_of_transformer,
    "many small": _shapes_of_many_small,
    "few large": lambda d: {"weight": (d, d)},
}
_BLOCKS = {"transformer": _transformer, "many small": _many_small, "few large": _few_large}
