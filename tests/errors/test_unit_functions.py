"""What goes wrong inside of the function of a unit: exact texts, on all ranks, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpfunc as hp
from tests.helpers.refusals import cases_among, check_texts, linear, mesh, params, texts_of, total_loss, x

Tensor = torch.Tensor


# --- arrays that are not among its weights --------------------------------------------------------------------------
def a_unit_that_closes_over_an_array(rank: int) -> Any:
    kept = params()
    other = kept["layers"][1]["w"]
    unit = hp.unit(lambda p, x: F.linear(x @ p["w"], other), name="attention")
    return lambda: unit(kept["layers"][0], x()), kept


def a_unit_of_a_loss_that_closes_over_an_array(rank: int) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        unit = hp.unit(lambda first, x: (x @ first["w"] * p["layers"][1]["b"]).sum(), name="scale")
        return unit(p["layers"][0], x)

    kept = params()
    return lambda: hp.sharded(hp.value_and_grad(loss), mesh())(kept, x()), kept


def a_unit_that_asks_an_array_for_its_transpose(rank: int) -> Any:
    kept = params()
    other = kept["layers"][1]["w"]
    return lambda: hp.unit(lambda p, x: x @ other.T, name="tied")(kept["layers"][0], x()), kept


# --- units inside of units ------------------------------------------------------------------------------------------
def a_unit_of_the_weights_of_an_outer_unit(rank: int) -> Any:
    inner = hp.unit(lambda w, x: x @ w, name="inner")
    outer = hp.unit(lambda p, x: inner(p["w"], x).sum(), name="outer")
    kept = params()
    return lambda: hp.grad(outer)(kept["layers"][0], x()), kept


# --- dtypes ---------------------------------------------------------------------------------------------------------
def inputs_that_are_not_cast(rank: int) -> Any:
    kept = params()
    grad = hp.value_and_grad(total_loss(linear), numerics=hp.Numerics(param_dtype="bfloat16"))
    return lambda: hp.sharded(grad, mesh())(kept, x()), kept


def inputs_of_half_the_bits(rank: int) -> Any:
    kept = params()
    return lambda: hp.unit(linear)(kept["layers"][0], x().half()), kept


def inputs_of_a_module_that_are_not_cast(rank: int) -> Any:
    torch.manual_seed(0)
    apply, plain = hp.from_module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    kept = hp.shard(plain, mesh(), hp.P("shard"))
    grad = hp.value_and_grad(lambda p, x: apply(p, x).sum(), numerics=hp.Numerics(param_dtype="bfloat16"))
    return lambda: grad(kept, x()), kept


CASES = cases_among(globals())


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    check_texts(texts_of(CASES[name]), name)


# --- what is not explained --------------------------------------------------------------------------------------------
def causes(rank: int) -> list[Any]:
    kept, batch = params(), x()
    found = []
    for fn, given in ((linear, batch.half()), (linear, torch.ones(3, 5)), (linear, None)):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            hp.unit(fn)(kept["layers"][0], given)
        found.append((type(caught.value).__name__, type(caught.value.__cause__).__name__))
    return found


def test_the_error_of_the_framework_is_the_cause_and_others_are_left_as_they_are(pool: Any) -> None:
    for found in pool(2).run(causes):
        assert found == [("LeafError", "RuntimeError"), ("RuntimeError", "NoneType"), ("TypeError", "NoneType")]


def test_a_module_without_weights_of_its_own_is_a_function() -> None:
    class Scale(nn.Module):
        def forward(self, w: Tensor, x: Tensor) -> Tensor:
            return w * x

    one = hp.make_mesh((1,), ("shard",))
    w = hp.shard(torch.full((2,), 3.0), one, hp.P("shard"))
    assert hp.unit(Scale())(w, torch.ones(2)).tolist() == [3.0, 3.0]
