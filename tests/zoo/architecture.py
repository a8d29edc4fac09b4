"""`Architecture`: a model that somebody else wrote, with a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.zoo.sizes import FIRST_WORD, LAST_WORD

Tensor = torch.Tensor
Batch = dict[str, Any]
SAMPLES = 2  # of each rank


def loss_of(outputs: Any) -> Tensor:
    """Returns the loss that a model computes itself, or else one to which all its outputs contribute."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    terms = [torch.where(torch.isfinite(x), x, 0.0) for x in _trained(outputs)]
    if not terms:
        raise ValueError("no output depends on the parameters")
    return torch.stack([((x + _direction(x)).square()).mean() for x in terms]).sum()


def _direction(x: Tensor) -> Tensor:
    # Not the same for all elements: the mean and the squares of what a norm returns are constant.
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


def _trained(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() and outputs.requires_grad else []
    if isinstance(outputs, dict):
        return [x for value in outputs.values() for x in _trained(value)]
    if isinstance(outputs, list | tuple):
        return [x for value in outputs for x in _trained(value)]
    return _trained(getattr(outputs, "sample", None)) if hasattr(outputs, "sample") else []


@dataclass(frozen=True)
class Architecture:
    """A model from a small configuration.

    Attributes:
        name: ``"task:model"``; no two have the same.
        kind: what it is, for readers.
        build: returns it, the same on every call.
        batch: returns the keyword arguments of one rank's call, by a seed.
        loss: of its outputs.
        full: returns it in its usual size, to be called on the meta device; None: nobody knows.
    """

    name: str
    kind: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor] = loss_of
    full: Callable[[], torch.nn.Module] | None = None


# --- batches ----------------------------------------------------------------------------------------------------------
def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, length: int = 8) -> Tensor:
    return torch.randint(FIRST_WORD, LAST_WORD, (SAMPLES, length), generator=drawn(seed))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=drawn(seed))


def images(seed: int, size: int = 32, channels: int = 3) -> Tensor:
    return noise(seed, channels, size, size)
