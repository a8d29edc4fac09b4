"""A chain of equal layers, its step and its data, and the ways in which a unit is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.helpers import frameworks as ops
from tests.helpers.frameworks import to_framework

D = 32


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.tanh(ops.linear(x, p["w"], p["b"]))


def layers(count: int, width: int = D) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    tree = [
        {"w": torch.randn(width, width, generator=generator) / 6, "b": torch.randn(width, generator=generator)}
        for _ in range(count)
    ]
    return to_framework(tree)


layer_unit = hp.unit(layer)


def chain(params: Any, x: torch.Tensor, call: Callable[..., Any] = layer_unit) -> torch.Tensor:
    for p in params:
        x = call(p, x)
    return x.square().mean()


def step(params: Any, x: torch.Tensor) -> Any:
    return hp.value_and_grad(chain)(params, x)


def data(rank: int, width: int = D) -> torch.Tensor:
    return to_framework(torch.randn(4, width, generator=torch.Generator().manual_seed(7 + rank)))


again: Any = partial(checkpoint, use_reentrant=False)

WAYS: dict[str, Callable[..., Any]] = {
    "plain": hp.unit,
    "remat": partial(hp.unit, remat=True),
    "checkpoint": lambda fn: partial(again, hp.unit(fn)),
    "checkpointed remat": lambda fn: partial(again, hp.unit(fn, remat=True)),
}
