"""What torch's autograd is asked for in a loss and cannot be given: exact texts, on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hpfunc as hp
from tests.helpers.refusals import cases_among, check_texts, mesh, params, texts_of
from tests.helpers.reversible import Again

Tensor = torch.Tensor


def _linear(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] + p["b"]


def _differentiating(loss: Any, x: Tensor | None = None) -> Any:
    kept = params()
    return lambda: hp.value_and_grad(loss)(kept, torch.ones(3, 4) if x is None else x), kept


def _differentiable() -> Tensor:
    return torch.ones(3, 4, requires_grad=True)


# --- writes -----------------------------------------------------------------------------------------------------------
def a_write_into_what_a_unit_saved(rank: int) -> Any:
    layer = hp.unit(_linear, name="layer")

    def loss(p: Any, x: Tensor) -> Tensor:
        h = layer(p["layers"][0], x)
        h += layer(p["layers"][1], h)
        return h.sum()

    return _differentiating(loss)


def a_write_into_an_argument_that_is_used_again(rank: int) -> Any:
    layer = hp.unit(_linear, name="layer", remat=True)

    def loss(p: Any, x: Tensor) -> Tensor:
        y = layer(p["layers"][0], x).sin()
        x.add_(1)
        return y.sum()

    return _differentiating(loss)


# --- arguments that a unit changes ------------------------------------------------------------------------------------
class _Cache:
    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = [{"keys": torch.zeros(3, 4)}]  # of a fixed size


def _filling(p: Any, x: Tensor, *, cache: Any, counts: list[int]) -> Tensor:
    y = x @ p["w"]
    cache.layers[0]["keys"][: len(y)] = y.detach()
    return cache.layers[0]["keys"].sum(0) + y.sin()


def a_cache_that_a_unit_fills(rank: int) -> Any:
    layer = hp.unit(_filling, name="layer", remat=True)
    return _differentiating(lambda p, x: layer(p["layers"][0], x, cache=_Cache(), counts=[0]).sum())


def a_cache_that_a_checkpointed_unit_fills(rank: int) -> Any:
    layer = hp.unit(_filling, name="layer")

    def loss(p: Any, x: Tensor) -> Tensor:
        cache = _Cache()
        return checkpoint(
            lambda x: layer(p["layers"][0], x, cache=cache, counts=[0]).sin(), x, use_reentrant=False
        ).sum()

    return _differentiating(loss)


# --- complex numbers --------------------------------------------------------------------------------------------------
def a_complex_weight_that_is_differentiated(rank: int) -> Any:
    kept = hp.shard({"w": torch.ones(4, 4, dtype=torch.complex64), "n": torch.ones(4).int()}, mesh(), hp.P("shard"))
    return lambda: hp.grad(hp.unit(lambda p: p["w"].abs().sum()))(kept), kept


# --- differentiation inside of the loss -------------------------------------------------------------------------------
def a_backward_inside_of_the_loss(rank: int) -> Any:
    layer = hp.unit(_linear, name="layer")

    def loss(p: Any, x: Tensor) -> Tensor:
        y = layer(p["layers"][0], x).sum()
        y.backward()
        return y

    return _differentiating(loss)


def a_graph_that_the_loss_has_freed(rank: int) -> Any:
    layer = hp.unit(lambda p, x: x.sin() + p["b"], name="layer")

    def loss(p: Any, x: Tensor) -> Tensor:
        y = layer(p["layers"][0], x + 0)
        (force,) = torch.autograd.grad(y.sum(), x)
        return (y + force).sum()

    return _differentiating(loss, _differentiable())


def a_checkpointed_unit_that_the_loss_differentiates(rank: int) -> Any:
    layer = hp.unit(_linear, name="layer")

    def loss(p: Any, x: Tensor) -> Tensor:
        y = checkpoint(lambda h: layer(p["layers"][0], h).sin(), x, use_reentrant=False)
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return force.square().sum()

    return _differentiating(loss, _differentiable())


def a_unit_within_a_reversible_layer(rank: int) -> Any:
    layer = hp.unit(_linear, name="layer")
    return _differentiating(lambda p, x: Again.apply(layer(p["layers"][0], x), partial(layer, p["layers"][1])).sum())


def a_reentrant_checkpoint_inside_of_a_unit(rank: int) -> Any:
    layer = hp.unit(lambda p, x: checkpoint(_linear, p, x, use_reentrant=True), name="layer")
    return _differentiating(lambda p, x: layer(p["layers"][1], hp.unit(_linear)(p["layers"][0], x)).sum())


def a_write_into_an_object_since_the_call(rank: int) -> Any:
    layer = hp.unit(lambda p, x, *, cache: _linear(p, x) * cache.layers[0]["keys"].sum(), name="layer", remat=True)

    def loss(p: Any, x: Tensor) -> Tensor:
        cache = _Cache()
        y = layer(p["layers"][0], x, cache=cache)
        cache.layers[0]["keys"].add_(1)
        return y.sum()

    return _differentiating(loss)


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)
