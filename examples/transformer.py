"""A decoder-only transformer on bytes: sizes, weights and the order of its layers. No framework, and no hpfunc.

``model.py`` of a framework adds the three layers and the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Tensor = Any

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
        dtype: name of the dtype of the weights.
    """

    dim: int = 256
    num_layers: int = 4
    context: int = 128
    dtype: str = "float32"


class Layers(NamedTuple):
    """The functions that a model is made of; each takes its own weights first."""

    embed: Callable[..., Tensor]
    block: Callable[..., Tensor]
    head: Callable[..., Tensor]


def init(config: Config, normal: Callable[[int, int, float], Tensor], ones: Callable[[int], Tensor]) -> dict[str, Any]:
    """Returns fresh weights: ``normal(rows, columns, deviation)`` draws a matrix, ``ones(n)`` makes a vector."""
    dim = config.dim

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return normal(rows, columns, scale / columns**0.5)

    def norm() -> dict[str, Tensor]:
        return {"scale": ones(dim), "shift": ones(dim) * 0}

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


def forward(layers: Layers, params: dict[str, Any], inputs: Tensor) -> Tensor:
    """Returns the scores of all next bytes. `layers` are plain functions, or units of them."""
    x = layers.embed(params["embed"], inputs)
    for weights in params["layers"]:
        x = layers.block(weights, x)
    return layers.head(params["head"], x)
