"""A unit that changes its arguments, and is computed again: `remat` shows it them as they were; else it is refused."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
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
    __slots__ = ("first", "last")
    first: Tensor

    def __init__(self) -> None:
        self.last: Tensor | None = None


class Odd(dict[str, Any]):
    """A dict that refuses changes from outside, as the outputs of transformers do."""

    def clear(self) -> None:
        raise TypeError

    def __delitem__(self, key: str) -> None:
        raise TypeError


@dataclass(frozen=True)
class Holder:
    found: Any


@dataclass
class Batch:
    table: dict[str, Any] = field(default_factory=lambda: {"a": [torch.ones(3)], "b": (1, {2, 3})})


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "a layer of a cache": (Cache, lambda c, x: setattr(c.layers[1], "keys", x)),
    "a count": (Cache, lambda c, x: setattr(c, "seen", c.seen + 1)),
    "a new layer": (Cache, lambda c, x: c.layers.append(Layer(x))),
    "a slot": (Slotted, lambda c, x: setattr(c, "last", x)),
    "a slot that was empty": (Slotted, lambda c, x: setattr(c, "first", x)),
    "an attribute": (Cache, lambda c, x: setattr(c, "new", x)),
    "an attribute that goes": (Cache, lambda c, x: delattr(c, "seen")),
    "a user's dict": (UserDict, lambda c, x: c.update(keys=x)),
    "an ordered dict": (lambda: Holder(OrderedDict(a=1, b=2)), lambda c, x: c.found.update({"c": c.found.pop("a")})),
    "a dict that refuses": (lambda: Holder(Odd(a=1)), lambda c, x: c.found.update(a=x, b=x)),
    "a list in an object": (lambda: Holder([1, 2]), lambda c, x: c.found.insert(0, c.found.pop())),
    "a queue in an object": (lambda: Holder(deque([1], 3)), lambda c, x: c.found.popleft()),
    "a set in an object": (lambda: Holder({7}), lambda c, x: c.found.add(len(c.found))),
    "a list": (list, lambda c, x: c.append(x)),
    "a queue": (partial(deque, [1]), lambda c, x: c.popleft()),
    "a dict": (dict, lambda c, x: c.update(keys=x)),
    "a set": (set, lambda c, x: c.add(len(c))),
    "deep inside": (Batch, lambda c, x: c.table["a"].append(x)),
}
WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
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
    every = []

    def loss(p: Any, x: Tensor) -> Tensor:
        held = made()
        every.append(held)
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
        if not inside:
            change(once := made(), x)
            assert picture(every[-1]) == picture(once)
    return "right"


def picture(x: Any) -> Any:
    """Returns what an object holds, without the values of tensors."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    if isinstance(x, torch.Generator | int | str | float | None):
        return None if isinstance(x, torch.Generator) else x
    parts = [(key, picture(value)) for key, value in x.items()] if isinstance(x, Mapping) else []
    parts += list(map(picture, x)) if isinstance(x, list | tuple | set | deque) else []
    names = [*getattr(type(x), "__slots__", ()), *getattr(x, "__dict__", {})]
    return type(x), parts, sorted((name, picture(getattr(x, name))) for name in names if hasattr(x, name))


@pytest.fixture(autouse=True)
def small() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hp.HpfuncWarning)  # nothing can be hidden
        yield


EVERY = CHANGES | WRITES


@pytest.mark.parametrize(("name", "way"), [(n, "checkpoint") for n in EVERY] + [(n, "remat") for n in WRITES])
def test_a_changed_argument_is_named(name: str, way: str) -> None:
    text = outcome(way, *EVERY[name])
    assert text.startswith("hpfunc.unit: the unit 'block.0' changes its arguments, and is computed again in backward")
    assert f"kwargs['held']: {type(EVERY[name][0]()).__name__}" in text


@pytest.mark.parametrize("name", CHANGES)
def test_remat_sees_the_arguments_as_they_were(name: str) -> None:
    assert outcome("remat", *CHANGES[name]) == "right"


