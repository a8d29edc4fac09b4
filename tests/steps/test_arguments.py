"""A unit that changes its arguments is refused where it is computed again; nothing else is."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp

Tensor = torch.Tensor
again: Any = partial(checkpoint, use_reentrant=False)


@dataclass
class Layer:
    keys: Tensor | None = None


class Cache:
    """Like those of transformers: no pytree, layers that are objects, tensors in their attributes."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.seen = 0

    @cached_property
    def size(self) -> int:
        return len(self.layers)


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Tensor | None = None


@dataclass
class Batch:
    table: dict[str, Any] = field(default_factory=lambda: {"a": [torch.ones(3)], "b": (1, {2, 3})})


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "a layer of a cache": (Cache, lambda c, x: setattr(c.layers[1], "keys", x)),
    "a count": (Cache, lambda c, x: setattr(c, "seen", c.seen + 1)),
    "a new layer": (Cache, lambda c, x: c.layers.append(Layer(x))),
    "a slot": (Slotted, lambda c, x: setattr(c, "last", x)),
    "a list": (list, lambda c, x: c.append(x)),
    "a queue": (partial(deque, [1]), lambda c, x: c.popleft()),
    "a dict": (dict, lambda c, x: c.update(keys=x)),
    "a set": (set, lambda c, x: c.add(len(c))),
    "deep inside": (Batch, lambda c, x: c.table["a"].append(x)),
    "a tensor in an object": (Batch, lambda c, x: c.table["a"][0].add_(1)),
    "a tensor": (lambda: torch.zeros(3), lambda c, x: c.add_(x.detach().sum())),
    "a generator": (torch.Generator, lambda c, x: torch.rand(1, generator=c)),
}
HARMLESS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "reading": (Batch, lambda c, x: c.table["a"][0] + 1),
    "a cached property": (Cache, lambda c, x: c.size),
    "an equal number": (Cache, lambda c, x: setattr(c, "seen", int(str(c.seen)))),
    "a copy": (lambda: [1], lambda c, x: [*c, 2].append(3)),
}


def outcome(way: str, made: Any, change: Any, *, inside: bool = False) -> str:
    """Returns the refusal of a differentiation, or "right" after comparing with plain torch."""
    mesh = hp.make_mesh((1,), ("shard",))
    w = torch.arange(1.0, 4.0, dtype=torch.float64)

    def fn(p: Any, x: Tensor, *, held: Any) -> Tensor:
        y = (x * p["w"]).sin()
        change(held, y)
        return y.exp()

    unit = hp.unit(fn, name="block", remat=way == "remat")

    def loss(p: Any, x: Tensor) -> Tensor:
        held = made()
        if way != "checkpoint":
            return unit(p, x, held=held).square().sum()
        return again(lambda x: unit(p, x, held=made() if inside else held).square(), x).sum()

    params = hp.shard({"w": w}, mesh, hp.P("shard"))
    step = hp.sharded(hp.grad(loss), mesh)
    x = torch.ones(3, dtype=torch.float64)
    for run in (hp.grad(loss), step, step):
        try:
            gradient = run(params, x)["w"].local
        except hp.UsageError as error:
            return str(error)
        want = torch.autograd.grad((x * w.requires_grad_()).sin().exp().square().sum(), w)[0]
        torch.testing.assert_close(gradient, want)
    return "right"


@pytest.fixture(autouse=True)
def small() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hp.HpfuncWarning)  # nothing can be hidden
        yield


@pytest.mark.parametrize("way", ["remat", "checkpoint"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_argument_is_named(name: str, way: str) -> None:
    text = outcome(way, *CHANGES[name])
    assert text.startswith("hpfunc.unit: the unit 'block.0' changes its arguments, and is computed again in backward")
    assert f"kwargs['held']: {type(CHANGES[name][0]()).__name__}" in text


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_computed_again_may_change_them(name: str) -> None:
    assert outcome("unit", *CHANGES[name]) == "right"


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_checkpoint_makes_anew_may_change(name: str) -> None:
    assert outcome("checkpoint", *CHANGES[name], inside=True) == "right"


@pytest.mark.parametrize("way", ["remat", "checkpoint"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_change_is_not_refused(name: str, way: str) -> None:
    assert outcome(way, *HARMLESS[name]) == "right"
