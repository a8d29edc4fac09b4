"""Operators of units: what they need, how they are drawn, what they do. `layers` and `oddities` add them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch

from tests.fuzz.cases import Shape

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