@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_computed_again_may_change_them(name: str) -> None:
    assert outcome("unit", *EVERY[name]) == "right"


@pytest.mark.parametrize("name", EVERY)
def test_what_a_checkpoint_makes_anew_may_change(name: str) -> None:
    assert outcome("checkpoint", *EVERY[name], inside=True) == "right"


@pytest.mark.parametrize("way", ["remat", "checkpoint"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_change_is_not_refused(name: str, way: str) -> None:
    assert outcome(way, *HARMLESS[name]) == "right"


# --- a cache that several units share ---------------------------------------------------------------------------------
def concatenating(p: Any, x: Tensor, *, cache: Any, log: list[int], index: int) -> Tensor:
    """Reads what is in the cache, its own entry and those of the others, and adds to it."""
    cache.seen += 1
    log.append(cache.seen)
    if len(cache.layers) <= index:
        cache.layers.append(Layer())
    layer, new = cache.layers[index], (x * p["w"]).sin()
    layer.keys = new[None] if layer.keys is None else torch.cat([layer.keys, new[None]])
    return layer.keys.sum(0) * cache.seen + sum(other.keys.sum(0) for other in cache.layers[:index])


def chained(call: Any, w: list[Any], x: Tensor) -> tuple[Tensor, Any, list[int]]:
    cache, log = Cache(), []
    cache.layers.clear()
    for _ in range(2):  # the second time each adds to what it has
        for index, each in enumerate(w):
            x = call({"w": each}, x, cache=cache, log=log, index=index)
    return x.square().sum(), cache, log


@pytest.mark.parametrize("planned", [False, True])
def test_units_that_share_a_cache_see_it_as_they_did(planned: bool) -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    whole = [torch.linspace(0.1, 1.0, 3, dtype=torch.float64) * (i + 1) for i in range(3)]
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    plain = [w.clone().requires_grad_() for w in whole]
    loss, cache, log = chained(concatenating, plain, x)
    loss.backward()
    caches = []

    def fn(params: Any, x: Tensor) -> Tensor:
        loss, *rest = chained(hp.unit(concatenating, remat=True), params, x)
        caches.append(rest)
        return loss

    step: Any = hp.value_and_grad(fn)
    step = hp.sharded(step, mesh) if planned else step
    params = hp.shard(whole, mesh, hp.P("shard"))
    for _ in range(3):
        found, grads = step(params, x)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        for got, w in zip(grads, plain, strict=True):
            torch.testing.assert_close(got.local, w.grad, rtol=1e-12, atol=0)
        (ours, numbers), *_ = reversed(caches)
        assert (ours.seen, numbers) == (cache.seen, log)
        for a, b in zip(ours.layers, cache.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, rtol=1e-12, atol=0)


def test_a_write_since_the_call_is_refused() -> None:
    mesh = hp.make_mesh((1,), ("shard",))
    params = hp.shard({"w": torch.ones(3)}, mesh, hp.P("shard"))

    def loss(p: Any) -> Tensor:
        held = Batch()
        y = hp.unit(lambda p, *, held: (p["w"] * held.table["a"][0]).sin(), name="block", remat=True)(p, held=held)
        held.table["a"][0].add_(1)
        return y.sum()

    with pytest.raises(hp.UsageError, match=r"arguments of the unit 'block.0' were written to since its call"):
        hp.grad(loss)(params)


class Stubborn:
    """Does not take its former contents."""

    def __init__(self) -> None:
        self.__dict__["held"] = Rows([1])


class Rows(list[int]):
    def extend(self, values: Any) -> None:
        list.extend(self, [*values, 0])


def test_an_object_that_cannot_be_put_back_is_refused() -> None:
    text = outcome("remat", Stubborn, lambda c, x: c.held.append(2))
    assert text.startswith("hpfunc.unit: the unit 'block.0' changes its arguments")
